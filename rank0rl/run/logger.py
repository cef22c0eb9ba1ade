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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from rank0rl.launch.job import TERMINAL
from rank0rl.run import files

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
        """SHA-256 of the header and the rows so far, for `check_rows`."""
        return self._sha256.hexdigest()

    def go_on_after(self, iteration: int) -> None:
        """Delete the rows after an iteration, because a resumed run writes them again."""
        path = self.folder / "progress.csv"
        rows = _rows_until(self.folder, iteration) if iteration else []
        if not rows:
            path.unlink(missing_ok=True)  # the first row brings its header
            return
        self.columns = rows[0]
        files.write(path, _text(rows))
        self._sha256.update(_text(rows))

    def row(self, values: Mapping[str, float | str]) -> None:
        """Write one row, column -> value. The columns of the first row are the header.

        Raises:
            ValueError: if the columns differ from those of the first row.
        """
        if self._csv is None:
            self._open(list(values))
        if list(values) != self.columns:
            raise ValueError(
                f"every iteration must record the same names: expected {self.columns}, got "
                f"{list(values)}; make update return the same names every time"
            )
        self._write([short(value) for value in values.values()])
        self._csv.flush()

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
        files.write(self.folder / "summary.json", f"{json.dumps(values, indent=2)}\n".encode())

    def close(self) -> None:
        """Close the file, and leave the terminal as it was."""
        self._live.stop()
        if self._csv is not None:
            with contextlib.suppress(OSError):  # a full disk was already reported by the row itself
                self._csv.close()

    def _open(self, names: list[str]) -> None:
        self._csv = files.append(self.folder / "progress.csv")
        if not self.columns:
            self.columns = names
            self._write(names)

    def _write(self, row: list[str]) -> None:
        self._csv.write(_text([row]))
        self._sha256.update(_text([row]))


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
    if not rows or rows[-1][0] != str(iteration):
        raise MissingRowsError(
            f"{path} is damaged: it must have the rows up to iteration {iteration}, that of the "
            f"checkpoint; put the run's own file back, or go on without them: --shorter-record"
        )
    if hashlib.sha256(_text(rows)).hexdigest() != sha256:
        raise ValueError(
            f"{path} is damaged: its rows up to iteration {iteration} are not those that the run "
            f"wrote; put the run's own file back"
        )


def _rows_until(folder: Path, iteration: int) -> list[list[str]]:
    """Return the header and the rows up to an iteration, without what a kill or a power cut has damaged."""
    rows = [
        row
        for row in files.read_table(folder / "progress.csv", "record")
        if row.get("iteration", "").isdecimal() and int(row["iteration"]) <= iteration
    ]
    return [[*rows[0]], *([*row.values()] for row in rows)] if rows else []


def _text(rows: Iterable[list[str]]) -> bytes:
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
    return str(value) if value is None or isinstance(value, int | str) else f"{value:.6g}"
