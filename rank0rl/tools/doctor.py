"""python -m rank0rl doctor: check that ranks can start here, and say what to fix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tyro

from rank0rl.launch import job
from rank0rl.launch.hosts import SSH, Host, free_space, read_hosts, shortages
from rank0rl.launch.mpiexec import find_mpiexec, vendor
from rank0rl.mpi import comm
from rank0rl.run import machine
from rank0rl.tools import _echo

_INSTALL = "pip install mpi4py mpich"


@dataclass(frozen=True)
class Options:
    """Check everything that ranks need. Each line is ok, or says what to do."""

    mpiexec: str | None = None
    """Command line of your own launcher. None: the environment's mpiexec."""
    hosts: str | None = None
    """Hosts to check, such as a:8,b:8. This host comes first."""
    hostfile: str | None = None
    """File that lists the hosts, one per line: a:8, or a slots=8. Replaces --hosts."""


@dataclass(frozen=True)
class Line:
    """One check and its result."""

    name: str
    found: str
    remedy: str = ""
    """Remedy; "" if the check passed."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0 if every check passed, 1 if one failed, 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl doctor")
    try:
        hosts = read_hosts(given.hosts, given.hostfile)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    all_ok = True
    for line in lines(given.mpiexec, hosts):
        all_ok = all_ok and not line.remedy
        if job.in_step() and job.world_rank():
            continue  # rank 0 prints for all
        mark = "NOT OK" if line.remedy else "ok"
        print(f"{mark:7} {line.name:15} {line.found}" + (f"; {line.remedy}" if line.remedy else ""))
    return 0 if all_ok else 1


def lines(mpiexec: str | None = None, hosts: Sequence[Host] = ()) -> Iterator[Line]:
    """Yield the result of each check; checks that need something missing are left out."""
    yield Line("Python", f"{platform.python_version()} at {sys.executable}")
    yield _cores()
    yield Line("user", "root" if _is_root() else "not root")
    yield Line("host", *_host())
    yield Line("started by", _launcher_variables())
    library, remedy = _library()
    yield Line("mpi4py", library, remedy)
    if job.in_step() and not remedy:
        yield _step()
        return
    launcher = mpiexec or find_mpiexec()
    if launcher is None:
        yield Line("mpiexec", "not found next to this Python or on PATH", _INSTALL)
    if launcher is None or remedy:
        return
    family = vendor(shlex.split(launcher)[0])
    matches = not family or _family(family) in (_family(library), "")
    yield Line(
        "mpiexec",
        f"{launcher}, {family or 'of an unknown MPI'}",
        ""
        if matches
        else f"mpi4py belongs to another MPI: activate its environment, or {_INSTALL}",
    )
    yield _room(free_space(), family, hosts[0].slots if hosts else os.cpu_count() or 1)
    yield _two("two ranks", mpiexec)
    for host in hosts[1:]:
        found = _other_host(host.name, family, host.slots)
        yield from found
        if any(line.remedy for line in found):
            continue
        yield _two(f"here and {host.name}", mpiexec, f"{hosts[0].name}:1,{host.name}:1")


def _step() -> Line:
    """Let the ranks that srun has started gather. Collective: every rank calls this."""
    try:
        return Line("ranks of srun", f"{comm.get_nworkers()} ranks {_echo.measure()}")
    except job.WrongLaunch as error:
        found, _, remedy = str(error).rpartition(": ")
        return Line("ranks of srun", found, remedy)


def _cores() -> Line:
    cores = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    is_bound = mine == 1 < cores
    remedy = "this process is bound to one core: start it without binding" if is_bound else ""
    return Line("cores", f"{mine} of {cores} may be used", remedy)


def _room(free_mb: Mapping[str, float], vendor: str, ranks: int) -> Line:
    """Check that /dev/shm and the temporary folders of a host have room for its ranks."""
    found = ", ".join(f"{mb:,.0f} MB in {folder}" for folder, mb in free_mb.items())
    return Line("room", f"free: {found}", "; ".join(shortages(free_mb, vendor, ranks)))


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _host() -> tuple[str, str]:
    name = socket.gethostname()
    try:
        return f"{name} is {socket.gethostbyname(name)}", ""
    except OSError as error:
        return f"{name} has no address ({error})", f"add it to /etc/hosts: 127.0.0.1 {name}"


def _launcher_variables() -> str:
    """List the variables that a launcher or a batch system has set for this process."""
    prefixes = (
        "PMI_",
        "PMIX_",
        "OMPI_COMM_WORLD_",
        "SLURM_JOB",
        "SLURM_STEP",
        "PBS_JOB",
        "LSB_JOB",
    )
    names = sorted(name for name in os.environ if name.startswith(prefixes))
    return ", ".join(names) or "no launcher or batch system"


def _library() -> tuple[str, str]:
    """Return the MPI library that mpi4py loads in a new process, and a remedy."""
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed", _INSTALL
    code = (  # MPI is not initialized: Open MPI would leave files behind without a launcher
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version().splitlines()[0])"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return "MPI did not load within 60 s", "check that this host's name resolves to its address"
    version = importlib.metadata.version("mpi4py")
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        return f"{version}, but it cannot load an MPI ({last})", f"pip install mpich, or {_INSTALL}"
    return f"{version} with {' '.join(done.stdout.split())}", ""


def _family(name: str) -> str:
    """Return the family of an MPI, "" if unknown. Launchers of one family start each other's ranks."""
    if "Open MPI" in name:
        return "Open MPI"
    known = ("MPICH", "Intel", "MVAPICH")  # the last two are derived from MPICH
    return "MPICH" if any(word in name for word in known) else ""


