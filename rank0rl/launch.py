"""Start n ranks of this very command under mpiexec, and supervise them.

The process that the user starts becomes the supervisor. It needs nothing but the standard library:
it runs the same command line again, n times, forwards signals to rank 0, and gives back the job's
exit code. The ranks find the supervisor through a folder of its own, named in the environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

JOB = "RANK0RL_JOB"  # folder in which every rank leaves its process id
ASKED = "RANK0RL_NPROCS"  # ranks that the supervisor asked mpiexec for

TERMINAL = "RANK0RL_TERMINAL"  # columns of the supervisor's terminal, if it has one

GRACE_S = 8.0  # between a forwarded signal and SIGKILL: time for rank 0 to write a checkpoint

# Open MPI refuses root and more ranks than cores unless told, and binds each rank to a core, which
# would leave rank 0's update a single one. Other MPIs do not read these.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def world_size() -> int | None:
    """Number of ranks of the MPI job that this process belongs to, None outside of one.

    Read from the variables that a launcher gives its ranks (MPICH, Intel MPI and MS-MPI: PMI_SIZE;
    Open MPI: OMPI_COMM_WORLD_SIZE), so that MPI itself is not loaded to find out.
    """
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def mpi_fork(n: int) -> str:
    """Run this command line again on n ranks.

    A script calls it once, early: ``if "parent" == mpi_fork(n): sys.exit()``. What stands before the call runs once in the parent and once in every rank.

    Args:
        n: number of ranks, at least 1. With 1 nothing is started and no MPI is loaded.

    Returns:
        "child" in every rank (also with n = 1, and in a job that a launcher started);
        "parent" in the original process, after the job has succeeded.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed.
        ValueError: if n is below 1, or is not the size of the job that runs already.
    """
    if n < 1:
        raise ValueError(f"nprocs must be at least 1: got {n}")
    size = world_size()
    if size is not None and n not in (1, size):
        raise ValueError(
            f"nprocs must be the number of ranks that the launcher started: got nprocs={n} in a "
            f"job of {size}; leave --nprocs out, or start {n} ranks"
        )
    if size is not None or n == 1:
        _leave_process_id()
        return "child"
    code = run_ranks(n)
    if code:
        raise SystemExit(code)
    return "parent"


def run_ranks(n: int) -> int:
    """Run this command line on n ranks and wait for them.

    Returns:
        The job's exit code; 128 + s after signal s.

    Raises:
        SystemExit: with code 2, if there is no mpiexec or no command line to repeat.
    """
    if sys.argv[0] in ("", "-", "-c"):
        sys.exit(
            _usage("ranks repeat a command line, and this Python has none: put it into a script")
        )
    with tempfile.TemporaryDirectory(prefix="rank0rl-") as job:
        command = [_mpiexec(), "-n", str(n), sys.executable, *sys.orig_argv[1:]]
        env = {**_OPEN_MPI, **os.environ, JOB: job, ASKED: str(n)}
        if sys.stdout.isatty():
            env[TERMINAL] = str(shutil.get_terminal_size().columns)
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return _supervise(process, Path(job))


def _mpiexec() -> str:
    """The mpiexec beside the running Python, else the one on PATH."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpiexec"
    )
    if found is None:
        sys.exit(
            _usage(
                "more than one rank needs mpiexec, and none was found beside this Python or on "
                "PATH: pip install mpi4py mpich"
            )
        )
    return found


def _usage(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _leave_process_id() -> None:
    """Tell the supervisor, if there is one, which process this rank is."""
    job = os.environ.get(JOB)
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if job and rank and os.path.isdir(job):
        Path(job, rank).write_text(str(os.getpid()))


def _supervise(process: subprocess.Popen[bytes], job: Path) -> int:
    """Wait for mpiexec. The first signal goes to rank 0, which ends the job; the second ends it at once."""
    received: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        deadline[0] = time.monotonic() + (GRACE_S if len(received) == 1 else 0.0)
        if not (len(received) == 1 and _signal(job / "0", signum)):
            _end(process, job)

    deadline = [float("inf")]
    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            try:
                code = process.wait(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline[0]:
                    _end(process, job)
    finally:
        if process.poll() is None:
            _end(process, job)
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        return 128 + received[0]
    return 128 - code if code < 0 else code


def _signal(process_id: Path, signum: int) -> bool:
    """Send a signal to the rank that left its process id here; False if there is none."""
    try:
        os.kill(int(process_id.read_text()), signum)
    except (OSError, ValueError):
        return False
    return True


def _end(process: subprocess.Popen[bytes], job: Path) -> None:
    """End mpiexec and every rank at once. Some launchers give each rank a session of its own."""
    for process_id in job.iterdir():
        _signal(process_id, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
