"""Start n ranks of this very command under mpiexec.

The process that the user starts becomes the supervisor. It needs nothing but the standard library:
it runs the same command line again, n times, forwards signals to rank 0, and gives back the job's
exit code, which is the same for every MPI.
"""

from __future__ import annotations

import atexit
import builtins
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

from rank0rl.mpi import job as jobs
from rank0rl.mpi.hosts import Host, count_ranks, read_hosts, switches
from rank0rl.mpi.job import world_rank, world_size
from rank0rl.mpi.supervisor import Supervisor, around

# Open MPI refuses root and more ranks than cores unless told, and binds each rank to a core, as Intel
# MPI does, which would leave rank 0's update a single one. Each reads its own variables only.
_NOT_BOUND = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "I_MPI_PIN": "off",
}
# Where Open MPI's launcher has its files. It leaves them when it is ended with the job, and a later one that
# happens on the same process id would not start with them: so they go with the job's.
_OPEN_MPI_FILES = "PRTE_MCA_prte_local_tmpdir_base"
# Vendor -> what its `mpiexec --version` says, its switches for one core a rank, and those for one
# rank to count a hardware thread as a core, which only Open MPI has to be told.
_VENDORS: dict[str, tuple[str, list[str], list[str]]] = {
    "Intel MPI": (
        r"Intel\(R\) MPI",
        ["-genv", "I_MPI_PIN", "on", "-genv", "I_MPI_PIN_DOMAIN", "core"],
        [],
    ),
    "MPICH": (r"HYDRA|MPICH", ["-bind-to", "core"], []),
    "Open MPI": (
        r"Open ?MPI|OpenRTE|PRTE|PRRTE|prun",
        ["--bind-to", "core"],
        ["--use-hwthread-cpus"],
    ),
}


def too_many_ranks(nprocs: int, num_envs: int) -> str:
    """What to say where a rank would have no environment: before the ranks are started, or after."""
    return (
        f"num_envs must be at least nprocs so that every rank has an environment: got "
        f"num_envs={num_envs}, nprocs={nprocs}; raise --num-envs or lower --nprocs"
    )


def mpi_fork(
    n: int | None = None,
    gpu_pct: float = 0.0,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    bind_to_core: bool = False,
    hwthreads: bool = False,
    mpiexec: str | None = None,
    args: Sequence[str] | None = None,
    collective_timeout: float | None = None,
    max_restarts: int = 0,
) -> str:
    """Run this command line again on n ranks.

    A script calls it once, early: ``if "parent" == mpi_fork(n): sys.exit()``. What stands before
    the call runs once in the parent and once in every rank.

    Args:
        n: number of ranks. With 1 or less nothing is started, and no MPI is loaded. None: as many as
            the hosts have slots, 1 without hosts.
        gpu_pct: share of a GPU's memory, up to 1, that each rank may use after it has asked for
            `tf_config`; 0 for no limit.
        hosts: where the ranks are, such as "a:8,b:8", over ssh; the first host is this one, and has
            the first 8 ranks. By default all of them are here.
        hostfile: a file of them in place of that, a host a line, as "a:8" or as "a slots=8".
        bind_to_core: keep every rank on a core of its own; rank 0's update then has one core too.
        hwthreads: count hardware threads as cores, where the launcher can be told to.
        mpiexec: command line of a launcher of one's own, which is given "-n", the number of ranks,
            and their command.
        args: what the ranks' Python is given, such as a script and its arguments, in place of what
            this one was given.
        collective_timeout: seconds that a rank may wait in a collective; by default no limit.
        max_restarts: how often to start a failed job again. The ranks of `train.py` then go on from
            the last checkpoint; others begin anew. A host that is gone is left out, with its ranks.

    Returns:
        "child" in every rank (also with n <= 1, and in a job that a launcher started);
        "parent" in the original process, after the job has succeeded.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed: 1 after
            an exception, n after `sys.exit(n)`, 128 + s after signal s, 2 if it could not be started.
        ValueError: if n is above 1 and is not the size of the job that runs already, gpu_pct is no
            share, or the hosts are wrong: the first is another one, or there are fewer slots than n.
    """
    if not 0 <= gpu_pct <= 1:
        raise ValueError(f"gpu_pct must be in [0, 1], a share of a GPU's memory: got {gpu_pct}")
    os.environ[jobs.GPU_PCT] = str(gpu_pct)
    if collective_timeout is not None:
        os.environ[jobs.TIMEOUT] = str(collective_timeout)
    size = world_size()
    # After a restart without a host there are fewer ranks than were asked for.
    if size is not None and not jobs.supervised() and n is not None and n > 1 and n != size:
        raise ValueError(
            f"nprocs must be the number of ranks that the launcher started: got nprocs={n} in a "
            f"job of {size}; leave --nprocs out, or start {n} ranks"
        )
    is_rank = size is not None or jobs.folder() is not None
    listed = () if is_rank else read_hosts(hosts, hostfile)
    n = count_ranks(n, listed)
    if is_rank or n <= 1:
        _become_rank()
        return "child"
    launcher = _launcher(bind_to_core, hwthreads, mpiexec, args)
    code = run_ranks(n, launcher, max_restarts, listed, args)
    if code:
        raise SystemExit(code)
    return "parent"


