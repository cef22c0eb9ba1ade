"""The folder of small files through which the ranks of a job and their supervisor talk.

The supervisor names it in the environment. R is a rank.

begun     the supervisor's process id, the number of ranks that it requested, and its host
launcher  the launcher's process id
shell.R   the host of the shell around R, and the process ids of its parent, itself and R (see mpiexec.py)
rank.R    R's process id, from the moment it knows its rank
collectives.R  the collective that R waits in, and the last ones before (see _CollectiveRecorder)
reporter  the rank that says why the job fails, or "supervisor"
failed    the exit code of the job that the reporter asks for
interrupted  the signal after which rank 0 has saved, and ends
ending    rank 0 has saved, or its time is over: the other ranks close their environments
meets.R   R loads MPI, and waits there for all other ranks
ended.R   R has reached its end: together with all other ranks, or without having loaded MPI
state.R   T if R, on another host, is stopped by a signal
status.R  R's exit status, as its shell gives it
out.R, err.R  what R wrote to stdout and stderr before it failed has come through the launcher
resume    the folder of the run with which a restarted job continues
hosts     the hosts that are left, as --hosts takes them, once one is lost
environment  the variables that only ranks on this host get, as commands of a shell (see hosts.py)

Ranks on other hosts do not see the folder. They and their shells send a file as a line on stderr, and the
supervisor writes it here. Such files hold no process ids, because those mean nothing on this host. The files
out.R and err.R are lines on the stream that they are about.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rank0rl.launch import printable

FOLDER = "RANK0RL_JOB"
TERMINAL = "RANK0RL_TERMINAL"  # columns of the supervisor's terminal, or empty
TIMEOUT = "RANK0RL_COLLECTIVE_TIMEOUT"  # seconds that a rank may wait in a collective, if limited
START_TIMEOUT = "RANK0RL_START_TIMEOUT"  # seconds for MPI to begin, where no supervisor waits
GPU_PCT = "RANK0RL_GPU_PCT"  # share of a GPU's memory for each rank, if limited
RESUME = "RANK0RL_RESUME"  # folder of the run with which a restarted job continues
TOLD = "RANK0RL_TOLD"  # file for the run's folder, if a Python program waits for the run
GROUP = "RANK0RL_GROUP"  # number of processes of each rank, if there are several
MPMD = "RANK0RL_MPMD"  # number of ranks of this program, if other programs are in the job
HOSTS = "RANK0RL_HOSTS"  # hosts of a restarted job, once one is lost
END_SIGNALS = tuple(getattr(signal, s) for s in ("SIGTERM", "SIGUSR1") if hasattr(signal, s))
"""Signals by which a batch system asks a job to end, sent to any or all of its processes."""
rows_are_on_rank0 = False
"""True on a rank above 0 that has sent its rows to rank 0."""
_REPORT_S = 2.0  # time for another rank to print its report
_PARENT = os.getppid()  # of a rank, the shell around it
# What `mpiexec -l` of MPICH and `--output tag` of Open MPI put before each line.
_TAG = rb"(?m:^\[(?:\S+,)?\d+\](?:<std(?:out|err)>:)? )?"

# The variables of launchers for their ranks: Open MPI, whose ranks may have those of a step of Slurm too; MPICH, Intel MPI
# and MS-MPI; Slurm's srun.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_OF_RANKS = (
    *(*_SIZES, *_RANKS, "SLURM_LOCALID", "SLURM_NODEID"),
    *("PMI_", "PMIX_", "MPI_LOCAL", "HYDI_", "OMPI_COMM_", "OMPI_MCA_ess", "PRTE_"),
)
_OF_USERS = "PRTE_MCA_"  # settings, which a launcher reads


class WrongLaunch(RuntimeError):
    """The ranks were not started as one job. The installation is wrong, not the program."""


class Failure(Exception):
    """A failure whose message says everything: it is reported without its traceback."""


def world_size() -> int | None:
    """Return the number of ranks of the MPI job that this process belongs to; None outside of one.

    Of a job of several programs, only those of this one count. It is read from the launcher's variables, so that
    MPI itself is not loaded to find out. A Slurm step with one task is not taken for a job, because it may be an
    interactive shell.
    """
    if has_programs():
        return int(os.environ[MPMD])
    size = _number(_SIZES)
    return None if size == 1 == _number(_SIZES[2:]) else size


def has_programs() -> bool:
    """Return True if other programs are in the job besides this one (MPMD)."""
    return MPMD in os.environ


def group_size() -> int:
    """Return the number of processes of each rank: one leads its group, and the others follow it."""
    return int(os.environ.get(GROUP, "1"))


def in_words(process: int) -> str:
    """Return the name of a process of the job, for messages: processes of a group follow one another."""
    rank, follower = divmod(process, group_size())
    return f"process {follower} of the group of rank {rank}" if follower else f"rank {rank}"


def in_step() -> bool:
    """Return True if Slurm's srun has started this process as one of several, and no supervisor."""
    return not supervised() and (_number(_SIZES[2:]) or 0) > 1