def _other_host(host: str, vendor: str, ranks: int) -> list[Line]:
    """Check another host: ssh, Python, packages, CPU and room in the same folder; measure round trip and clock."""
    python = f"PYTHONPATH={shlex.quote(_python_path())} exec {shlex.quote(sys.executable)} -m rank0rl.tools._probe"
    session = subprocess.Popen(
        [*SSH, host, f"cd {shlex.quote(os.getcwd())} && {python}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = threading.Timer(60, session.kill)
    limit.start()
    assert session.stdin
    assert session.stdout
    try:
        about = json.loads(session.stdout.readline())
        answers = [_ask_time(session.stdin, session.stdout) for _ in range(20)]
    except (OSError, ValueError):
        _, errors = session.communicate()
        last = (errors.strip().splitlines() or ["no answer within 60 s"])[-1]
        remedy = (
            f"make `ssh {host}` work without a question, and have {os.getcwd()} and this Python with "
            f"its packages there"
        )
        return [Line(host, last, remedy)]
    finally:
        limit.cancel()
        session.kill()
        session.communicate()
    trip_s, ahead_s = min(answers)
    here = machine.describe()
    how = "{name} is {now} there and {before} here"
    same_cpu = about["cpu"] == here["cpu"]
    differing = machine.differences({**here, "cpu": about["cpu"]}, about, how)
    cpu = f"another CPU, {about['cpu']}: the last bits may differ"
    speed = f"round trip by ssh {1e3 * trip_s:.2f} ms, clock {1e3 * ahead_s:+.1f} ms"
    remedy = "; ".join([*differing, *["install the same versions"] * bool(differing)])
    return [
        Line(host, f"{speed}, {'same CPU type' if same_cpu else cpu}", remedy),
        _room(about["free_mb"], vendor, ranks),
    ]


def _ask_time(question: IO[str], answer: IO[str]) -> tuple[float, float]:
    """Ask the other host for its time; return the round trip and how far its clock is ahead, in s."""
    begin = time.time()
    question.write("\n")
    question.flush()
    there = float(answer.readline())
    end = time.time()
    return end - begin, there - (begin + end) / 2


def _python_path() -> str:
    """Return a PYTHONPATH with this installation first."""
    root = str(Path(__file__).parent.parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _two(name: str, mpiexec: str | None, hosts: str | None = None) -> Line:
    """Start two ranks of this installation, and let them gather."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(_echo.__file__)), mpiexec or "", hosts or ""]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                cwd=None if hosts else folder,  # other hosts do not have this folder
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        except subprocess.TimeoutExpired:
            return Line(
                name,
                "not finished after 60 s",
                "check that this host's name resolves to its address",
            )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["they printed no error"])[-1]
        return Line(name, f"ended with code {done.returncode}: {last}", f"try {_INSTALL}")
    return Line(name, done.stdout.strip())