def run_ranks(
    n: int,
    launcher: list[str],
    max_restarts: int = 0,
    hosts: Sequence[Host] = (),
    args: Sequence[str] | None = None,
) -> int:
    """Run this command line, or another, on n ranks under a launcher, and wait for them; after a failure, again.

    Returns:
        The job's exit code.

    Raises:
        ValueError: if it is not known how to tell this launcher the hosts.
    """
    env = {**_NOT_BOUND, **os.environ}
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else ""
    env[jobs.TERMINAL] = str(columns)  # Open MPI gives its ranks a terminal of its own, always
    code = 0
    for restart in range(max(0, max_restarts) + 1):
        with tempfile.TemporaryDirectory(prefix="rank0rl-", ignore_cleanup_errors=True) as name:
            job = Path(name)
            jobs.begin(job, n)
            env[jobs.FOLDER] = name
            if _OPEN_MPI_FILES not in os.environ:
                env[_OPEN_MPI_FILES] = name
            where = switches(vendor(launcher[0]), hosts, env) if hosts else []
            rank = around([sys.executable, *(sys.orig_argv[1:] if args is None else args)])
            supervisor = Supervisor(job, n, [host.name for host in hosts[1:]])
            try:
                code = supervisor.run([*launcher, *where, "-n", str(n), *rank], env)
            except OSError as error:
                return _usage(f"{error.filename or launcher[0]} cannot be run: {error.strerror}")
            resume = job / "resume"
            if resume.exists():
                env[jobs.RESUME] = resume.read_text()
        if code and not (supervisor.entered or supervisor.interrupted or supervisor.lost):
            return _usage(_not_started(launcher[0], n, supervisor.said, code))
        if code in (0, 2) or supervisor.interrupted or restart == max_restarts:
            break
        hosts = [host for host in hosts if host.name not in supervisor.lost]
        n = min(n, sum(host.slots for host in hosts)) if hosts else n
        without = f" without {', '.join(supervisor.lost)}: {n} ranks" if supervisor.lost else ""
        pause_s = min(2**restart, 30)
        print(
            f"restart {restart + 1} of {max_restarts} in {pause_s} s{without}, from "
            f"{'the last checkpoint' if jobs.RESUME in env else 'the beginning'}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(pause_s)
    return code


def find_mpiexec() -> str | None:
    """The mpiexec beside the running Python, else the one on PATH."""
    here = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=here) or shutil.which("mpiexec")


@cache
def vendor(mpiexec: str) -> str:
    """Whose launcher it is, "" if it does not say."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said = done.stdout + done.stderr
    return next((name for name, (says, *_) in _VENDORS.items() if re.search(says, said)), "")


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An uncaught exception on one rank ends the job; of several, the first one is told."""
    if isinstance(error, jobs.WrongLaunch):
        jobs.fail(2, f"error: {error}")
        return
    if isinstance(error, KeyboardInterrupt):
        jobs.fail(128 + signal.SIGINT, "interrupted")
        return
    lines = "".join(traceback.format_exception(kind, error, trace))
    jobs.fail(1, f"rank {world_rank()} of {world_size()}, on {platform.node()}, failed:\n{lines}")


def _launcher(
    bind_to_core: bool, hwthreads: bool, own: str | None, args: Sequence[str] | None
) -> list[str]:
    """The launcher's command line, but for the number of ranks, where they are and what they run.

    Raises:
        SystemExit: with code 2, if there is no launcher or no command line to repeat.
    """
    if os.name != "posix":
        sys.exit(_usage("more than one rank needs Linux or macOS: use WSL on Windows"))
    if args is None and (sys.argv[0] in ("", "-", "-c") or hasattr(builtins, "__IPYTHON__")):
        sys.exit(
            _usage("ranks repeat a command line, and this Python has none: put it into a script")
        )
    launcher = shlex.split(own or "") or [find_mpiexec() or ""]
    found = shutil.which(launcher[0])
    if not found:
        sys.exit(
            _usage(
                f"there is no launcher {launcher[0]!r}: name one that can be run"
                if own
                else "more than one rank needs mpiexec, and none was found beside this Python or "
                "on PATH: activate the virtual environment, or pip install mpi4py mpich"
            )
        )
    if bind_to_core or hwthreads:
        known = vendor(found)
        if known not in _VENDORS:
            sys.exit(_usage(f"{found} does not say whose it is: bind ranks with --mpiexec instead"))
        _, bind, threads = _VENDORS[known]
        launcher += bind * bind_to_core + threads * hwthreads
    return launcher


def _not_started(mpiexec: str, n: int, said: str, code: int) -> str:
    """One line on why there are no ranks, and what to do."""
    remedies = {
        r"slots": "name a command line of your own, such as --mpiexec 'mpiexec --oversubscribe', or "
        "lower --nprocs",
        r"\broot\b": "run as another user, or give its switch for root with --mpiexec",
        r"(?i)unrecogni[sz]ed|unknown|invalid|illegal": "it does not take '-n N COMMAND': name another "
        "one with --mpiexec",
    }
    lines = [line.strip(" -=|*") for line in said.splitlines()]
    telling = [line for line in lines if any(re.search(says, line) for says in remedies)]
    line = next(iter([*telling, *(line for line in lines if line)]), f"it ended with code {code}")
    remedy = next(
        (remedy for says, remedy in remedies.items() if re.search(says, line)),
        "python -m rank0rl doctor looks into it",
    )
    return f"{mpiexec} did not start {n} ranks: {line}; {remedy}"


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
    jobs.enter()
    atexit.register(_ended)


def _ended() -> None:
    """A rank that has met no other is through when its script is; others agree on it, in comm."""
    if not jobs.has_met():
        jobs.ended()


def _usage(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
