"""python -m rank0rl doctor: check that ranks can start here, and say what to fix.

The doctor starts this file again: as a job of two ranks that gather, and on each other host as a
script that describes the host and tells its time.
"""

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
from typing import IO, Any

import numpy as np
import tyro

from rank0rl.launch import fork, job, mpiexec, python, usage_error
from rank0rl.launch.hosts import SSH, Host, free_space, listed, read_hosts, shortages
from rank0rl.options import check, option
from rank0rl.run.launch_options import limit_cpu_as

_INSTALL = "pip install mpi4py mpich"
_NO_NAME = "check that this host's name resolves to its address"
# Begin the names of the variables that a launcher or a batch system sets.
_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "SLURM_JOB", "SLURM_STEP", "PBS_JOB", "LSB_JOB")
_LIMIT_S = 60  # for another process to answer


@dataclass(frozen=True)
class Options:
    """Check everything that ranks need. Each line is ok, or says what to do."""

    mpiexec: str | None = None
    """Command line of your own launcher. None: the environment's mpiexec."""
    hosts: str | None = None
    """Hosts to check, such as a:8,b:8. This host comes first."""
    hostfile: str | None = None
    """File that lists the hosts, one per line: a:8, or a slots=8. Replaces --hosts."""
    ranks_per_env: int = option(1, "[1, inf)")
    """Show where the processes of each rank are, with this number of them, as in training."""


@dataclass(frozen=True)
class _Line:
    """The result of one check. The remedy is "" if the check passed."""

    name: str
    found: str
    remedy: str = ""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0 if every check passed, 1 if one failed, 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl doctor")
    try:
        check(given)
        shlex.split(given.mpiexec or "")
        hosts = read_hosts(given.hosts, given.hostfile)
    except ValueError as error:
        return usage_error(str(error))
    all_ok = True
    for line in _lines(given.mpiexec, hosts, given.ranks_per_env):
        all_ok = all_ok and not line.remedy
        if job.in_step() and job.world_rank():
            continue  # rank 0 prints for all
        mark = "NOT OK" if line.remedy else "ok"
        print(f"{mark:7} {line.name:15} {line.found}" + (f"; {line.remedy}" if line.remedy else ""))
    return 0 if all_ok else 1


def _lines(given: str | None, hosts: Sequence[Host], group: int) -> Iterator[_Line]:
    """Yield the result of each check, with a launcher of the user's or none; leave out what cannot be checked."""
    yield _Line("Python", f"{platform.python_version()} at {sys.executable}")
    cores = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    is_bound = mine == 1 < cores and not job.in_step()  # a rank of a batch system may have one
    remedy = "this process is bound to one core: start it without binding" if is_bound else ""
    yield _Line("cores", f"{mine} of {cores} may be used", remedy)
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    yield _Line("user", "root" if is_root else "not root")
    yield _host()
    variables = sorted(name for name in os.environ if name.startswith(_LAUNCHERS))
    yield _Line("started by", ", ".join(variables) or "no launcher or batch system")
    library = _library()
    yield library
    if job.in_step() and not library.remedy:
        yield _step()
        return
    found = mpiexec.find_mpiexec()
    words = shlex.split(given) if given else [found] if found else []
    launcher = given or found
    if launcher is None:
        yield _Line("mpiexec", "not found next to this Python or on PATH", _INSTALL)
    if launcher is None or library.remedy:
        return
    vendor = mpiexec.vendor(words[0])
    matches = not vendor or _family(vendor) in (_family(library.found), "")
    remedy = f"mpi4py belongs to another MPI: activate its environment, or {_INSTALL}"
    found = f"{launcher}, {vendor or 'of an unknown MPI'}"
    yield _Line("mpiexec", found, "" if matches else remedy)
    try:
        yield _room(free_space(), vendor, hosts[0].slots if hosts else os.cpu_count() or 1)
    except FileNotFoundError as error:  # nothing can be written to any of them
        yield _Line("room", str(error), "make room in one of them, or set TMPDIR")
        return
    yield _two("two ranks", given)
    for host in hosts[1:]:
        lines = _other_host(host.name, vendor, host.slots)
        yield from lines
        if not any(line.remedy for line in lines):
            yield _two(f"here and {host.name}", given, f"{hosts[0].name}:1,{host.name}:1")
    if group > 1:
        yield _groups(given, listed(hosts), group)


