"""Start n ranks of this very command under mpiexec.

The process that the user starts becomes the supervisor. It needs nothing but the standard library:
it runs the same command line again, n times, forwards signals to rank 0, and returns the job's exit
code, which is the same for every MPI.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import accumulate
from types import FrameType, TracebackType

from rank0rl.launch import (
    FAILURE,
    SUCCESS,
    WRONG_USE,
    exit_code_after,
    hurry,
    job,
    processes,
    usage_error,
)
from rank0rl.launch.hosts import Host, check_free_space, count_ranks, listed, read_hosts
from rank0rl.launch.job import world_rank, world_size
from rank0rl.launch.mpiexec import (
    DEFAULT_VARIABLES,
    OPEN_MPI_FILES,
    Launcher,
    keep_variables_here,
    stay_on_loopback,
)
from rank0rl.launch.streams import outlast_readers
from rank0rl.launch.supervisor import TURN_S, Supervisor
from rank0rl.launch.tree import other_programs

_SAME_S = 1.0  # between signals that are one request
# Texts of NumPy's, torch's and Python's errors.
_OF_NO_ROWS = re.compile(
    r"zero-size|size 0|empty|non-zero size|out of (bounds|range)|division by zero"
)


def mpi_fork(
    n: int | None = None,
    gpu_pct: float = 0.0,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    pass_env: str | None = None,
    bind_to_core: bool = False,
    hwthreads: bool = False,
    mpiexec: str | None = None,
    args: Sequence[str] | None = None,
    collective_timeout: float | None = None,
    start_timeout: float = 300.0,
    max_restarts: int = 0,
    ranks_per_env: int = 1,
    mpmd: bool = False,
) -> str:
    """Run this command line again on n ranks.

    A script calls it once, early: ``if "parent" == mpi_fork(n): sys.exit()``. Code before the call
    runs once in the parent and once in every rank. Ranks have OMP_NUM_THREADS=1, MKL_NUM_THREADS=1 and
    IN_MPI=1, unless these variables are set.

    Args:
        n: number of ranks. With 1 or less nothing is started, and no MPI is loaded. None: one per
            slot of the hosts, 1 without hosts.
        gpu_pct: share of a GPU's memory, up to 1, that each rank may use after it has read
            `tf_config`; 0 for no limit.
        hosts: hosts of the ranks, such as "a:8,b:8", reached by ssh. The first host is this one; it
            gets the first 8 ranks. By default all ranks are here.
        hostfile: file of the hosts instead, one per line, as "a:8" or as "a slots=8".
        pass_env: environment variables that ranks on other hosts get besides the usual ones, such
            as "A,B_*". Ranks on this host have all of them.
        bind_to_core: keep every rank on a core of its own. Rank 0's update then has one core too.
        hwthreads: count hardware threads as cores, where the launcher has a switch for it.
        mpiexec: command line of your own launcher. It is given "-n", the number of ranks, and their
            command.
        args: arguments of the ranks' Python, such as a script and its arguments; by default those of
            this process.
        collective_timeout: seconds that a rank may wait in a collective; by default no limit.
        start_timeout: seconds that a rank may take to start after others have, or the launcher until it starts one.
        max_restarts: number of times that a failed job is started again. The ranks of `train.py`
            then continue from the last checkpoint; others begin anew. A host that is gone is left
            out, with its ranks.
        ranks_per_env: processes of each rank, for environments that are parallel programs: see `group`.
        mpmd: True if a launcher has started other programs with this one, whose n ranks come first.

    Returns:
        "child" in every rank (also with n <= 1, and in a job that a launcher started);
        "parent" in the original process, after the job has succeeded.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed: 1 after
            an exception, n after `sys.exit(n)`, 128 + s after signal s. If no rank could be started,
            the code is 2 if another start would end the same way, else 1.
        ValueError: if n is above 1 and is not the size of the job that runs already, gpu_pct is no
            share, the hosts are wrong (the first is not this one, or they have fewer slots than n),
            a variable in pass_env is not set, mpmd has no launcher, or this host lacks room in /dev/shm or for temporary files.
    """
    if not 0 <= gpu_pct <= 1:
        raise ValueError(f"gpu_pct must be in [0, 1], a share of a GPU's memory: got {gpu_pct}")
    os.environ[job.GPU_PCT] = str(gpu_pct)
    os.environ[job.START_TIMEOUT] = str(start_timeout)
    if collective_timeout is not None:
        os.environ[job.TIMEOUT] = str(collective_timeout)
    os.environ[job.GROUP] = str(ranks_per_env)
    if mpmd:
        _be_one_of_several(n or 1, ranks_per_env)
    size = world_size()
    if size is not None and not mpmd and not job.supervised() and (others := other_programs()):
        raise ValueError(
            f"the launcher has started other programs besides this one ({', '.join(others)}): add --mpmd, and "
            f"--nprocs with the number of ranks of this program"
        )
    if size is not None and size % ranks_per_env:
        raise ValueError(
            f"the launcher must start a multiple of ranks_per_env processes: got {size}, and "
            f"ranks_per_env={ranks_per_env}"
        )
    # After a restart without a host there are fewer ranks than were requested.
    if (
        size is not None
        and not job.supervised()
        and n is not None
        and 1 < n != size // ranks_per_env
    ):
        each = f" of {ranks_per_env} processes each" * (ranks_per_env > 1)
        raise ValueError(
            f"nprocs must be the number of ranks that the launcher started: got nprocs={n} in a "
            f"job of {size // ranks_per_env}{each}; leave --nprocs out, or start {n} ranks"
        )
    is_rank = size is not None or job.my_folder() is not None
    where = () if is_rank else read_hosts(hosts, hostfile)
    n = count_ranks(n, where, ranks_per_env) * ranks_per_env
    if is_rank or n <= 1:
        _become_rank()
        return "child"
    launcher = Launcher.of(mpiexec, args, pass_env, bind_to_core, hwthreads)
    check_free_space(min(n, where[0].slots) if where else n, lambda: launcher.vendor)
    processes.remove_leftovers()
    code = _run_ranks(n, launcher, where, max_restarts, start_timeout)
    if code:
        raise SystemExit(code)
    return "parent"


def _be_one_of_several(n: int, ranks_per_env: int) -> None:
    """Make this process a rank of the first program of its job, which has n ranks."""
    if world_size() is None or job.supervised() or ranks_per_env > 1:
        raise ValueError(
            "mpmd needs a launcher that starts this program with one solver for each environment, and "
            "ranks_per_env=1: mpiexec -n 1 python SCRIPT --mpmd : -n 4 SOLVER"
        )
    os.environ[job.MPMD] = str(n)


def _run_ranks(
    n: int,
    launcher: Launcher,
    hosts: Sequence[Host] = (),
    max_restarts: int = 0,
    start_timeout_s: float = 300.0,
) -> int:
    """Run a command line on n ranks, again after a failure; return the job's exit code."""
    outlast_readers()
    env = {**DEFAULT_VARIABLES, **os.environ}
    columns = shutil.get_terminal_size().columns if getattr(sys.stdout, "isatty", bool)() else ""
    env[job.GROUP] = os.environ[job.GROUP]
    env[job.TERMINAL] = str(columns)  # Open MPI always gives its ranks a terminal of its own
    code = SUCCESS
    with _Signals() as signals:
        for restart in range(max(0, max_restarts) + 1):
            lost, code = _run_once(n, launcher, hosts, env, signals.received, start_timeout_s)
            if code in (SUCCESS, WRONG_USE) or signals.received or restart == max_restarts:
                break
            if lost:
                hosts = [host for host in hosts if host.name not in lost]
                env[job.HOSTS] = listed(hosts)
            left = sum(host.slots for host in hosts)
            n = min(n, left - left % job.group_size()) if hosts else n
            if not n:
                print(f"{listed(hosts)} has no room for a rank: the job ends", file=sys.stderr)
                break
            without = f" without {', '.join(lost)}: {n} ranks" if lost else ""
            pause_s = min(2**restart, 30)
            print(
                f"restart {restart + 1} of {max_restarts} in {pause_s} s{without}, from "
                f"{'the last checkpoint' if job.RESUME in env else 'the beginning'}",
                file=sys.stderr,
                flush=True,
            )
            signals.wait(pause_s)
            if signals.received:
                break
        return exit_code_after(signals.received[0]) if signals.received else code


