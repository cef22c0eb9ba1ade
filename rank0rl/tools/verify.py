"""python -m rank0rl verify RUN: train a run again from its settings, and compare it with its record.

Every column of progress.csv but times and memory must be the same, row by row. The first row that is
not ends the training. Each start of the run is repeated from the iteration that it went on from.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl.options import check, option
from rank0rl.run import files, machine, settings
from rank0rl.run.machine import available_cores
from rank0rl.run.record import NOT_OF_THE_CURVE
from rank0rl.tools import verify_record, verify_sample
from rank0rl.tools.evaluate import RunToLoad
from rank0rl.tools.verify_record import DifferentError, Record
from rank0rl.tools.verify_training import begin, resume, trained

_SAY_S = 10.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Options(RunToLoad):
    """Train a run again in a temporary folder, and compare every row with the run's progress.csv."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, with its config.toml and progress.csv. Nothing in it is changed."""
    nprocs: int | None = option(None, "[1, inf)")
    """Number of ranks. It changes how long this takes, and nothing else. None: as many as the run's, and at most one per core; one for a short --sample."""
    rows: int | None = option(None, "[1, inf)")
    """Verify this many iterations, the first ones. None: all."""
    sample: bool = False
    """Verify a few iterations after some of the checkpoints that were kept, until 5 % of the run's time is used. At least one checkpoint is taken, so a short run takes longer. See --keep-checkpoints spread:10."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0 if all is the same, 1 if not, 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl verify")
    try:
        check(given)
        if given.sample and given.rows:
            raise ValueError("--sample chooses the rows by itself: leave --rows or --sample out")
        record = verify_record.read(given.run, given.rows, given.trust)
        with tempfile.TemporaryDirectory(prefix="rank0rl-verify-") as folder:
            run = Path(folder, "run")
            try:
                method = verify_sample.sample if given.sample else whole
                print(method(record, run, given.nprocs))
            except DifferentError as error:
                _say(error, run)
                return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def whole(record: Record, run: Path, nprocs: int | None = None) -> str:
    """Train a run again, with all its starts; return what was verified.

    Args:
        record: what the run has recorded.
        run: a folder for the training, in an empty one.
        nprocs: number of ranks. None: as many as the run's, and at most one per core.

    Raises:
        DifferentError: if the record is another one.
        ValueError: if the run cannot be trained again.
    """
    nprocs = nprocs or min(record.nprocs, len(available_cores()))
    made, compared, said = 0, 0, time.monotonic()
    for part in record.parts:
        words = resume(part, run) if made else begin(record, run)
        with closing(trained(words, run, part.until, nprocs)) as rows:
            for row in rows:
                record.compare(row, part.start)
                made = int(row["iteration"])
                compared += made in record.rows
                if time.monotonic() - said >= _SAY_S:
                    said = time.monotonic()
                    print(f"the same up to iteration {made} of {record.last}", flush=True)
        if made < part.until:
            raise DifferentError(
                f"the run went on to iteration {part.until}, and now it ends after {made}"
            )
    summary = files.read_json(run / "summary.json", "summary")
    record.compare_summary(summary, record.parts[-1].start)
    columns = {*record.rows[min(record.rows)]} - NOT_OF_THE_CURVE
    starts = f", over {len(record.parts)} starts" if len(record.parts) > 1 else ""
    return (
        f"verified to iteration {made} of {record.made}: {compared} rows, all {len(columns)} columns "
        f"but times and memory{starts}"
    )


def _say(error: DifferentError, run: Path) -> None:
    """Print what differs, and what may be the reason."""
    print(f"NOT the same: {error}")
    for line in error.what:
        print(f"  {line}")
    if error.start is None:
        return
    [here] = settings.starts(run / "config.toml")[-1:]
    how = "  {name}: {before} in the record, {now} here"
    if lines := machine.differences(error.start, here, how):
        print("what may be the reason:", *lines, sep="\n")
    else:
        print("versions, CPU and BLAS are those of the record")
