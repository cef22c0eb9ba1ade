"""Where the ranks of a job and their supervisor meet: a folder of small files, named in the environment.

begun     the supervisor's process id, the number of ranks that it asked for, and its host
rank.R    R's process id, from the moment it knows its rank
place.R   what R waits in, in memory that the supervisor reads
reporter  the rank that says why the job fails, or "supervisor"
failed    the exit code with which it wants the job to end
meets.R   R loads MPI
memory.R  what MPI then has in shared memory, a file a line
ended.R   R has come to its end, together with all other ranks, or without having loaded MPI
status.R  the exit status of R, where it ended otherwise

Ranks on other hosts do not see the folder, and what is written there is not missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = "RANK0RL_JOB"
TERMINAL = "RANK0RL_TERMINAL"  # columns of the supervisor's terminal, or empty
TIMEOUT = "RANK0RL_COLLECTIVE_TIMEOUT"  # seconds that a rank may wait in a collective, if limited
GPU_PCT = "RANK0RL_GPU_PCT"  # share of a GPU's memory for each rank, if limited
RESUME = "RANK0RL_RESUME"  # the folder of the run that a restarted job goes on with
END = "the end of the script"  # what a rank waits in that is through
_SHARED = ("mpich_shm_", "Intel_MPI_", "sm_segment.", "vader_segment.")  # MPI's, in /dev/shm
_SLOTS = 32  # collectives of each rank that are remembered
_SLOT = 160  # bytes of a name and where it was called
_HEAD = struct.Struct("<qq")  # collectives entered, whether it waits in the last one

# What a launcher tells its ranks. MPICH, Intel MPI and MS-MPI; Open MPI; Slurm's srun.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def world_size() -> int | None:
    """Number of ranks of the MPI job that this process belongs to, None outside of one.

    Read from the variables that a launcher gives its ranks, so that MPI itself is not loaded to
    find out. A Slurm step of one task is no job: an interactive shell may be one.
    """
    size = _number(_SIZES)
    return None if size == 1 == _number(_SIZES[2:]) else size


def world_rank() -> int | None:
    """This process's number in that job, None outside of one."""
    return None if world_size() is None else _number(_RANKS)


class WrongLaunch(RuntimeError):
    """The ranks were not started as one job: a matter of the installation, not of the program."""


@cache
def folder() -> Path | None:
    """The folder of the job that this process is a rank of, None without a supervisor that lives."""
    job = Path(os.environ.get(FOLDER, "/nowhere"))
    try:
        supervisor, _, host = (job / "begun").read_text().split()
        os.kill(int(supervisor), 0)
        if host != platform.node():
            return None
    except (OSError, ValueError):
        return None  # another host, or a variable that an earlier job has left in the environment
    return job


def asked() -> int | None:
    """The number of ranks that the supervisor asked for."""
    job = folder()
    return int((job / "begun").read_text().split()[1]) if job else None


def supervised() -> bool:
    """Whether a supervisor has started this rank, on whatever host; it knows how many there are."""
    return FOLDER in os.environ


def begin(job: Path, nprocs: int) -> None:
    """The supervisor's part: from here on processes with this folder are ranks."""
    (job / "begun").write_text(f"{os.getpid()} {nprocs} {platform.node()}")


def enter() -> None:
    """Leave this rank's process id for the supervisor, and end with the shell around this rank."""
    if not supervised():
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is not in front
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        signum = signal.SIGTERM if world_rank() == 0 else signal.SIGKILL  # rank 0 saves first
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
    job = folder()
    if job:
        (job / f"rank.{world_rank()}").write_text(str(os.getpid()))


def resumable(run: Path) -> None:
    """Rank 0 only: from here on a restarted job goes on with this run."""
    job = folder()
    if job:
        (job / "resume").write_text(str(run.resolve()))


def fail(code: int, why: str) -> None:
    """Have the supervisor end the job with this exit code, after rank 0 has had time to save.

    Of ranks that fail alike, the first one says why, before the supervisor knows of it.
    """
    job = folder()
    if job is None or write_once(job / "reporter", str(world_rank())):
        print(why, file=sys.stderr, flush=True)
        if job:
            write_once(job / "failed", str(code))
        return
    end = time.monotonic() + 2
    while not failed() and time.monotonic() < end:
        time.sleep(0.02)


