"""Train runs on the cores of this machine: one rank a run while there are more runs than cores.

When fewer runs are left, those with the most work left are stopped at a boundary, and go on with the
cores that have become free. That changes no curve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rank0rl.study.planned import Planned
from rank0rl.study.spread import spread
from rank0rl.study.training import SAVED, Core, Training

_TURN_S = 0.2
_WORTH = 2.0  # times the seconds of a start that more cores must save


class Runs(Protocol):
    """The runs that are to be trained, such as a list of them or a search."""

    def take(self) -> Planned | None:
        """Return the next run; None if there is none, now or ever."""

    def waits(self) -> bool:
        """Return True if there may be a next run later, because another machine has claimed it."""

    def stops(self, training: Training) -> bool:
        """Return True if a run need not be trained to its end."""

    def done(self, planned: Planned, code: int) -> None:
        """Take in that a run has ended, with this exit code of its training; 0 if it was stopped."""


class Schedule:
    """Trains runs until there are no more.

    Args:
        runs: the runs.
        folder: folder of the study.
        cores: the cores.
        show: is called again and again with the runs in training.
    """

    def __init__(
        self,
        runs: Runs,
        folder: Path,
        cores: Sequence[Core],
        show: Callable[[Sequence[Training]], None],
    ) -> None:
        """Start nothing yet."""
        self._runs, self._folder, self._show = runs, folder, show
        self._free = [*cores]
        self._training: list[Training] = []
        self._enough: set[str] = set()

    def run(self) -> None:
        """Train. However this is left, all training has saved and ended then."""
        try:
            self._fill()
            while self._training or self._runs.waits():
                time.sleep(_TURN_S)
                for training in [*self._training]:
                    self._look_at(training)
                self._fill()
                self._show(self._training)
        finally:
            for training in self._training:
                training.stop()
            for training in self._training:
                training.wait()

    def _look_at(self, training: Training) -> None:
        """Take back the cores of training that has ended, and let it go on if it was stopped for more."""
        name = training.planned.name
        code = training.poll()
        if code is None:
            if name not in self._enough and self._runs.stops(training):
                self._enough.add(name)
                training.stop()
            return
        self._training.remove(training)
        if code in SAVED and training.next_cores and name not in self._enough:
            self._training.append(Training(training.planned, self._folder, training.next_cores))
            return
        self._free += training.next_cores or training.cores
        self._runs.done(training.planned, 0 if name in self._enough and code in SAVED else code)

    def _fill(self) -> None:
        """Give free cores to runs that wait; if none does, to those that have the most work left."""
        starting: list[Planned] = []
        while len(starting) < len(self._free) and (planned := self._runs.take()):
            starting.append(planned)
        each = spread(len(self._free), [1.0] * len(starting), [p.most for p in starting])
        for planned, number in zip(starting, each, strict=True):
            self._training.append(Training(planned, self._folder, self._taken(number)))
        if self._free and not any(training.next_cores for training in self._training):
            self._widen()

    def _widen(self) -> None:
        """Stop the runs for which more cores are worth a new start."""
        known = [(training, times) for training in self._training if (times := training.times())]
        if len(known) < len(self._training):
            return  # it is too early to tell
        each = spread(
            len(self._free) + sum(len(training.cores) for training, _ in known),
            [left_s * len(training.cores) for training, (_, left_s) in known],
            [training.planned.most for training, _ in known],
        )
        for (training, (startup_s, left_s)), number in zip(known, each, strict=True):
            more = min(number - len(training.cores), len(self._free))
            if training.planned.name in self._enough:
                continue
            if more > 0 and left_s * more / number > _WORTH * startup_s:
                training.next_cores = [*training.cores, *self._taken(more)]
                training.stop()

    def _taken(self, number: int) -> list[Core]:
        """Take so many of the free cores."""
        taken, self._free = self._free[:number], self._free[number:]
        return taken
