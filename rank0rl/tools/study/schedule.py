"""Share the cores of this machine among the runs of a study, and show them in a table.

When fewer runs are left, those with the most work left are stopped at a boundary, and go on with the
cores that have become free. That changes no curve.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from rank0rl.run.logger import short
from rank0rl.tools.readable import duration, percent
from rank0rl.tools.study.planned import Planned
from rank0rl.tools.study.training import SAVED, Core, Training, complaint, last_row

_TURN_S = 0.2
_SHOW_S = 0.5  # between two tables
_WORTH = 2.0  # times the seconds of a start that more cores must save


class Runs(Protocol):
    """The runs that are to be trained, such as a list of them or a search."""

    over: int
    """Number of runs that are over."""

    def take(self) -> Planned | None:
        """Return the next run; None if there is none, now or ever."""

    def waits(self) -> bool:
        """Return True if there may be a next run later, because another machine has claimed it."""

    def stops(self, training: Training) -> bool:
        """Return True if a run need not be trained to its end."""

    def done(self, planned: Planned, code: int) -> None:
        """Record the end of a run, with the exit code of its training; 0 if it was stopped early."""


class Progress:
    """The console of a study: a table of the runs in training on a terminal, else a line for each run that ends.

    Args:
        runs: the runs.
        total: number of runs, at most.
        name: what they are part of.
        folder: folder of the study.
    """

    def __init__(self, runs: Runs, total: int, name: str, folder: Path) -> None:
        self._runs, self._total, self._name, self._folder = runs, total, name, folder
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = 0.0

    def __enter__(self) -> Progress:
        """Show the table, if there is a terminal."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the table."""
        self._live.stop()

    def show(self, trainings: Sequence[Training]) -> None:
        """Show how far the runs in training have come."""
        if not self._live.is_started or time.monotonic() < self._shown + _SHOW_S:
            return
        self._shown = time.monotonic()
        numbers = ("cores", "done", "return", "time left")
        table = Table("run", *(Column(name, justify="right") for name in numbers), box=None)
        for training in trainings:
            times = training.times()
            table.add_row(
                training.planned.name,
                str(len(training.cores)),
                percent(min(training.part, 1.0)),
                _return(training.row()),
                duration(times[1]) if times else "",
            )
        table.caption = f"{self._name}: {self._runs.over} of {self._total} runs are over"
        self._live.update(table, refresh=True)

    def over(self, planned: Planned, code: int) -> None:
        """Print that a run has ended, and its return, or why it has failed."""
        folder = self._folder / planned.name
        said = f"failed: {complaint(folder)}" if code else f"return {_return(last_row(folder))}"
        self._console.print(
            f"{self._name}, {self._runs.over} of {self._total}: {planned.name}  {said}",
            soft_wrap=True,
            markup=False,
        )


def _return(row: dict[str, str] | None) -> str:
    return short(float(row["return_mean"] or "nan")) if row else ""


class Schedule:
    """Trains runs until there are no more.

    Args:
        runs: the runs.
        folder: folder of the study.
        cores: the cores.
        progress: is told of the runs in training, and of each that has ended.
    """

    def __init__(self, runs: Runs, folder: Path, cores: Sequence[Core], progress: Progress) -> None:
        self._runs, self._folder, self._progress = runs, folder, progress
        self._free = [*cores]
        self._training: list[Training] = []

    def run(self) -> None:
        """Train. However this is left, all training has saved and ended then."""
        try:
            self._fill()
            while self._training or self._runs.waits():
                time.sleep(_TURN_S)
                for training in [*self._training]:
                    self._look_at(training)
                self._fill()
                self._progress.show(self._training)
        finally:
            for training in self._training:
                training.stop()
            for training in self._training:
                training.wait()

    def _look_at(self, training: Training) -> None:
        """Take back the cores of training that has ended, or start it again if it was stopped for more cores."""
        code = training.poll()
        if code is None:
            if not training.given_up and self._runs.stops(training):
                training.given_up = True
                training.stop()
            return
        self._training.remove(training)
        if code in SAVED and training.next_cores and not training.given_up:
            self._training.append(Training(training.planned, self._folder, training.next_cores))
            return
        self._free += training.next_cores or training.cores
        if code in SAVED and training.given_up:
            code = 0
        self._runs.done(training.planned, code)
        self._progress.over(training.planned, code)

    def _fill(self) -> None:
        """Give free cores to runs that wait; if none waits, to those that have the most work left."""
        starting: list[Planned] = []
        while len(starting) < len(self._free) and (planned := self._runs.take()):
            starting.append(planned)
        each = _spread(len(self._free), [1.0] * len(starting), [p.most for p in starting])
        for planned, number in zip(starting, each, strict=True):
            self._training.append(Training(planned, self._folder, self._taken(number)))
        if self._free and not any(training.next_cores for training in self._training):
            self._widen()

    def _widen(self) -> None:
        """Stop the runs for which more cores are worth a new start."""
        known = [(training, times) for training in self._training if (times := training.times())]
        if len(known) < len(self._training):
            return  # it is too early to tell
        each = _spread(
            len(self._free) + sum(len(training.cores) for training, _ in known),
            [left_s * len(training.cores) for training, (_, left_s) in known],
            [training.planned.most for training, _ in known],
        )
        for (training, (startup_s, left_s)), number in zip(known, each, strict=True):
            more = min(number - len(training.cores), len(self._free))
            if training.given_up or more <= 0:
                continue
            if left_s * more / number > _WORTH * startup_s:
                training.next_cores = [*training.cores, *self._taken(more)]
                training.stop()

    def _taken(self, number: int) -> list[Core]:
        """Take so many of the free cores."""
        taken, self._free = self._free[:number], self._free[number:]
        return taken


def _spread(cores: int, left_s: Sequence[float], most: Sequence[int]) -> list[int]:
    """Give each core to the run that would end last with the cores that it has so far.

    Args:
        cores: number of cores, at least one for each run.
        left_s: seconds that each run would take on one core.
        most: most cores that each run can use.

    Returns:
        The number of cores of each run, at least 1.
    """
    each = [1] * len(left_s)
    for _ in range(cores - len(each)):
        may = [i for i in range(len(each)) if each[i] < most[i]]
        if not may:
            break
        each[max(may, key=lambda i: left_s[i] / each[i])] += 1
    return each
