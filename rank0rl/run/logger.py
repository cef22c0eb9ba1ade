"""The record of a run, written by rank 0 alone: console, progress.csv, summary.json.

Every row is flushed when it is written.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from rank0rl.mpi.job import TERMINAL
from rank0rl.run.sinks import Sink

_PLAIN_S = 2.0  # between plain lines, where there is no terminal


class Logger:
    """Writes a row per iteration.

    Args:
        folder: the run's.
        quiet: no console lines.
        sinks: which take every row besides.
    """

    def __init__(self, folder: Path, quiet: bool = False, sinks: Iterable[Sink] = ()) -> None:
        """Open the console; the CSV opens with its first row."""
        self.folder = folder
        columns = os.environ.get(TERMINAL)  # under a supervisor, what it has
        self.console = Console(
            force_terminal=None if columns is None else bool(columns),
            width=int(columns) if columns else None,
            quiet=quiet,
            highlight=False,
        )
        self._csv: Any = None
        self._sinks = list(sinks)
        self._names: list[str] = []
        self._printed = -math.inf
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def go_on_after(self, iteration: int) -> None:
        """Drop the rows that come after an iteration, as a resumed run will write them again.

        Raises:
            ValueError: if rows up to there are missing.
        """
        path = self.folder / "progress.csv"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # what was cut short when the run was killed is not
        rows = list(csv.reader(whole.splitlines()))
        kept = [row for row in rows[1:] if int(row[0]) <= iteration]
        if [int(row[0]) for row in kept] != list(range(1, iteration + 1)):
            raise ValueError(
                f"{path} must have the rows of iterations 1 to {iteration}, where the checkpoint is: "
                f"it has {len(kept)} of them; put the run's own file back"
            )
        if iteration == 0:
            path.unlink(missing_ok=True)  # the first row brings its header
            return
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            csv.writer(file).writerows([rows[0], *kept])
        temporary.replace(path)

    def row(self, groups: Mapping[str, Mapping[str, float | str]], step: int) -> None:
        """Write a row; the first one's names are the header.

        Args:
            groups: group -> name -> value. The names are the CSV's columns; other sinks take the
                numbers as group/name.
            step: environment steps so far.
        """
        values = {name: value for group in groups.values() for name, value in group.items()}
        if self._csv is None:
            self._open(list(values))
        if list(values) != self._names:
            raise ValueError(
                f"every iteration must record the same names: expected {self._names}, got "
                f"{list(values)}; update must always return the same ones"
            )
        csv.writer(self._csv).writerow([_short(value) for value in values.values()])
        self._csv.flush()
        numbers = {
            f"{group}/{name}": float(value)
            for group, each in groups.items()
            for name, value in each.items()
            if not isinstance(value, str) and not math.isnan(value)
        }
        for sink in self._sinks:
            sink.row(numbers, step)

    def show(self, line: str, stays: bool = False) -> None:
        """Show the state of the run: in place on a terminal, else as a line every few seconds.

        Args:
            line: what to show.
            stays: on a terminal, leave it there when the next line comes.
        """
        if self.console.is_terminal:
            self._live.start()
            self._live.update(line, refresh=True)
            if stays:
                self.print(line)
        elif time.monotonic() - self._printed >= _PLAIN_S:
            self._printed = time.monotonic()
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, soft_wrap=True, markup=False)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json."""
        temporary = self.folder / "summary.tmp"
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(self.folder / "summary.json")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()
        if self._csv is not None:
            with contextlib.suppress(OSError):  # of a full disk: the row's own error says so
                self._csv.close()
        while self._sinks:
            self._sinks.pop().close()

    def _open(self, names: list[str]) -> None:
        path = self.folder / "progress.csv"
        self._names = names
        exists = path.exists()
        if exists:
            with path.open(newline="") as file:
                self._names = next(csv.reader(file))
        self._csv = path.open("a", newline="")
        if not exists:
            csv.writer(self._csv).writerow(names)


def read_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's progress.csv, column -> text; none if there is no such file yet."""
    path = folder / "progress.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _short(value: float | str) -> str:
    return str(value) if isinstance(value, int | str) else f"{value:.6g}"
