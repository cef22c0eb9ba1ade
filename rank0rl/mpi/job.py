"""The folder of small files through which the ranks of a job and their supervisor talk.

The supervisor names it in the environment. R is a rank.

begun     the supervisor's process id, the number of ranks that it requested, and its host
rank.R    R's process id, from the moment it knows its rank
place.R   the collective that R waits in, in memory that the supervisor reads (see places.py)
reporter  the rank that says why the job fails, or "supervisor"
failed    the exit code of the job that the reporter asks for
meets.R   R loads MPI, and waits there for all other ranks
memory.R  the files in shared memory that MPI then has for R, one per line
ended.R   R has reached its end: together with all other ranks, or without having loaded MPI
status.R  R's exit status, if it ended otherwise
resume    the folder of the run with which a restarted job continues
hosts     the hosts that are left, as --hosts takes them, once one is lost
environment  the variables that only ranks on this host get, as commands of a shell (see environment.py)

Ranks on other hosts do not see the folder. What they would have written is not needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
from functools import cache
from pathlib import Path

FOLDER = "RANK0RL_JOB"
TERMINAL = "RANK0RL_TERMINAL"  # columns of the supervisor's terminal, or empty
TIMEOUT = "RANK0RL_COLLECTIVE_TIMEOUT"  # seconds that a rank may wait in a collective, if limited
GPU_PCT = "RANK0RL_GPU_PCT"  # share of a GPU's memory for each rank, if limited
RESUME = "RANK0RL_RESUME"  # folder of the run with which a restarted job continues
HOSTS = "RANK0RL_HOSTS"  # hosts of a restarted job, once one is lost
_REPORT_S = 2.0  # time for another rank to print its report

_SHARED = ("mpich_shm_", "Intel_MPI_", "sm_segment.", "vader_segment.")  # MPI's files in /dev/shm

# The variables of launchers for their ranks: MPICH, Intel MPI and MS-MPI; Open MPI; Slurm's srun.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class WrongLaunch(RuntimeError):
    """The ranks were not started as one job. The installation is wrong, not the program."""


def world_size() -> int | None:
    """Return the number of ranks of the MPI job that this process belongs to; None outside of one.

    It is read from the launcher's variables, so that MPI itself is not loaded to find out. A Slurm
    step with one task is not taken for a job, because it may be an interactive shell.
    """
    size = _number(_SIZES)
    return None if size == 1 == _number(_SIZES[2:]) else size


def world_rank() -> int | None:
    """Return this process's rank in that job; None outside of one."""
    return None if world_size() is None else _number(_RANKS)


@cache
def folder() -> Path | None:
    """Return the folder of the job of which this process is a rank; None without a living supervisor."""
    job = Path(os.environ.get(FOLDER, "/nowhere"))
    try:
        supervisor, _, host = (job / "begun").read_text().split()
        os.kill(int(supervisor), 0)
        if host != platform.node():
            return None
    except (OSError, ValueError):
        return None  # another host, or a variable that an earlier job has left in the environment
    return job


def supervised() -> bool:
    """Return True if a supervisor, on any host, has started this rank."""
    return FOLDER in os.environ


def requested_ranks() -> int | None:
    """Return the number of ranks that the supervisor on this host requested."""
    job = folder()
    return int((job / "begun").read_text().split()[1]) if job else None


def create(job: Path, nprocs: int) -> None:
    """Make this process the supervisor of a job: from now on processes with this folder are ranks."""
    (job / "begun").write_text(f"{os.getpid()} {nprocs} {platform.node()}")


def enter() -> None:
    """Write this rank's process id for the supervisor, and end with the shell around this rank."""
    if not supervised():
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by shells for background commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        signum = signal.SIGTERM if world_rank() == 0 else signal.SIGKILL  # rank 0 saves first
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
    job = folder()
    if job:
        (job / f"rank.{world_rank()}").write_text(str(os.getpid()))


def mark_loading_mpi() -> None:
    """Tell the supervisor that this rank is about to load MPI, and will wait for all others there."""
    _touch("meets")


def loads_mpi() -> bool:
    """Return True if this rank has begun to load MPI."""
    job = folder()
    return job is not None and (job / f"meets.{world_rank()}").exists()


def record_shared_memory() -> None:
    """Tell the supervisor which files in shared memory MPI has for this rank, to be removed."""
    job = folder()
    if job:
        files = "\n".join(map(str, shared_memory(os.getpid())))
        (job / f"memory.{world_rank()}").write_text(files)


def shared_memory(process_id: int) -> set[Path]:
    """Return the files in shared memory that MPI, MPICH or Open MPI, has for a process."""
    files = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
            file = Path(line.partition("/")[1] + line.partition("/")[2])
            if file.is_relative_to("/dev/shm") and file.name.startswith(_SHARED):  # noqa: S108
                files.add(file)
    return files


def mark_ended() -> None:
    """Tell the supervisor that this rank has ended well: with all others, or without loading MPI."""
    _touch("ended")


def resumable(run: Path) -> None:
    """Let a restarted job continue with this run from now on. Rank 0 only."""
    job = folder()
    if job:
        (job / "resume").write_text(str(run.resolve()))


def hosts_left() -> str:
    """Return the hosts of the job that are left, as --hosts takes them; "" if none is lost."""
    job = folder()
    file = job / "hosts" if job else None
    return file.read_text() if file and file.exists() else os.environ.get(HOSTS, "")


def fail(code: int, why: str) -> None:
    """Make the supervisor end the job with this exit code, after rank 0 has had time to save.

    If several ranks fail, only the first one prints why, before the supervisor knows of it.
    """
    job = folder()
    if job is None or write_once(job / "reporter", str(world_rank())):
        print(why, file=sys.stderr, flush=True)
        if job:
            write_once(job / "failed", str(code))
        return
    end = time.monotonic() + _REPORT_S
    while not failed() and time.monotonic() < end:
        time.sleep(0.02)


def failed() -> bool:
    """Return True if a rank has failed, so that waiting is useless."""
    job = folder()
    return job is not None and (job / "failed").exists()


def write_once(path: Path, text: str) -> bool:
    """Write a file, complete from its first moment, unless it exists; return True if it was written."""
    draft = path.with_name(f"{path.name}.part.{os.getpid()}")
    draft.write_text(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()  # else a second writer would write into the first one's file
    return True


def _touch(name: str) -> None:
    job = folder()
    if job:
        (job / f"{name}.{world_rank()}").touch()


def _number(names: tuple[str, ...]) -> int | None:
    found = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None
