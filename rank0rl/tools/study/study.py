"""python -m rank0rl study ENVIRONMENT ...: train many runs on all cores, and compare them.

The state of a study is the folders of its runs. A study that was stopped, or killed, goes on when the
same command is given again. Each machine runs the same study, and takes runs that no other one has claimed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w
import tyro

from rank0rl.launch.failures import exit_code_after
from rank0rl.launch.hosts import SSH, Host, read_hosts
from rank0rl.options import apply, check
from rank0rl.run import files, settings
from rank0rl.run.agents import short_name
from rank0rl.run.machine import available_cores
from rank0rl.tools import figures
from rank0rl.tools.study import results, search
from rank0rl.tools.study.planned import Options, Planned, check_file, planned, seeds
from rank0rl.tools.study.training import Progress, Runs, Schedule, claim

_MACHINES = "machines"  # folder of their claims and of what they print
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_TRUST = "--trust"


class _Stop(BaseException):
    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, 1 if a run has failed, 2 for a wrong use, 128 + s after signal s."""
    try:
        with figures.style():  # without matplotlib, now, and not after all runs
            given, rest = _read(argv)
        if given.search:
            search.check(given, rest)
        runs = planned(given, rest)
        out = Path(given.out or _name(given))
        for run in runs:
            run.check(out)
        hosts = read_hosts(given.hosts, None)
        leave = _enter(out)
        _keep(tomli_w.dumps(_settings(given, rest, out)).encode(), out / results.FILE)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    number = hosts[0].slots if hosts else given.cores
    try:
        with _stopped_by_signals(), _on_others(hosts[1:], out):
            if given.search:
                runs = planned(given, rest, _search(given, rest, out, number))
            failed = _train(runs, out, number)
    except _Stop as stop:
        print(f"stopped: {out} goes on with the same command", file=sys.stderr)
        return exit_code_after(stop.signum)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        leave()
    for name, why in failed.items():
        print(f"failed: {name}: {why} (see {out / name / 'output.txt'})", file=sys.stderr)
    if len(failed) == len(runs):
        return 1
    try:
        print(results.write(out, given.minutes_to))
    except (ValueError, OSError) as error:
        print(f"error: all is trained, but there are no results: {error}", file=sys.stderr)
        return 1
    print(f"in {out}: table.md, table.csv, runs.csv, learning.png, report.html")
    return 1 if failed else 0


def _read(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options of the study, and those of training.

    Raises:
        ValueError: if an option is wrong, or no environment is named.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    names = [*itertools.takewhile(lambda word: not word.startswith("-"), argv)]
    default, file = Options(envs=tuple(names)), None
    if len(names) == 1:
        path = Path(names[0])
        if path.suffix == ".toml":
            file = path
        elif (path / results.FILE).exists():
            file = path / results.FILE
    if file:
        (of_file,) = apply(settings.load(file), Options(), source=str(file))
        default = dataclasses.replace(of_file, trust=False)  # only the command line says that
        if file.name == results.FILE:  # a study goes on in its folder, wherever that is now
            default = dataclasses.replace(default, out=str(file.parent))
    given, rest = tyro.cli(
        Options,
        args=argv[len(names) :],
        default=default,
        prog="python -m rank0rl study",
        return_unknown_args=True,
    )
    check(given)
    if not given.envs:
        raise ValueError(
            "name the environments first, or a file of a study: python -m rank0rl study Walker2d "
            "Hopper --seeds 0:5"
        )
    if file and not given.trust:
        check_file(of_file, file)
    trust = [_TRUST] if given.trust else []
    return given, [*shlex.split(given.train), *rest, *trust]


def _name(given: Options) -> str:
    """Return the name of a study's folder: its environments and agents."""
    words = [*(env.rpartition(":")[2] for env in given.envs), *map(short_name, given.algo)]
    return f"runs/study-{re.sub(r'[^A-Za-z0-9_.-]+', '_', '-'.join(words))}"


def _settings(given: Options, rest: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the contents of study.toml, with which `study FOLDER` goes on, on any machine."""
    train = shlex.join(word for word in rest if word != _TRUST)
    values = dataclasses.asdict(given) | {"train": train, "out": str(out)}
    values |= {"cores": None, "hosts": None, "trust": None}
    return {name: value for name, value in values.items() if value not in (None, (), "")}


def _keep(content: bytes, path: Path) -> None:
    """Write the study's file, unless another machine has written the same."""
    if not path.exists() or path.read_bytes() != content:
        files.write(path, content)


def _enter(out: Path) -> Callable[[], None]:
    """Claim the cores of this machine for the study in a folder; return what gives them up.

    Raises:
        ValueError: if another process trains the study with these cores.
    """
    release = claim(out / _MACHINES / f"{platform.node()}-{available_cores()[0][0]}")
    if release is None:
        raise ValueError(f"another process of this machine trains the study in {out}")
    return release


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise `_Stop` in this context, once, after a signal that asks a process to end."""

    def stop(signum: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _Stop(signum)

    before = {signum: signal.signal(signum, stop) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _on_others(hosts: Sequence[Host], out: Path) -> Iterator[None]:
    """Start the study on other machines by ssh. Wait for them at the end; stop them if the study is stopped.

    Args:
        hosts: the other machines.
        out: folder of the study, on storage that all machines share.
    """
    sessions: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for host in hosts:
            study = [sys.executable, "-m", "rank0rl", "study", str(out), _TRUST]
            words = shlex.join([*study, "--cores", str(host.slots)])
            path = shlex.quote(os.environ.get("PYTHONPATH", ""))
            command = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={path} TERM=dumb exec {words}"
            output = out / _MACHINES / f"{host.name}.txt"
            with output.open("ab") as file:
                sessions[output] = subprocess.Popen(
                    [*SSH[:-1], "-tt", *SSH[-1:], host.name, command],  # it ends with its terminal
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C must not reach ssh
                )
        yield
        for output, session in sessions.items():
            if session.wait():
                print(
                    f"note: the study on {output.stem} has not come to its end: see {output}",
                    file=sys.stderr,
                )
    except BaseException:
        for session in sessions.values():
            session.terminate()
        raise
    finally:
        for session in sessions.values():
            session.wait()


def _search(given: Options, rest: Sequence[str], out: Path, number: int | None) -> dict[str, str]:
    """Search; return the settings that were found."""
    searching = search.Search(given, rest, out)
    total = given.trials * len(seeds(given.search_seeds))
    try:
        with Progress(searching, total, "search", out) as progress:
            Schedule(searching, out, available_cores()[:number], progress).run()
    finally:
        searching.write()
    found = searching.best()
    words = " ".join(f"{name}={value}" for name, value in found.items())
    print(f"the search of {given.trials} trials has found {words}")
    return found


def _train(runs: Sequence[Planned], out: Path, number: int | None) -> dict[str, str]:
    """Train the runs that are not over yet; return run -> why it has failed."""
    cores = available_cores()[:number]
    print(f"runs: {len(runs)}, cores: {len(cores)}, folder: {out}", flush=True)
    left = Runs(runs, out)
    with Progress(left, len(runs), "study", out) as progress:
        Schedule(left, out, cores, progress).run()
    return left.failed