def _host() -> _Line:
    name = socket.gethostname()
    try:
        return _Line("host", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        remedy = f"add it to /etc/hosts: 127.0.0.1 {name}"
        return _Line("host", f"{name} has no address ({error})", remedy)


def _printed(words: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of this Python; return what it prints."""
    command, env = python(*words)
    return subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        **how,
    )


def _library() -> _Line:
    """Find the MPI library that mpi4py loads in a new process."""
    if importlib.util.find_spec("mpi4py") is None:
        return _Line("mpi4py", "not installed", _INSTALL)
    code = (  # MPI is not initialized: Open MPI would leave files behind without a launcher
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version().splitlines()[0])"
    )
    try:
        done = _printed(["-c", code])
    except subprocess.TimeoutExpired:
        return _Line("mpi4py", f"MPI did not load within {_LIMIT_S} s", _NO_NAME)
    version = importlib.metadata.version("mpi4py")
    if done.returncode or not done.stdout.strip():
        reason = _last_line(done.stderr, "it printed no error")
        found = f"{version}, but it cannot load an MPI ({reason})"
        return _Line("mpi4py", found, f"pip install mpich, or {_INSTALL}")
    return _Line("mpi4py", f"{version} with {' '.join(done.stdout.split())}")


def _family(name: str) -> str:
    """Return the family of an MPI, "" if unknown. Launchers of one family start each other's ranks."""
    if "Open MPI" in name:
        return "Open MPI"
    known = ("MPICH", "Intel", "MVAPICH")  # the last two are derived from MPICH
    return "MPICH" if any(word in name for word in known) else ""


def _last_line(text: str, default: str) -> str:
    return (text.strip().splitlines() or [default])[-1]


def _room(free_mb: Mapping[str, float], vendor: str, ranks: int) -> _Line:
    """Check that /dev/shm and the temporary folders of a host have room for its ranks."""
    found = ", ".join(f"{mb:,.0f} MB in {folder}" for folder, mb in free_mb.items())
    return _Line("room", f"free: {found}", "; ".join(shortages(free_mb, vendor, ranks)))


def _step() -> _Line:
    """Let the ranks that srun has started gather. Collective: every rank calls this."""
    from rank0rl.mpi import comm

    try:
        return _Line("ranks of srun", f"{comm.get_nworkers()} ranks {_gather_speed()}")
    except job.WrongLaunch as error:
        found, _, remedy = str(error).rpartition(": ")
        return _Line("ranks of srun", found, remedy)


def _two(name: str, launcher: str | None, hosts: str = "") -> _Line:
    """Start two ranks of this installation, and let them gather."""
    return _job(name, "gather", launcher, hosts)


def _groups(launcher: str | None, hosts: str, size: int) -> _Line:
    """Start ranks of several processes, two here or as many as hosts have slots for, and see where these are."""
    line = _job("groups", "where", launcher, hosts, str(size))
    if line.remedy:
        return line
    there = json.loads(line.found)
    apart = [group for group in there if len(set(group)) > 1]
    on = dict.fromkeys(host for group in there for host in group)
    found = f"{len(there)} of {size} processes, on {', '.join(on)}"
    remedy = f"one is on {' and '.join(dict.fromkeys(apart[0]))}" if apart else ""
    return _Line("groups", found, remedy and f"{remedy}: give each host a multiple of {size} slots")


def _job(name: str, what: str, launcher: str | None, hosts: str, *more: str) -> _Line:
    """Start ranks that do something, and print one line."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = _printed(
                [__file__, what, launcher or "", hosts, *more],
                cwd=None if hosts else folder,  # other hosts do not have this folder
            )
        except subprocess.TimeoutExpired:
            return _Line(name, f"not finished after {_LIMIT_S} s", _NO_NAME)
    if done.returncode:
        reason = _last_line(done.stderr, "they printed no error")
        return _Line(name, f"ended with code {done.returncode}: {reason}", f"try {_INSTALL}")
    return _Line(name, done.stdout.strip())


def _where() -> None:
    """Print the host of each process, in groups. The arguments are a launcher, hosts or "", and processes of a rank."""
    launcher, hosts, size = sys.argv[2:]
    n = None if hosts else 2
    how = {"mpiexec": launcher or None, "hosts": hosts or None, "ranks_per_env": int(size)}
    if fork.mpi_fork(n, **how) == "parent":  # type: ignore[arg-type]
        return
    from rank0rl.mpi.world import everyone

    world = everyone()
    assert world is not None
    there = world.allgather(platform.node())
    if world.rank == 0:
        print(json.dumps([there[i : i + int(size)] for i in range(0, len(there), int(size))]))


def _gather() -> None:
    """Gather on two ranks, and print how fast that was. The arguments are a launcher and hosts, or ""."""
    launcher, hosts = (word or None for word in sys.argv[2:])
    if fork.mpi_fork(2, mpiexec=launcher, hosts=hosts) == "parent":
        return
    from rank0rl.mpi import comm

    comm.print0(_gather_speed())


def _gather_speed() -> str:
    """Measure the latency and bandwidth of a gather. Collective: every rank calls this."""
    from rank0rl.mpi import comm
    from rank0rl.mpi.gather import rank0_accum_batches

    took = {}
    for size in (1, 1 << 24):
        rows = {"x": np.zeros(size, np.uint8)}
        rank0_accum_batches(rows)
        times = []
        for _ in range(20):
            comm.barrier()
            start = time.perf_counter()
            rank0_accum_batches(rows)
            times.append(time.perf_counter() - start)
        took[size] = sorted(times)[10]
    return (
        f"gathered 1 byte per rank in {1e6 * took[1]:.0f} us, and 16 MiB per rank at "
        f"{comm.get_nworkers() * (1 << 24) / took[1 << 24] / 1e9:.1f} GB/s"
    )


def _other_host(host: str, vendor: str, ranks: int) -> list[_Line]:
    """Check another host: ssh, Python, packages, CPU and room in the same folder; measure round trip and clock."""
    from rank0rl.run import machine

    command, env = python("-m", "rank0rl.tools.doctor", "answer")
    script = f"PYTHONPATH={shlex.quote(env['PYTHONPATH'])} exec {shlex.join(command)}"
    session = subprocess.Popen(
        [*SSH, host, f"cd {shlex.quote(os.getcwd())} && {script}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = threading.Timer(_LIMIT_S, session.kill)
    limit.start()
    assert session.stdin
    assert session.stdout
    try:
        about = json.loads(session.stdout.readline())
        answers = [_ask_time(session.stdin, session.stdout) for _ in range(20)]
    except (OSError, ValueError):
        _, errors = session.communicate()
        remedy = (
            f"make `ssh {host}` work without a question, and have {os.getcwd()} and this Python with "
            f"its packages there"
        )
        return [_Line(host, _last_line(errors, f"no answer within {_LIMIT_S} s"), remedy)]
    finally:
        limit.cancel()
        session.kill()
        session.communicate()
    trip_s, ahead_s = min(answers)
    here = machine.describe()
    how = "{name} is {now} there and {before} here"
    differing = machine.differences(here, about, how)
    cpu = f"same bits, {about['cpu']}"
    if about["fingerprint"] != here["fingerprint"]:
        cpu = f"other bits, {about['cpu']}"
    speed = f"round trip by ssh {1e3 * trip_s:.2f} ms, clock {1e3 * ahead_s:+.1f} ms"
    remedy = "; ".join([*differing, "install the same versions"]) if differing else ""
    return [_Line(host, f"{speed}, {cpu}", remedy), _room(about["free_mb"], vendor, ranks)]


def _ask_time(question: IO[str], answer: IO[str]) -> tuple[float, float]:
    """Ask the other host for its time; return the round trip and how far its clock is ahead, in s."""
    begin = time.time()
    question.write("\n")
    question.flush()
    there = float(answer.readline())
    end = time.time()
    return end - begin, there - (begin + end) / 2


def _answer() -> None:
    """Print a line about this host, then answer each line of stdin with the time."""
    limit_cpu_as(())  # as the doctor that asks
    from rank0rl.run import machine

    print(json.dumps({**machine.describe(), "free_mb": free_space()}), flush=True)
    for _ in sys.stdin:
        print(time.time(), flush=True)


if __name__ == "__main__":
    {"gather": _gather, "where": _where, "answer": _answer}[sys.argv[1]]()