def write_once(path: Path, text: str) -> bool:
    """Write a file that appears with its contents, unless it is there; whether it was not."""
    part = path.with_name(f"{path.name}.part.{os.getpid()}")
    part.write_text(text)
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()  # else a second writer would write into the first one's file
    return True


def failed() -> bool:
    """Whether some rank has failed, so that there is nothing to wait for any more."""
    job = folder()
    return job is not None and (job / "failed").exists()


def ended() -> None:
    """This rank is at its end: together with all others, or without having met them."""
    _touch("ended")


def meets() -> None:
    """This rank is about to load MPI, and waits for all others there."""
    _touch("meets")


def met() -> None:
    """This rank has loaded MPI: what it has in shared memory is for the supervisor to remove."""
    job = folder()
    if job:
        files = "\n".join(map(str, shared_memory(os.getpid())))
        (job / f"memory.{world_rank()}").write_text(files)


def shared_memory(process_id: int) -> set[Path]:
    """MPI's files in shared memory that a process uses: MPICH's and Open MPI's names."""
    files = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
            file = Path(line.partition("/")[1] + line.partition("/")[2])
            if file.is_relative_to("/dev/shm") and file.name.startswith(_SHARED):  # noqa: S108
                files.add(file)
    return files


def has_met() -> bool:
    """Whether it has."""
    job = folder()
    return job is not None and (job / f"meets.{world_rank()}").exists()


def _touch(name: str) -> None:
    job = folder()
    if job:
        (job / f"{name}.{world_rank()}").touch()


@dataclass(frozen=True)
class Place:
    """Where a rank is in the order of collectives, as the supervisor sees it."""

    count: int
    waits: bool
    names: Mapping[int, str]
    """Number -> name of the last collectives that it has entered."""
    where: str
    """File and line of the user's code that called the last one."""


class Waits:
    """Tells the supervisor which collective this rank waits in: a write to memory, no system call."""

    def __init__(self) -> None:
        """Map this rank's file, if there is a supervisor."""
        self._count = 0
        self._memory: mmap.mmap | None = None
        job = folder()
        if job:
            with (job / f"place.{world_rank()}").open("wb+") as file:
                file.truncate(_HEAD.size + _SLOTS * _SLOT)
                self._memory = mmap.mmap(file.fileno(), 0)

    def begin(self, name: str) -> None:
        """The next collective begins."""
        self._count += 1
        if self._memory is None:
            return
        text = f"{self._count}\0{name}\0{_caller()}".encode()[: _SLOT - 1] + b"\0"
        start = _HEAD.size + self._count % _SLOTS * _SLOT
        self._memory[start : start + len(text)] = text
        _HEAD.pack_into(self._memory, 0, self._count, 1)

    def end(self) -> None:
        """It is over."""
        if self._memory is not None:
            _HEAD.pack_into(self._memory, 0, self._count, 0)


def read_place(path: Path) -> Place | None:
    """What a rank has told, None if it has not begun to."""
    try:
        data = path.read_bytes()
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
    return Place(count, bool(waits), names, where)


def stuck(places: list[Place | None]) -> bool:
    """Whether all ranks wait, and cannot all go on.

    A rank may be ahead of others in a collective that they have entered too, while bytes move.
    Nobody can go on if the collective that is next for those behind has another name elsewhere.
    """
    known = [place for place in places if place is not None and place.waits]
    if len(known) < len(places):
        return False
    behind = min(place.count for place in known)
    return len({place.names.get(behind, known[0].names.get(behind)) for place in known}) > 1


def _caller() -> str:
    """File and line of the nearest caller outside of this package."""
    here = os.path.dirname(os.path.dirname(__file__))  # of the whole package
    frame = sys._getframe(2)
    with contextlib.suppress(AttributeError):
        while frame.f_code.co_filename.startswith(here):
            frame = frame.f_back  # type: ignore[assignment]
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def _number(names: tuple[str, ...]) -> int | None:
    found = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None
