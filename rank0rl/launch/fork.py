"""Start n ranks of this very command under mpiexec.

The process that the user starts becomes the supervisor. It needs nothing but the standard library:
it runs the same command line again, n times, forwards signals to rank 0, and returns the job's exit
code, which is the same for every MPI.
"""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence, Set
from types import TracebackType

from rank0rl.launch import job as jobs
from rank0rl.launch import mpiexec as launchers
from rank0rl.launch import processes
from rank0rl.launch.hosts import Host, check_room, count_ranks, listed, read_hosts, switches
from rank0rl.launch.job import world_rank, world_size
from rank0rl.launch.mpiexec import stay_on_loopback
from rank0rl.launch.streams import outlast_readers
from rank0rl.launch.supervisor import Signals, Supervisor


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
) -> str:
    """Run this command line again on n ranks.

    A script calls it once, early: ``if "parent" == mpi_fork(n): sys.exit()``. Code before the call
    runs once in the parent and once in every rank.

    Args:
        n: number of ranks. With 1 or less nothing is started, and no MPI is loaded. None: one per
            slot of the hosts, 1 without hosts.
        gpu_pct: share of a GPU's memory, up to 1, that each rank may use after it has called
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
        start_timeout: seconds that a rank may take to start after others have.
        max_restarts: number of times that a failed job is started again. The ranks of `train.py`
            then continue from the last checkpoint; others begin anew. A host that is gone is left
            out, with its ranks.

    Returns:
        "child" in every rank (also with n <= 1, and in a job that a launcher started);
        "parent" in the original process, after the job has succeeded.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed: 1 after
            an exception, n after `sys.exit(n)`, 128 + s after signal s. If no rank could be started,
            the code is 2, or 1 on several hosts, one of which may be at fault.
        ValueError: if n is above 1 and is not the size of the job that runs already, gpu_pct is no
            share, the hosts are wrong (the first is not this one, or they have fewer slots than n),
            a variable in pass_env is not set, or this host lacks room in /dev/shm or for temporary files.
    """
    if not 0 <= gpu_pct <= 1:
        raise ValueError(f"gpu_pct must be in [0, 1], a share of a GPU's memory: got {gpu_pct}")
    os.environ[jobs.GPU_PCT] = str(gpu_pct)
    if collective_timeout is not None:
        os.environ[jobs.TIMEOUT] = str(collective_timeout)
    size = world_size()
    # After a restart without a host there are fewer ranks than were requested.
    if size is not None and not jobs.supervised() and n is not None and n > 1 and n != size:
        raise ValueError(
            f"nprocs must be the number of ranks that the launcher started: got nprocs={n} in a "
            f"job of {size}; leave --nprocs out, or start {n} ranks"
        )
    is_rank = size is not None or jobs.folder() is not None
    where = () if is_rank else read_hosts(hosts, hostfile)
    n = count_ranks(n, where)
    if is_rank or n <= 1:
        _become_rank()
        return "child"
    passed = launchers.passed_names(pass_env, os.environ)
    launcher = launchers.launcher_command(bind_to_core, hwthreads, mpiexec, args)
    processes.remove_leftovers()
    check_room(launcher[0], min(n, where[0].slots) if where else n)
    code = run_ranks(n, launcher, max_restarts, where, args, passed, start_timeout)
    if code:
        raise SystemExit(code)
    return "parent"


