"""Start n ranks of this very command under mpiexec, and supervise them.

The process that the user starts becomes the supervisor. It needs nothing but the standard library:
it runs the same command line again, n times, forwards signals to rank 0, and gives back the job's
exit code. Ranks and supervisor meet in a folder, named in the environment: every rank leaves its
process id there, and a rank that fails its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType

JOB = "RANK0RL_JOB"  # the folder
ASKED = "RANK0RL_NPROCS"  # ranks that the supervisor asked mpiexec for
TERMINAL = "RANK0RL_TERMINAL"  # columns of the supervisor's terminal, if it has one

GRACE_S = 8.0  # for rank 0 to write a checkpoint, between a signal or a failure and SIGKILL

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
    return _number("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def world_rank() -> int | None:
    """This process's number in that job, None outside of one."""
    return _number("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def too_many_ranks(nprocs: int, num_envs: int) -> str:
    """What to say where a rank would have no environment: before the ranks are started, or after."""
    return (
        f"num_envs must be at least nprocs so that every rank has an environment: got "
        f"num_envs={num_envs}, nprocs={nprocs}; raise --num-envs or lower --nprocs"
    )


def mpi_fork(n: int) -> str:
    """Run this command line again on n ranks.

    A script calls it once, early: ``if "parent" == mpi_fork(n): sys.exit()``. What stands before
    the call runs once in the parent and once in every rank.

    Args:
        n: number of ranks. With 1 or less nothing is started, and no MPI is loaded.

    Returns:
        "child" in every rank (also with n <= 1, and in a job that a launcher started);
        "parent" in the original process, after the job has succeeded.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed.
        ValueError: if n is above 1 and is not the size of the job that runs already.
    """
    size = world_size()
    if size is not None and n > 1 and n != size:
        raise ValueError(
            f"nprocs must be the number of ranks that the launcher started: got nprocs={n} in a "
            f"job of {size}; leave --nprocs out, or start {n} ranks"
        )
    if size is not None or n <= 1:
        _become_rank()
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
    command = [_mpiexec(), "-n", str(n), sys.executable, *sys.orig_argv[1:]]
    with tempfile.TemporaryDirectory(prefix="rank0rl-", ignore_cleanup_errors=True) as job:
        env = {**_OPEN_MPI, **os.environ, JOB: job, ASKED: str(n)}
        if sys.stdout.isatty():
            env[TERMINAL] = str(shutil.get_terminal_size().columns)
        return _Supervisor(Path(job)).run(command, env)


def fail(code: int) -> None:
    """Have the supervisor end the job with this exit code, after rank 0 has had time to save.

    Returns on rank 0, which has saved by then; and where no supervisor acts.
    """
    job = os.environ.get(JOB)
    if job and os.path.isdir(job):
        with contextlib.suppress(FileExistsError), Path(job, "failed").open("x") as file:
            file.write(str(code))
        if world_rank() != 0:
            time.sleep(2 * GRACE_S)


class _Supervisor:
    """Watches mpiexec: a signal or a failed rank first goes to rank 0, then ends every process."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._deadline = float("inf")

    def run(self, command: list[str], env: dict[str, str]) -> int:
        """The job's exit code."""
        signals = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])]
        before = {s: signal.signal(s, self._handle) for s in signals}
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
            while self._process.poll() is None:
                self._watch()
                time.sleep(0.05)
        finally:
            self._end()
            for signum, handler in before.items():
                signal.signal(signum, handler)
        failed = self._job / "failed"
        if self._received:
            return 128 + self._received[0]
        if failed.exists():
            return int(failed.read_text() or 1)
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._received.append(signum)

    def _watch(self) -> None:
        """Tell rank 0 once that the job is to end; end it when its time is over, or asked again."""
        if self._deadline == float("inf"):
            if self._received or (self._job / "failed").exists():
                interrupted = self._received[:1] == [signal.SIGINT]
                told = _signal(self._job / "0", signal.SIGINT if interrupted else signal.SIGTERM)
                self._deadline = time.monotonic() + (GRACE_S if told else 0)
        elif (
            len(self._received) > 1
            or time.monotonic() > self._deadline
            or not _signal(self._job / "0", 0)  # rank 0 has gone, and something waits for it
        ):
            self._end()

    def _end(self) -> None:
        """End mpiexec and every rank. Some launchers give each rank a session of its own."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        for process_id in self._job.glob("[0-9]*"):
            _signal(process_id, signal.SIGKILL)
        process.terminate()  # ends ranks that have not left their process id yet
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _become_rank() -> None:
    """Leave this rank's process id for the supervisor; an exception here ends the job from now on."""
    job, rank = os.environ.get(JOB), world_rank()
    if job and rank is not None and os.path.isdir(job):
        Path(job, str(rank)).write_text(str(os.getpid()))
        sys.excepthook = report


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An uncaught exception on one rank ends the job: the other ranks would wait for ever."""
    lines = "".join(traceback.format_exception(kind, error, trace))
    print(f"rank {world_rank()} of {world_size()} failed:\n{lines}", file=sys.stderr, flush=True)
    fail(1)


def _end_with_parent() -> None:
    """Let Linux end mpiexec, and so the ranks, when the supervisor is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _mpiexec() -> str:
    """The mpiexec beside the running Python, else the one on PATH."""
    here = str(Path(sys.executable).parent)
    found = shutil.which("mpiexec", path=here) or shutil.which("mpiexec")
    if found is None:
        sys.exit(
            _usage(
                "more than one rank needs mpiexec, and none was found beside this Python or on "
                "PATH: activate the virtual environment, or pip install mpi4py mpich"
            )
        )
    return found


def _usage(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _number(*names: str) -> int | None:
    found = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None


def _signal(process_id: Path, signum: int) -> bool:
    """Send a signal to the rank that left its process id here; False if there is none."""
    try:
        os.kill(int(process_id.read_text()), signum)
    except (OSError, ValueError):
        return False
    return True
