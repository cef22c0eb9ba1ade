"""What a run has left in its folder, for the tools that show it: settings, starts and rows."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.run import config
from rank0rl.run.logger import read_rows

Array = npt.NDArray[np.float64]

_NEEDED = {"iteration", "steps", "episodes", "seconds", "return_mean", "steps_per_s"}


@dataclass(frozen=True)
class Recorded:
    """A run's config.toml and progress.csv."""

    folder: Path
    """Where they are."""
    settings: dict[str, Any]
    """All that are not None."""
    starts: list[dict[str, Any]]
    """What was so at each start of the run, the first one first: versions, machine, command."""
    rows: list[dict[str, str]]
    """One for each iteration, column -> text; at least one."""

    def column(self, name: str) -> Array:
        """The numbers of a column, (rows,); NaN where it is empty.

        Raises:
            ValueError: if there is text in it.
        """
        try:
            return np.array([float(row[name] or "nan") for row in self.rows])
        except ValueError as error:
            raise ValueError(f"{self.folder / 'progress.csv'}, column {name}: {error}") from None


def read(folder: Path) -> Recorded:
    """A run's record, as far as it has come.

    Raises:
        ValueError: if the folder has no run with at least one iteration.
    """
    path = folder / "progress.csv"
    if not path.exists():
        raise ValueError(f"{folder} is no folder of a run: it has no progress.csv")
    rows = [row for row in read_rows(folder) if None not in row.values()]  # one may be cut short
    if not rows:
        raise ValueError(f"{path} is empty: no iteration of this run has ended yet")
    if missing := _NEEDED - rows[0].keys():
        raise ValueError(f"{path} is not of rank0rl: it has no column {', '.join(sorted(missing))}")
    settings = config.load(folder / "config.toml")
    starts = tomllib.loads((folder / "config.toml").read_text()).get("record", [])
    return Recorded(folder, settings, starts, rows)