def run_ranks(
    n: int,
    launcher: list[str],
    max_restarts: int = 0,
    hosts: Sequence[Host] = (),
    args: Sequence[str] | None = None,
    passed: Set[str] = frozenset(),
    start_timeout_s: float = 300.0,
) -> int:
    """Run a command line on n ranks under a launcher, and wait for them; run it again after a failure.

    Args:
        n: number of ranks.
        launcher: command line of the launcher.
        max_restarts: number of times that a failed job is started again.
        hosts: hosts of the ranks; none if all are here.
        args: arguments of the ranks' Python; by default those of this process.
        passed: names of the variables that ranks on other hosts get, see `launchers.passed_names`.
        start_timeout_s: how long a rank may take to start after others have.

    Returns:
        The job's exit code.

    Raises:
        ValueError: if the launcher's switches for hosts are not known.
    """
    outlast_readers()
    env = {**launchers.ENVIRONMENT, **os.environ}
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else ""
    env[jobs.TERMINAL] = str(columns)  # Open MPI always gives its ranks a terminal of its own
    code = 0
    with Signals() as signals:
        for restart in range(max(0, max_restarts) + 1):
            lost, code = _run_once(n, launcher, hosts, args, env, passed, signals, start_timeout_s)
            if code in (0, 2) or signals.received or restart == max_restarts:
                break
            if lost:
                hosts = [host for host in hosts if host.name not in lost]
                env[jobs.HOSTS] = listed(hosts)
            n = min(n, sum(host.slots for host in hosts)) if hosts else n
            without = f" without {', '.join(lost)}: {n} ranks" if lost else ""
            pause_s = min(2**restart, 30)
            print(
                f"restart {restart + 1} of {max_restarts} in {pause_s} s{without}, from "
                f"{'the last checkpoint' if jobs.RESUME in env else 'the beginning'}",
                file=sys.stderr,
                flush=True,
            )
            signals.wait(pause_s)
        return 128 + signals.received[0] if signals.received else code


def _run_once(
    n: int,
    launcher: list[str],
    hosts: Sequence[Host],
    args: Sequence[str] | None,
    env: dict[str, str],
    passed: Set[str],
    signals: Signals,
    start_timeout_s: float,
) -> tuple[list[str], int]:
    """Run a job in a folder of its own, and add to `env` the run with which a restart continues.

    Returns:
        Names of the hosts that are gone, and the job's exit code; 2 if no rank was started,
        1 if they should have been on several hosts.
    """
    with processes.job_folder() as job:
        jobs.create(job, n)
        env[jobs.FOLDER] = str(job)
        if launchers.OPEN_MPI_FILES not in os.environ:
            env[launchers.OPEN_MPI_FILES] = str(job)
        launcher_env = env
        if len(hosts) > 1:
            launcher_env = launchers.keep_here(env, passed, job / "environment")
        where = switches(launchers.vendor(launcher[0]), hosts, launcher_env) if hosts else []
        command = [*launcher, *where, "-n", str(n), *launchers.rank_command(args)]
        supervisor = Supervisor(job, n, hosts, signals, start_timeout_s)
        try:
            code = supervisor.run(command, launcher_env)
        except OSError as error:
            message = f"{error.filename or launcher[0]} cannot be run: {error.strerror}"
            return [], launchers.usage_error(message)
        resume = job / "resume"
        if resume.exists():
            env[jobs.RESUME] = resume.read_text()
    if code is None:
        message = launchers.not_started(launcher[0], n, supervisor.output, supervisor.launcher)
        wrong_use = launchers.usage_error(message)
        return [], 1 if len(hosts) > 1 else wrong_use  # another host may be at fault
    return supervisor.lost, code


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job after an uncaught exception on one rank. If several ranks fail, the first one reports."""
    if isinstance(error, jobs.WrongLaunch):
        if not jobs.supervised() and world_rank():  # the same on every rank
            return
        jobs.fail(2, f"error: {error}")
        return
    if isinstance(error, KeyboardInterrupt):
        jobs.fail(128 + signal.SIGINT, "interrupted")
        return
    lines = "".join(traceback.format_exception(kind, error, trace))
    jobs.fail(1, f"rank {world_rank()} of {world_size()}, on {platform.node()}, failed:\n{lines}")


def _become_rank() -> None:
    """Tell the supervisor that this rank is there; an exception here ends the job from now on."""
    if jobs.folder() is None and world_size() is None:
        return
    sys.excepthook = report
    if world_size() is None:
        raise jobs.WrongLaunch(
            "the launcher does not tell its processes their rank (PMI_RANK, OMPI_COMM_WORLD_RANK): "
            "use the mpiexec that belongs to mpi4py: pip install mpi4py mpich"
        )
    stay_on_loopback()
    jobs.enter()
    atexit.register(jobs.mark_ended)  # world.py has the end of ranks that meet each other