def world_rank() -> int | None:
    """Return this process's rank in that job; None outside of one."""
    return None if world_size() is None else _number(_RANKS)


def without_rank(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those by which a launcher tells a process that it is a rank.

    A program that gets them from a rank takes itself for this rank, if it uses MPI.
    """
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_OF_USERS) or not name.startswith(_OF_RANKS)
    }


@cache
def my_folder() -> Path | None:
    """Return the folder of the job of which this process is a rank; None without a living supervisor."""
    folder = Path(os.environ.get(FOLDER, "/nowhere"))
    supervisor = _supervisor(folder)
    return folder if supervisor and _lives(supervisor) else None


def supervised() -> bool:
    """Return True if a supervisor, on any host, has started this rank."""
    return FOLDER in os.environ


def requested_ranks() -> int | None:
    """Return the number of ranks that the supervisor on this host requested."""
    folder = my_folder()
    return int((folder / "begun").read_text().split()[1]) if folder else None


def create(folder: Path, nprocs: int) -> None:
    """Make this process the supervisor of a job: from now on processes with this folder are ranks."""
    (folder / "begun").write_text(f"{os.getpid()} {nprocs} {platform.node()}")


def enter() -> None:
    """Write this rank's process id for the supervisor, and end with the shell around this rank.

    Raises:
        SystemExit: if the supervisor is gone.
    """
    if not supervised():
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by shells for background commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    if sys.platform == "linux":
        signum = signal.SIGTERM if world_rank() == 0 else signal.SIGKILL  # rank 0 saves first
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
    supervisor = _supervisor(Path(os.environ[FOLDER]))
    # The shell may have ended with the supervisor, before this rank asked to end with the shell.
    if supervisor and not _lives(supervisor):
        sys.exit(f"error: the supervisor of this rank is gone (process {supervisor}, in {FOLDER})")
    _say(f"rank.{world_rank()}", str(os.getpid()) if my_folder() else "")


def mark_loading_mpi() -> None:
    """Tell the supervisor that this rank is about to load MPI, and will wait for all others there."""
    _say(f"meets.{world_rank()}")


def mark_ended() -> None:
    """Tell the supervisor that this rank has ended well: with all others, or without loading MPI."""
    _say(f"ended.{world_rank()}")


def is_ending() -> bool:
    """Return True once rank 0 has had its time to save, and the other ranks end."""
    folder = my_folder()
    return folder is not None and (folder / "ending").exists()


def mark_interrupted(signum: int) -> None:
    """Tell the supervisor that rank 0 ends after this signal, which is no failure. Rank 0 only.

    It is one if the signal came because the shell around this rank is gone: see `enter`.
    """
    if not failed() and os.getppid() == _PARENT:
        _say("interrupted", str(signum))


def resumable(run: Path) -> None:
    """Let a restarted job continue with this run from now on. Rank 0 only."""
    if TOLD in os.environ:
        Path(os.environ[TOLD]).write_text(str(run))
    folder = my_folder()
    if folder:
        (folder / "resume").write_text(str(run.resolve()))


def hosts_left() -> str:
    """Return the hosts of the job that are left, as --hosts takes them; "" if none is lost."""
    folder = my_folder()
    file = folder / "hosts" if folder else None
    return file.read_text() if file and file.exists() else os.environ.get(HOSTS, "")


def fail(code: int, why: str) -> None:
    """Make the supervisor end the job with this exit code, after rank 0 has had time to save.

    If several ranks fail, only the first one prints why, before the supervisor knows of it.
    """
    folder = my_folder()
    if folder is None or write_once(folder / "reporter", str(world_rank())):
        print(printable(why), file=sys.stderr, flush=True)
        _say("failed", str(code))
        return
    end = time.monotonic() + _REPORT_S
    while not failed() and time.monotonic() < end:
        time.sleep(0.02)


def failed() -> bool:
    """Return True if a rank has failed, so that waiting is useless."""
    folder = my_folder()
    return folder is not None and (folder / "failed").exists()


def write_once(path: Path, text: str) -> bool:
    """Write a file, complete from its first moment, unless it exists; return False if it does."""
    draft = path.with_name(f"part.{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return True  # a full disk must not hide what the caller reports
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()  # else a second writer would write into the first one's file
    return True


def _supervisor(folder: Path) -> int | None:
    """Return the process id of a job's supervisor; None if it is on another host or there is no such job."""
    try:
        supervisor, _, host = (folder / "begun").read_text().split()
    except (OSError, ValueError):
        return None
    return int(supervisor) if host == platform.node() else None


def _lives(process_id: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(process_id, 0)
        return True
    return False


def take_lines(folder: Path, data: bytes) -> tuple[bytes, bytes]:
    """Write the files that came as lines of a stream, such as those of ranks on other hosts.

    Args:
        folder: folder of the job.
        data: what came on the stream. Such a line may begin anywhere, because launchers mix the output of ranks.

    Returns:
        What else came, and the beginning of a line whose rest has not come.
    """

    def write(line: re.Match[bytes]) -> bytes:
        with contextlib.suppress(OSError):  # a full disk, which must not end who reads the stream
            (folder / line[1].decode()).write_text(line[2].decode(errors="replace").strip())
        return b""

    mark = _mark(folder)
    data = re.sub(_TAG + re.escape(mark) + rb"([a-z]+(?:\.\d*)?) ([^\n\x1e]*)\n", write, data)
    rest = data[data.rfind(mark[:1]) :] if mark[:1] in data else b""
    if b"\n" in rest or not (rest.startswith(mark) or mark.startswith(rest)):
        rest = b""  # the ranks' own
    return data[: len(data) - len(rest)], rest


def _mark(folder: Path) -> bytes:
    """Return the beginning of a line for the supervisor. The folder's name is random, so nothing else begins so."""
    return f"\x1e{folder.name} ".encode()


def _say(name: str, text: str = "") -> None:
    """Write a file for the supervisor; send it as a line on stderr if this host does not see the folder."""
    folder = my_folder()
    if folder:
        write_once(folder / name, text)
    elif supervised():
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(2, _mark(Path(os.environ[FOLDER])) + f"{name} {text}\n".encode())


def _number(names: tuple[str, ...]) -> int | None:
    found = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None


SCRIPT_END = "the end of the script"  # name of what a rank waits in when its script is over
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # rank0rl/, all of it
_SLOTS = 32  # last collectives of each rank that are kept
_SLOT = 160  # bytes of a collective's name and the line that called it
_HEAD = struct.Struct("<qq")  # number of collectives entered; 1 while it waits in the last one


@dataclass(frozen=True)
class RankCollectives:
    """The last collectives of a rank, as the supervisor sees them."""

    count: int
    """Number of collectives that it has entered."""
    waits: bool
    """True while it waits in the last one."""
    names: Mapping[int, str]
    """Number -> name of the last collectives that it has entered."""
    where: str
    """File and line of the user's code that called the last one."""

    @property
    def name(self) -> str:
        """Name of the last one."""
        return self.names.get(self.count, "?")

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankCollectives | None:
        """Return the last collectives of a rank; None if it has recorded none."""
        try:
            data = (folder / f"collectives.{rank}").read_bytes()
        except OSError:
            return None
        if len(data) != _HEAD.size + _SLOTS * _SLOT:
            return None
        count, waits = _HEAD.unpack_from(data)
        names, where = {}, ""
        for start in range(_HEAD.size, len(data), _SLOT):
            number, name, caller, *_ = data[start : start + _SLOT].split(b"\0")
            if number.isdigit():
                names[int(number)] = name.decode(errors="replace")
                where = caller.decode(errors="replace") if int(number) == count else where
        return cls(count, bool(waits), names, where)


class _CollectiveRecorder:
    """Records which collective this rank waits in: a write to the memory of a file, if there is a supervisor.

    Nothing is written for a collective that is over at once.
    """

    def __init__(self) -> None:
        self._count = self._written = 0
        self._names = [""] * _SLOTS
        self._memory: mmap.mmap | None = None
        folder = my_folder()
        if folder:
            with (folder / f"collectives.{world_rank()}").open("wb+") as file:
                file.truncate(_HEAD.size + _SLOTS * _SLOT)
                self._memory = mmap.mmap(file.fileno(), 0)

    def begin(self, name: str) -> None:
        """Note that the next collective begins."""
        self._count += 1
        self._names[self._count % _SLOTS] = name

    def wait(self) -> None:
        """Record that this rank waits in the collective that has begun, and which collectives came before."""
        if self._memory is None or self._written == self._count:
            return
        for count in range(max(self._written, self._count - _SLOTS) + 1, self._count + 1):
            name, where = self._names[count % _SLOTS], _caller() if count == self._count else ""
            text = f"{count}\0{name}\0{where}".encode()[: _SLOT - 1] + b"\0"
            start = _HEAD.size + count % _SLOTS * _SLOT
            self._memory[start : start + len(text)] = text
        self._written = self._count
        _HEAD.pack_into(self._memory, 0, self._count, 1)

    def end(self) -> None:
        """Record that the collective is over, if `wait` has recorded it."""
        if self._memory is not None and self._written == self._count:
            _HEAD.pack_into(self._memory, 0, self._count, 0)


@cache
def collective_recorder() -> _CollectiveRecorder:
    """Return the recorder of this process."""
    return _CollectiveRecorder()


def is_deadlock(ranks: list[RankCollectives | None]) -> bool:
    """Return True if all ranks wait, and cannot all go on.

    A rank may be ahead of others in a collective that they have entered too, while bytes move.
    Nobody can go on if the next collective of those behind has another name on another rank.
    """
    waiting = [rank for rank in ranks if rank is not None and rank.waits]
    if len(waiting) < len(ranks):
        return False
    behind = min(rank.count for rank in waiting)
    return len({rank.names.get(behind, waiting[0].names.get(behind)) for rank in waiting}) > 1


def _caller() -> str:
    """Return file and line of the nearest caller outside of this package; "" if there is none."""
    frame = sys._getframe(1)
    with contextlib.suppress(AttributeError):
        while frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back  # type: ignore[assignment]
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""
