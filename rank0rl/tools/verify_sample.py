"""Verify stretches of a run from the checkpoints that were kept, for `python -m rank0rl verify --sample`."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from rank0rl.mpi import hashes
from rank0rl.options import names
from rank0rl.run import checkpoint, plan
from rank0rl.run.logger import check_rows
from rank0rl.run.machine import available_cores
from rank0rl.run.options import RunOptions
from rank0rl.tools.verify_record import OF_A_START, DifferentError, Part, Record
from rank0rl.tools.verify_training import begin, trained

_SHARE = 0.05  # of the run's time
_FOR_STEPS = 0.5  # share of that for iterations; the rest is for starting ranks
_MOST = 10  # iterations of a stretch: more of them prove little more
_START_S = 10.0  # seconds of a stretch on one rank that are not worth the start of others


def sample(record: Record, run: Path, nprocs: int | None = None) -> str:
    """Check the kept checkpoints, and repeat a few iterations after as many as there is time for.

    Args:
        record: what the run has recorded, with all rows.
        run: a folder for the last training, in an empty one.
        nprocs: number of ranks. None: one if a stretch is short, else as many as the run's, and at
            most one per core.

    Returns:
        What was verified.

    Raises:
        DifferentError: if the record is another one.
        ValueError: if there are rows or checkpoints missing, or the run cannot be trained again.
    """
    begun = time.monotonic()
    if len(record.rows) < record.last or "seconds" not in record.rows[record.last]:
        raise ValueError(
            f"--sample resumes checkpoints, which needs the whole progress.csv: got "
            f"{len(record.rows)} rows of {record.last} iterations; leave --sample out"
        )
    files = {int(file.stem): file for file in checkpoint.numbered(record.folder)}
    kept = {point: file for point, file in files.items() if point <= record.last}
    points = _resumable(record, kept)
    seconds = float(record.rows[record.last]["seconds"])
    length = min(max(int(record.last * _SHARE * _FOR_STEPS / len(points)), 1), _MOST)
    is_short = length * seconds / record.last * record.nprocs < _START_S
    nprocs = nprocs or (1 if is_short else min(record.nprocs, len(available_cores())))
    stretches = iterations = 0
    longest = 0.0
    for point in _far_apart(points):
        start = time.monotonic()
        if stretches and start + longest - begun > _SHARE * seconds:
            break
        iterations += _repeat(record, kept[point], run, length, nprocs)
        stretches += 1
        longest = max(longest, time.monotonic() - start)
    took = time.monotonic() - begun
    return (
        f"verified a sample of {record.last} iterations: {len(kept)} checkpoints belong to the record, "
        f"and {iterations} iterations after {stretches} of them are the same; it took {took:.1f} s, "
        f"{took / seconds:.1%} of the run's {seconds:.1f} s"
    )


def _resumable(record: Record, kept: Mapping[int, Path]) -> list[int]:
    """Check all checkpoints; return the iterations of those from which the run can be repeated."""
    points, before = [], 0
    for point, file in kept.items():
        saved = plan.read_saved(file, trust=True)  # nothing that it names is imported here
        _check(record, file, saved, before)
        if point < record.last and _goes_on(record, point, saved):
            points.append(point)
        before = point
    if not points:
        raise ValueError(
            f"--sample needs checkpoints from before the run's end, without episodes longer than "
            f"--max-replay-steps: {record.folder} has none; leave --sample out, and train with "
            f"--keep-checkpoints spread:10 the next time"
        )
    return points


def _check(record: Record, file: Path, saved: Mapping[str, Any], before: int) -> None:
    """Check that a checkpoint has the settings, the weights and the rows of the record.

    Args:
        record: what the run has recorded.
        file: the checkpoint.
        saved: its contents.
        before: iteration of the checkpoint before it.
    """
    point = int(file.stem)
    claimed = {**record.settings, **_part(record, point).settings}
    free = names(RunOptions, resume=True) - OF_A_START
    lines = [
        f"{name}: {_text(claimed.get(name))} in config.toml, {_text(saved['settings'].get(name))} in it"
        for name in sorted({*claimed, *saved["settings"]} - free)
        if _text(claimed.get(name)) != _text(saved["settings"].get(name))
    ]
    if lines:
        raise DifferentError(f"{file} has other settings than the run", lines)
    try:
        check_rows(record.folder, point, saved["rows_sha256"])
    except ValueError:
        raise DifferentError(
            f"one of the rows {before + 1} to {point} of progress.csv is not what the run wrote, by "
            f"the hash of its rows in {file}"
        ) from None
    row = record.rows.get(point, {})
    if not hashes.sha256_tensors(saved["weights"]).startswith(row.get("weights_sha256", "")):
        raise DifferentError(f"{file} has other weights than those of its row")


def _goes_on(record: Record, point: int, saved: Mapping[str, Any]) -> bool:
    """Return True if the run went on from a checkpoint as one that is resumed there does.

    That begins new episodes in place of those that are too long to repeat.
    """
    envs = saved["collector"].get("envs")
    return (
        _part(record, point).after == point or not envs or not (envs["kept"] < envs["steps"]).any()
    )


def _part(record: Record, point: int) -> Part:
    """Return the part of the run that goes on from a checkpoint."""
    return next(part for part in reversed(record.parts) if part.after <= point)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # a tuple is a list, as in a file


def _far_apart(points: Sequence[int]) -> Iterator[int]:
    """Yield points in an order in which the first few are always spread over all."""
    rest, done = [*points], [points[-1]]
    yield rest.pop()
    while rest:
        done.append(max(rest, key=lambda point: min(abs(point - other) for other in done)))
        rest.remove(done[-1])
        yield done[-1]


def _repeat(record: Record, file: Path, run: Path, length: int, nprocs: int) -> int:
    """Train on from a copy of a checkpoint; return the number of iterations that are the same."""
    point = int(file.stem)
    part = _part(record, point)
    until = min(point + length, part.until)
    shutil.rmtree(run, ignore_errors=True)
    if point:
        (run / "checkpoints").mkdir(parents=True)
        shutil.copy(file, run / "checkpoints")
        with (run / "progress.csv").open("w", newline="") as table:
            rows = list(islice(record.rows.values(), point))
            writer = csv.DictWriter(table, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    words = ["--resume", str(run)] if point else begin(record, run)
    made = point
    with closing(trained(words, run, until, nprocs)) as again:
        for row in again:
            record.compare(row, part.start)
            made = int(row["iteration"])
    if made < until:
        raise DifferentError(f"the run went on to iteration {until}, and now it ends after {made}")
    return made - point
