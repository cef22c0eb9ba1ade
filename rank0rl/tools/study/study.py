"""python -m rank0rl study ENVIRONMENT ...: train many runs on all cores, and compare them.

The state of a study is the folders of its runs. A study that was stopped, or killed, goes on when the
same command is given again.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w
import tyro

from rank0rl.launch.failures import exit_code_after
from rank0rl.launch.hosts import read_hosts
from rank0rl.options import check
from rank0rl.run import files
from rank0rl.run import settings as config
from rank0rl.run.agents import short_name
from rank0rl.run.machine import available_cores
from rank0rl.tools import figures, report_study, results
from rank0rl.tools.study import machines, search
from rank0rl.tools.study.live import Progress
from rank0rl.tools.study.machines import claim
from rank0rl.tools.study.options import Options, check_file
from rank0rl.tools.study.planned import Planned, planned, seeds
from rank0rl.tools.study.training import Schedule, Training, complaint, ended, last_row

_TRUST = "--trust"


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, 1 if a run has failed, 2 for a wrong use, 128 + s after signal s."""
    try:
        figures.check()  # now, and not after all runs
        given, rest = read(argv)
        if given.search:
            search.check(given, rest)
        runs = planned(given, rest)
        out = Path(given.out or _name(given))
        for run in runs:
            run.check(out)
        hosts = read_hosts(given.hosts, None)
        leave = machines.enter(out)
        _keep(tomli_w.dumps(_settings(given, rest, out)).encode(), out / report_study.FILE)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    number = hosts[0].slots if hosts else given.cores
    failed: dict[str, str] = {}
    try:
        with _Stopped(), machines.Others(hosts, out):
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
        print(results.write(out, results.of_study(out), given.minutes_to))
        (out / "report.html").write_text(report_study.of_study(out), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: all is trained, but there are no results: {error}", file=sys.stderr)
        return 1
    print(f"in {out}: table.md, table.csv, runs.csv, learning.png, report.html")
    return 1 if failed else 0


def _search(given: Options, rest: Sequence[str], out: Path, number: int | None) -> dict[str, str]:
    """Search; return the settings that were found."""
    with Progress(given.trials * len(seeds(given.search_seeds)), "search") as show:

        def over(run: Planned, code: int) -> None:
            folder = out / run.name
            show.over(run, last_row(folder / "progress.csv"), complaint(folder) if code else "")

        searching = search.Search(given, rest, out, over)
        show.count = searching.over
        try:
            Schedule(searching, out, available_cores()[:number], show).run()
        finally:
            searching.write()
    found = searching.best()
    words = " ".join(f"{name}={value}" for name, value in found.items())
    print(f"the search of {given.trials} trials has found {words}")
    return found


def _keep(settings: bytes, path: Path) -> None:
    """Write the study's file, unless another machine has written the same."""
    if not path.exists() or path.read_bytes() != settings:
        files.write(path, settings)


def _train(runs: Sequence[Planned], out: Path, number: int | None) -> dict[str, str]:
    """Train the runs that are not over yet; return run -> why it has failed."""
    cores = available_cores()[:number]
    print(f"runs: {len(runs)}, cores: {len(cores)}, folder: {out}", flush=True)
    with Progress(len(runs), "study") as show:
        listed = Listed(runs, out, show)
        Schedule(listed, out, cores, show).run()
    return listed.failed


class Listed:
    """The runs of a study that are not over yet.

    Args:
        runs: all runs.
        out: folder of the study.
        show: is told of each run that is over.
    """

    def __init__(self, runs: Sequence[Planned], out: Path, show: Progress) -> None:
        """Leave out the runs that are over."""
        self._out, self._show = out, show
        self._waiting = [run for run in runs if not ended(run, out)]
        show.count = len(runs) - len(self._waiting)
        self._claims: dict[str, Callable[[], None]] = {}
        self.failed: dict[str, str] = {}
        """Run -> why it has failed."""

    def take(self) -> Planned | None:
        """Claim the next run and return it; None if there is none, or other machines have claimed them."""
        for run in [*self._waiting]:
            release = claim(self._out / run.name)
            if release is None:
                continue
            self._waiting.remove(run)
            if not ended(run, self._out):
                self._claims[run.name] = release
                return run
            self._show.count += 1  # another machine has trained it
            release()
        return None

    def waits(self) -> bool:
        """Return True if other machines train, whose runs may have to be taken over."""
        return bool(self._waiting)

    def stops(self, training: Training) -> bool:
        """Return False: every run is trained to its end."""
        return False

    def done(self, run: Planned, code: int) -> None:
        """Say that a run has ended, and keep why, if it has failed."""
        folder = self._out / run.name
        if code:
            self.failed[run.name] = complaint(folder)
        self._show.over(run, last_row(folder / "progress.csv"), self.failed.get(run.name, ""))
        self._claims.pop(run.name)()


def read(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options of the study, and those of training.

    Raises:
        ValueError: if an option is wrong, or no environment is named.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    names = [*itertools.takewhile(lambda word: not word.startswith("-"), argv)]
    default, file = Options(envs=tuple(names)), None
    if len(names) == 1 and (
        names[0].endswith(".toml") or Path(names[0], report_study.FILE).exists()
    ):
        file = Path(names[0]) if names[0].endswith(".toml") else Path(names[0], report_study.FILE)
        (default,) = config.apply(config.load(file), Options(), source=str(file))
        of_file = default
        default = dataclasses.replace(default, trust=False)  # only the command line says that
        if file.name == report_study.FILE:  # a study goes on in its folder, wherever that is now
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
    return given, [*shlex.split(given.train), *rest, *[_TRUST] * given.trust]


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


class _Stop(BaseException):
    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class _Stopped:
    """Context in which the signals that ask a process to end raise `_Stop`, once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __enter__(self) -> None:
        self._before = {s: signal.signal(s, self._stop) for s in self._SIGNALS}

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _stop(self, signum: int, _frame: FrameType | None) -> None:
        for other in self._SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise _Stop(signum)