def _run_once(
    n: int,
    launcher: Launcher,
    hosts: Sequence[Host],
    env: dict[str, str],
    received: list[int],
    start_timeout_s: float,
) -> tuple[list[str], int]:
    """Run a job in a folder of its own, and add to `env` the run with which a restart continues.

    Returns:
        Names of the hosts that are gone, and the job's exit code. If no rank was started, that is 2 where
        another start would end the same way, else 1: a host or the launcher may be at fault.
    """
    with processes.new_job_folder() as folder:
        job.create(folder, n)
        env[job.FOLDER] = str(folder)
        if OPEN_MPI_FILES not in os.environ:
            env[OPEN_MPI_FILES] = str(folder)
        launcher_env = env
        slots = accumulate(host.slots for host in hosts)
        hosts = hosts[: 1 + sum(n > before for before in slots)]  # others may be down
        if len(hosts) > 1:
            launcher_env = keep_variables_here(env, launcher.passed, folder / "environment")
        command = launcher.command(n, hosts, launcher_env)
        supervisor = Supervisor(folder, n, hosts, received, start_timeout_s)
        try:
            code = supervisor.run(command, launcher_env)
        except (job.WrongLaunch, FileNotFoundError) as error:  # no launcher, or no ssh
            return [], usage_error(str(error))
        except OSError as error:
            usage_error(f"cannot write {error.filename or folder}: {error.strerror}")
            return [], FAILURE
        resume = folder / "resume"
        if resume.exists():
            env[job.RESUME] = resume.read_text()
    if code is None:
        why, is_wrong_use = launcher.not_started(n, supervisor.output, supervisor.launcher)
        code = usage_error(why)
        return [], code if is_wrong_use and len(hosts) < 2 else FAILURE
    return supervisor.lost, code


