"""The record of a run, for `python -m rank0rl verify`: settings, starts and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank0rl.options import names
from rank0rl.run import files
from rank0rl.run import settings as config
from rank0rl.run.options import RunOptions
from rank0rl.run.record import NOT_OF_THE_CURVE
from rank0rl.run.trust import trusted

OF_A_START = names(RunOptions, changes_curve=True, resume=True)
"""Settings that a start may change although they change the curve, such as total_steps."""
_NOT_IN_SUMMARY = {"nprocs", "seconds", "steps_per_s", "ended"}


class DifferentError(Exception):
    """A run that was made again is not what was recorded.

    Args:
        where: the place of the first difference, as a sentence.
        what: a line for each value that differs.
        start: record of the start that has made this part of the run, if versions may be the reason.
    """

    def __init__(
        self, where: str, what: Sequence[str] = (), start: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the place and the lines."""
        super().__init__(where)
        self.what, self.start = what, start


@dataclass(frozen=True)
class Part:
    """The iterations that one start of a run has made."""

    after: int
    """Iteration that it went on from; 0 in the first part."""
    until: int
    """Its last iteration."""
    settings: dict[str, Any]
    """Those of `OF_A_START` that are not None."""
    start: dict[str, Any]
    """Its record: versions, machine, command."""


@dataclass(frozen=True)
class Record:
    """The contents of a run's config.toml, progress.csv and summary.json."""

    folder: Path
    """The run's folder."""
    settings: dict[str, Any]
    """All settings that are not None, but for those of the parts."""
    parts: list[Part]
    """The parts, in order. Iterations that a later start has made again are left out."""
    rows: dict[int, dict[str, str]]
    """Iteration -> row, column -> text. There may be fewer rows than iterations."""
    summary: dict[str, Any]
    """The contents of summary.json; nothing if there is no such file."""
    made: int
    """Number of iterations that the run has made."""

    @property
    def last(self) -> int:
        """Number of iterations to verify."""
        return self.parts[-1].until

    @property
    def nprocs(self) -> int:
        """Number of ranks of the first start, 1 if it is not recorded."""
        return _whole(self.parts[0].start.get("nprocs", 1), self.folder / "config.toml")

    def compare(self, row: Mapping[str, str], start: Mapping[str, Any]) -> None:
        """Compare a row that was made again with the recorded one, if that was kept.

        Raises:
            DifferentError: naming the columns that differ. Times and memory do not count.
        """
        iteration = int(row["iteration"])
        recorded = self.rows.get(iteration, {})
        if what := _differing(recorded, row, NOT_OF_THE_CURVE):
            raise DifferentError(f"iteration {iteration} differs", what, start)

    def compare_summary(self, summary: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        """Compare the summary of a run that was made again, if the recorded one is of its last iteration.

        Raises:
            DifferentError: naming what differs, such as the hash of the weights.
        """
        if self.summary.get("iterations") != summary["iterations"]:
            return
        if what := _differing(self.summary, summary, _NOT_IN_SUMMARY):
            raise DifferentError(f"summary.json, of iteration {self.last}, differs", what, start)


def read(folder: Path, most: int | None = None, trust: bool = False) -> Record:
    """Read what a run has recorded.

    Args:
        folder: the run's folder.
        most: number of iterations to verify. None: all.
        trust: allow that code is imported which neither Gymnasium nor rank0rl has.

    Raises:
        ValueError: if a file is missing or damaged, or names code that is not trusted.
    """
    path, file = folder / "progress.csv", folder / "config.toml"
    table = files.read_table(path, "record")
    try:
        rows = {int(row["iteration"]): row for row in table}
    except (KeyError, ValueError):
        rows = {}
    if not rows or [*rows] != sorted(rows) or len(rows) < len(table) or min(rows) < 1:
        raise ValueError(
            f"{path} must have a row for each iteration, or for some of them, in order: put the run's "
            f"own file back"
        )
    settings = trusted(config.load(file), str(file), None, trust)
    summary = {}
    if (folder / "summary.json").exists():
        summary = files.read_json(folder / "summary.json", "summary")
    last = max(*rows, _whole(summary.get("iterations", 0), folder / "summary.json"))
    if most is not None and most < min(rows):
        raise ValueError(f"the first row of {path} is of iteration {min(rows)}: got --rows {most}")
    parts = _parts(file, settings, last if most is None else min(last, most))
    kept = {name: value for name, value in settings.items() if name not in OF_A_START}
    return Record(folder, kept, parts, rows, summary, last)


def _parts(file: Path, settings: Mapping[str, Any], last: int) -> list[Part]:
    """Return the parts of a run that still count, up to an iteration."""
    starts = config.starts(file)
    if not all({"iteration", "settings"} <= start.keys() for start in starts) or not starts:
        # an earlier version's: as far as it tells, the run was never stopped
        starts = [{**start, "iteration": 0, "settings": settings} for start in starts[-1:] or [{}]]
    kept: list[dict[str, Any]] = []
    for start in starts:
        at = _whole(start["iteration"], file)
        kept = [earlier for earlier in kept if earlier["iteration"] < at] + [start]
    ends = [*(start["iteration"] for start in kept[1:]), last]
    parts = [
        Part(start["iteration"], min(end, last), _own(start["settings"], file), start)
        for start, end in zip(kept, ends, strict=True)
        if start["iteration"] < last
    ]
    if not parts or parts[0].after:
        raise ValueError(
            f"{file} must have a table [[record]] for each start of the run, the first one from "
            f"iteration 0: put the run's own file back"
        )
    return parts


def _own(settings: Any, file: Path) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{file}: expected the settings of a start, got {settings!r}")
    return {name: settings[name] for name in OF_A_START if name in settings}


def _whole(number: Any, file: Path) -> int:
    if type(number) is not int:
        raise ValueError(f"{file}: expected a whole number, got {number!r}")
    return number


def _differing(
    recorded: Mapping[str, Any], again: Mapping[str, Any], but: frozenset[str] | set[str]
) -> list[str]:
    """Return a line for each recorded value that is another one now."""
    return [
        f"{name}: recorded {value}, now {again.get(name, 'absent')}"
        for name, value in recorded.items()
        if name not in but and str(value) != str(again.get(name, "absent"))
    ]
