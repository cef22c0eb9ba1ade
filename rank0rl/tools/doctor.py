"""python -m rank0rl doctor: can this environment start ranks, and if not, what is to be done?"""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tyro

from rank0rl.mpi import launch
from rank0rl.mpi.hosts import SSH, read_hosts
from rank0rl.run import provenance

_INSTALL = "pip install mpi4py mpich"
_ECHO = Path(__file__).parent / "_echo.py"


@dataclass(frozen=True)
class Options:
    """Look into everything that ranks need, line by line, each ok or with its remedy."""

    mpiexec: str | None = None
    """Command line of a launcher of your own. None: that of the environment."""
    hosts: str | None = None
    """Hosts to look into, such as a:8,b:8; this one comes first."""
    hostfile: str | None = None
    """File of the hosts in place of that, a line each: a:8, or a slots=8."""


@dataclass(frozen=True)
class Line:
    """One thing that was looked into."""

    name: str
    found: str
    remedy: str = ""
    """What to do, "" if it is well."""


def main(argv: list[str]) -> int:
    """Exit code: 0 if all is well, 1 if something is not."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl doctor")
    try:
        hosts = [host.name for host in read_hosts(given.hosts, given.hostfile)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    well = True
    for line in lines(given.mpiexec, hosts):
        well = well and not line.remedy
        mark = "NOT OK" if line.remedy else "ok"
        print(f"{mark:7} {line.name:15} {line.found}" + (f"; {line.remedy}" if line.remedy else ""))
    return 0 if well else 1


def lines(mpiexec: str | None = None, hosts: Sequence[str] = ()) -> Iterator[Line]:
    """What is found, one after the other; what hangs on something that is missing is left out."""
    yield Line("Python", f"{platform.python_version()} at {sys.executable}")
    yield _cores()
    yield Line("user", "root" if _is_root() else "not root")
    yield Line("host", *_host())
    yield Line("started by", _launcher_variables())
    library, remedy = _library()
    yield Line("mpi4py", library, remedy)
    found = mpiexec or launch.find_mpiexec()
    if found is None:
        yield Line("mpiexec", "none beside this Python or on PATH", _INSTALL)
    if found is None or remedy:
        return
    whose = launch.vendor(shlex.split(found)[0])
    belongs = not whose or _family(whose) in (_family(library), "")
    yield Line(
        "mpiexec",
        f"{found}, {whose or 'which does not say whose it is'}",
        ""
        if belongs
        else f"mpi4py belongs to another MPI: activate its environment, or {_INSTALL}",
    )
    yield _echo("two ranks", mpiexec)
    for host in hosts[1:]:
        line = _other(host)
        yield line
        if line.remedy:
            continue
        yield _echo(f"this and {host}", mpiexec, f"{hosts[0]}:1,{host}:1")


def _cores() -> Line:
    cores = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    remedy = "this process is bound: start it without binding" if mine < cores else ""
    return Line("cores", f"{mine} of {cores} may be used", remedy if mine == 1 else "")


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _host() -> tuple[str, str]:
    name = socket.gethostname()
    try:
        return f"{name} is {socket.gethostbyname(name)}", ""
    except OSError as error:
        return f"{name} has no address ({error})", f"add it to /etc/hosts: 127.0.0.1 {name}"


def _launcher_variables() -> str:
    """The variables of a launcher or a batch system around this process."""
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
    """The MPI library that mpi4py loads, asked in a process of its own; and a remedy."""
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed", _INSTALL
    code = (  # not initialized: Open MPI leaves files behind of a rank that no launcher has started
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version().splitlines()[0])"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return "MPI does not start within 60 s", "look at the name resolution of this host"
    version = importlib.metadata.version("mpi4py")
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["it ends without a word"])[-1]
        return f"{version}, which loads no MPI ({last})", f"pip install mpich, or {_INSTALL}"
    return f"{version} with {' '.join(done.stdout.split())}", ""


def _family(name: str) -> str:
    """MPIs whose launchers start each other's ranks: MPICH and those derived from it."""
    if "Open MPI" in name:
        return "Open MPI"
    known = ("MPICH", "Intel", "MVAPICH")
    return "MPICH" if any(word in name for word in known) else ""


def _other(host: str) -> Line:
    """Another host: the same Python, packages and CPU, in the same folder; round trip and clock."""
    python = f"PYTHONPATH={shlex.quote(_path())} exec {shlex.quote(sys.executable)} -m rank0rl.tools._probe"
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
        answers = [_asked(session.stdin, session.stdout) for _ in range(20)]
    except (OSError, ValueError):
        _, said = session.communicate()
        last = (said.strip().splitlines() or ["no answer within 60 s"])[-1]
        return Line(
            host,
            last,
            f"`ssh {host}` has to work without a question, and {os.getcwd()} and this Python with "
            f"its packages have to be there",
        )
    finally:
        limit.cancel()
        session.kill()
        session.communicate()
    trip_s, ahead_s = min(answers)
    here = provenance.machine()
    how = "{name} is {now} there and {before} here"
    same_cpu = about["cpu"] == here["cpu"]
    return Line(
        host,
        f"round trip by ssh {1e3 * trip_s:.2f} ms, clock {1e3 * ahead_s:+.1f} ms, "
        + ("the same type of CPU" if same_cpu else f"another CPU, {about['cpu']}: other last bits"),
        "; ".join(provenance.differences({**here, "cpu": about["cpu"]}, about, how)),
    )


def _asked(question: IO[str], answer: IO[str]) -> tuple[float, float]:
    """Seconds that a question takes, and how far the other host's clock is ahead."""
    begin = time.time()
    question.write("\n")
    question.flush()
    there = float(answer.readline())
    end = time.time()
    return end - begin, there - (begin + end) / 2


def _path() -> str:
    """PYTHONPATH with this installation."""
    root = str(Path(__file__).parent.parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _echo(name: str, mpiexec: str | None, hosts: str | None = None) -> Line:
    """Two ranks that gather, as a job of this very installation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_ECHO), mpiexec or "", hosts or ""]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                cwd=None if hosts else folder,  # which no other host has
                env={**os.environ, "PYTHONPATH": _path()},
            )
        except subprocess.TimeoutExpired:
            return Line(name, "no end after 60 s", "look at the name resolution of this host")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["they end without a word"])[-1]
        return Line(name, f"end with code {done.returncode}: {last}", f"try {_INSTALL}")
    return Line(name, done.stdout.strip())