class _Signals:
    """The signals that ask a job to end, kept while entered.

    Those that come within a second of the first are the same request: a terminal that closes, `timeout` and
    systemd send two.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_s: float | None = None

    def __enter__(self) -> _Signals:
        signals = (signal.SIGINT, signal.SIGHUP, *job.END_SIGNALS)
        kept = [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]  # as nohup does
        self._before = {s: signal.signal(s, self._keep) for s in kept}
        return self

    def __exit__(self, *_: object) -> None:
        """Handle signals as before; once one has come, ignore others, which would change the exit code."""
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if self.received else handler)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, for so many seconds."""
        end = time.monotonic() + seconds
        while not self.received and time.monotonic() < end:
            time.sleep(TURN_S)

    def _keep(self, signum: int, _frame: FrameType | None) -> None:
        hurry()
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
        is_again = now - self._first_s > _SAME_S
        if is_again or not self.received:  # rank 0 may have received one before
            self.received.append(signum)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job after an uncaught exception on one rank. If several ranks fail, the first one reports."""
    if isinstance(error, job.WrongLaunch):
        if not job.supervised() and not job.has_programs() and world_rank():  # the same on all
            return
        job.fail(WRONG_USE, f"error: {error}")
        return
    if isinstance(error, KeyboardInterrupt):
        job.fail(exit_code_after(signal.SIGINT), "interrupted")
        return
    lines = "".join(traceback.format_exception(kind, error, trace))
    if job.rows_are_on_rank0 and _OF_NO_ROWS.search(str(error)):
        lines += (
            "note: after rank0_accum_batches, ranks above 0 have no rows: what needs rows belongs below "
            "if rank == 0\n"
        )
    job.fail(
        FAILURE,
        f"{job.in_words(world_rank() or 0)} of {(world_size() or 1) // job.group_size()}, on "
        f"{platform.node()}, failed:\n{lines}",
    )


def _become_rank() -> None:
    """Tell the supervisor that this rank is there; an exception here ends the job from now on."""
    if job.my_folder() is None and world_size() is None:
        return
    sys.excepthook = report
    if world_size() is None:
        raise job.WrongLaunch(
            "the launcher does not tell its processes their rank (PMI_RANK, OMPI_COMM_WORLD_RANK): "
            "use the mpiexec that belongs to mpi4py: pip install mpi4py mpich"
        )
    stay_on_loopback()
    job.enter()
    atexit.register(job.mark_ended)  # world.py has the end of ranks that meet each other
