"""The console of a study: a table of the runs in training on a terminal, else a line for each run that ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from rank0rl.run.logger import short
from rank0rl.tools.readable import duration, percent
from rank0rl.tools.study.planned import Planned
from rank0rl.tools.study.training import Training

_EVERY_S = 0.5


class Progress:
    """The table of a study. It is shown while entered.

    Args:
        planned: number of runs, at most.
        what: what they are part of.
    """

    def __init__(self, planned: int, what: str) -> None:
        """Show nothing yet."""
        self._planned, self._what = planned, what
        self.count = 0
        """Number of runs that are over."""
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

    def __call__(self, trainings: Sequence[Training]) -> None:
        """Show how far the runs in training have come."""
        if not self._live.is_started or time.monotonic() < self._shown + _EVERY_S:
            return
        self._shown = time.monotonic()
        numbers = ("cores", "done", "return", "time left")
        table = Table("run", *(Column(name, justify="right") for name in numbers), box=None)
        for training in trainings:
            row, times = training.row(), training.times()
            table.add_row(
                training.planned.name,
                str(len(training.cores)),
                percent(min(training.part, 1.0)),
                _return(row),
                duration(times[1]) if times else "",
            )
        table.caption = f"{self._what}: {self.count} of {self._planned} runs are over"
        self._live.update(table, refresh=True)

    def over(self, planned: Planned, row: dict[str, str] | None, complaint: str) -> None:
        """Say that a run has ended.

        Args:
            planned: the run.
            row: the last row of its record, if it has one.
            complaint: why it has failed, "" if it has not.
        """
        self.count += 1
        said = f"failed: {complaint}" if complaint else f"return {_return(row)}"
        self._console.print(
            f"{self._what}, {self.count} of {self._planned}: {planned.name}  {said}",
            soft_wrap=True,
            markup=False,
        )


def _return(row: dict[str, str] | None) -> str:
    return short(float(row["return_mean"] or "nan")) if row else ""
