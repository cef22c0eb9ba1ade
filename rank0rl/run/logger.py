"""The record of a run, written by rank 0 alone: console, progress.csv, summary.json.

Every row is flushed as soon as it is written.
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

_PLAIN_S = 2.0  # seconds between status lines when the output is not a terminal


class Logger:
    """A writer of one row per iteration.

    Args:
        folder: the run's folder.
        quiet: print nothing on the console.
        sinks: further receivers of every row.
    """

    def __init__(self, folder: Path, quiet: bool = False, sinks: Iterable[Sink] = ()) -> None:
        """Open the console; the CSV file is opened by its first row."""
        self.folder = folder
        columns = os.environ.get(
            TERMINAL
        )  # set by the supervisor: the width of its terminal, or ""
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
        """Delete the rows after an iteration, because a resumed run writes them again.

        Raises:
            ValueError: if rows up to the iteration are missing.
        """
        path = self.folder / "progress.csv"
        text = path.read_text() if path.exists() else ""
        complete = text[: text.rfind("\n") + 1]  # without a row that was cut short by a kill
        rows = list(csv.reader(complete.splitlines()))
        kept = [row for row in rows[1:] if int(row[0]) <= iteration]
        if [int(row[0]) for row in kept] != list(range(1, iteration + 1)):
            raise ValueError(
                f"{path} must have the rows of iterations 1 to {iteration}, the checkpoint's "
                f"iteration: it has {len(kept)} of them; put the run's own file back"
            )
        if iteration == 0:
            path.unlink(missing_ok=True)  # the first row brings its header
            return
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            csv.writer(file).writerows([rows[0], *kept])
        temporary.replace(path)

    def row(self, groups: Mapping[str, Mapping[str, float | str]], step: int) -> None:
        """Write one row; the names of the first row are the header.

        Args:
            groups: group -> name -> value. The names are the CSV's columns. The other sinks receive
                the numbers as "group/name".
            step: environment steps so far.

        Raises:
            ValueError: if two groups have the same name, or the names differ from those of the
                first row.
        """
        values: dict[str, float | str] = {}
        for group, members in groups.items():
            if twice := [name for name in members if name in values]:
                raise ValueError(
                    f"{group}: {', '.join(map(repr, twice))} is a column of the record already; "
                    f"choose a name other than {', '.join(values)}"
                )
            values |= members
        if self._csv is None:
            self._open(list(values))
        if list(values) != self._names:
            raise ValueError(
                f"every iteration must record the same names: expected {self._names}, got "
                f"{list(values)}; make update return the same names every time"
            )
        csv.writer(self._csv).writerow([short(value) for value in values.values()])
        self._csv.flush()
        numbers = {
            f"{group}/{name}": float(value)
            for group, members in groups.items()
            for name, value in members.items()
            if not isinstance(value, str) and not math.isnan(value)
        }
        for sink in self._sinks:
            sink.row(numbers, step)

    def show(self, line: str, stays: bool = False) -> None:
        """Show the state of the run: in place on a terminal, else as a line every few seconds.

        Args:
            line: the text to show.
            stays: on a terminal, leave the line there when the next one comes.
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
        """Print a line that stays on the console."""
        self.console.print(line, soft_wrap=True, markup=False)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json."""
        temporary = self.folder / "summary.tmp"
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(self.folder / "summary.json")

    def close(self) -> None:
        """Close the files and sinks, and leave the terminal as it was."""
        self._live.stop()
        if self._csv is not None:
            with contextlib.suppress(OSError):  # a full disk was already reported by the row itself
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
    """Return the rows of a run's progress.csv, column -> text; [] if there is no such file yet."""
    path = folder / "progress.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def short(value: float | str | None) -> str:
    """Return a number with six digits, as it stands in the CSV and on the console."""
    return str(value) if value is None or isinstance(value, int | str) else f"{value:.6g}"
