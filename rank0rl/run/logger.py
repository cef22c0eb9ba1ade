"""The record of a run, written by rank 0 alone: console, progress.csv, summary.json.

Every row is flushed as soon as it is written.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rank0rl.launch.job import TERMINAL
from rank0rl.run import files

_COLUMNS = 1_000  # of progress.csv
_PLAIN_S = 2.0  # seconds between status lines when the output is not a terminal


class Logger:
    """Writes progress.csv and summary.json into the run's folder, and lines on the console.

    Args:
        folder: the run's folder.
        quiet: True to print nothing on the console.
    """

    def __init__(self, folder: Path, quiet: bool = False) -> None:
        self.folder = folder
        columns = os.environ.get(TERMINAL)  # from the supervisor: its terminal's width, "" without
        self.console = Console(
            force_terminal=None if columns is None else bool(columns),
            width=int(columns) if columns else None,
            quiet=quiet,
            highlight=False,
        )
        self._csv: Any = None
        self.columns: list[str] = []
        """Columns of progress.csv; [] before the first row."""
        self._sha256 = hashlib.sha256()
        self._printed = -math.inf
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    @property
    def rows_sha256(self) -> str:
        """SHA-256 of the rows so far, for `check_rows`. Empty columns do not count."""
        return self._sha256.hexdigest()

    def go_on_after(self, iteration: int) -> None:
        """Delete the rows after an iteration, because a resumed run writes them again."""
        path = self.folder / "progress.csv"
        rows = _rows_until(self.folder, iteration) if iteration else []
        if not rows:
            path.unlink(missing_ok=True)  # the first row brings its header
            return
        self._rewrite(rows, [*rows[0]])
        for row in rows:
            self._sha256.update(_filled(row))

    def row(self, values: Mapping[str, float | str]) -> None:
        """Write one row, column -> value. Columns that it lacks stay empty; new ones are added to all rows.

        Raises:
            ValueError: if there are very many columns.
        """
        path = self.folder / "progress.csv"
        new = [name for name in values if name not in self.columns]
        if len(self.columns) + len(new) > _COLUMNS:
            raise ValueError(
                f"a run can record {_COLUMNS:,} columns: after {len(self.columns):,}, got {new[0]!r} too; give "
                f"a metric the same name in every iteration"
            )
        if self.columns and new:
            if self._csv is not None:
                self._csv.close()
                self._csv = None
            self._rewrite(read_rows(self.folder), [*self.columns, *new])
        if self._csv is None:
            self._csv = files.append(path)
            if not self.columns:
                self.columns = new
                self._csv.write(_text([new]))
        texts = {name: short(values.get(name, "")) for name in self.columns}
        self._csv.write(_text([texts.values()]))
        self._csv.flush()
        self._sha256.update(_filled(texts))

    def show(self, line: str, stays: bool = False) -> None:
        """Show the state of the run: in place on a terminal, else as a line every few seconds.

        Args:
            line: the text to show.
            stays: on a terminal, leave the line there when the next one comes.
        """
        if self.console.is_terminal:
            self._live.start()
            self._live.update(Text(line), refresh=True)
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
        files.write(self.folder / "summary.json", f"{json.dumps(values, indent=2)}\n".encode())

    def close(self) -> None:
        """Close the file, and leave the terminal as it was."""
        self._live.stop()
        if self._csv is not None:
            with contextlib.suppress(OSError):  # a full disk was already reported by the row itself
                self._csv.close()

    def _rewrite(self, rows: Sequence[Mapping[str, str]], columns: list[str]) -> None:
        """Write the file anew, with these rows and columns."""
        self.columns = columns
        texts = [[row.get(name, "") for name in columns] for row in rows]
        files.write(self.folder / "progress.csv", _text([columns, *texts]))


class MissingRowsError(ValueError):
    """A run's progress.csv has fewer rows than its checkpoint knows, as after a power cut."""


def check_rows(folder: Path, iteration: int, sha256: str) -> None:
    """Check that the rows of a run's progress.csv up to an iteration are those that the run wrote.

    Args:
        folder: the run's folder.
        iteration: number of the iteration.
        sha256: `Logger.rows_sha256` after the iteration.

    Raises:
        ValueError: if the file cannot be read, or rows are missing or differ.
    """
    if not iteration:
        return
    path, rows = folder / "progress.csv", _rows_until(folder, iteration)
    if not rows or rows[-1]["iteration"] != str(iteration):
        raise MissingRowsError(
            f"{path} is damaged: it must have the rows up to iteration {iteration}, that of the "
            f"checkpoint; put the run's own file back, or go on without them: --shorter-record"
        )
    if hashlib.sha256(b"".join(map(_filled, rows))).hexdigest() != sha256:
        raise ValueError(
            f"{path} is damaged: its rows up to iteration {iteration} are not those that the run "
            f"wrote; put the run's own file back"
        )


def _rows_until(folder: Path, iteration: int) -> list[dict[str, str]]:
    """Return the rows up to an iteration, without what a kill or a power cut has damaged."""
    return [
        row
        for row in read_rows(folder)
        if row.get("iteration", "").isdecimal() and int(row["iteration"]) <= iteration
    ]


def _filled(row: Mapping[str, str]) -> bytes:
    """Return the columns of a row that are not empty, with their names, in alphabetical order."""
    return _text(sorted((name, text) for name, text in row.items() if text))


def _text(rows: Iterable[Iterable[str]]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue().encode()


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Return the complete rows of a run's progress.csv, column -> text; [] if there is no such file yet.

    Raises:
        ValueError: if the file cannot be read.
    """
    path = folder / "progress.csv"
    return files.read_table(path, "record") if path.exists() else []


def short(value: float | str | None) -> str:
    """Return a number with six digits, for the CSV and the console."""
    if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
        return str(value)
    return f"{float(value):.6g}"
