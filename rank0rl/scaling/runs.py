"""Training runs of a speedup study, each in processes of its own, and what they recorded."""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rank0rl.run.logger import read_rows
from rank0rl.scaling.speedup_options import Options


@dataclass(frozen=True)
class TimedRun:
    """Record of one run. Its first iteration, which warms up, is not timed."""

    nprocs: int
    settings: dict[str, Any]
    """Settings of the run, as in its config.toml."""
    rows: list[dict[str, str]]
    """Rows of its progress.csv, one for each iteration."""

    def until(self, last: int) -> TimedRun:
        """Return the same run up to this iteration."""
        return replace(self, rows=self.rows[:last])

    def mean(self, column: str) -> float:
        """Return a column's mean over all timed iterations."""
        return statistics.mean(float(row[column]) for row in self.rows[1:])

    def most(self, column: str) -> float:
        """Return a column's maximum over all iterations."""
        return max(float(row[column]) for row in self.rows)

    def difference(self, column: str) -> float:
        """Return by how much a column grew in the timed iterations."""
        return float(self.rows[-1][column]) - float(self.rows[0][column])

    @property
    def steps_per_s(self) -> float:
        """Steps per second of the timed iterations."""
        return self.difference("steps") / self.difference("seconds")


class FailedError(Exception):
    """Failure of a run of the study. The message has the run's output."""


def train(given: Options, rest: Sequence[str], nprocs: int, folder: Path, *more: str) -> TimedRun:
    """Train one run.

    Args:
        given: options of the study.
        rest: arguments for the training script.
        nprocs: number of ranks.
        folder: the run's folder.
        more: further arguments for the training script.

    Raises:
        FailedError: if the run fails, or ends before its second iteration.
    """
    stop = ["--stop-after-iterations", str(given.iterations + 1)]
    if given.seconds is not None:
        stop = ["--stop-after-seconds", str(given.seconds)]
    program = [str(given.script)] if given.script else ["-m", "rank0rl", "train"]
    command = [sys.executable, *program, *rest, *more, "--nprocs", str(nprocs)]
    command += [*stop, "--keep-checkpoints", "1", "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"{shlex.join(command)} failed:\n{done.stdout[-500:]}{done.stderr}")
    rows = read_rows(folder)
    if len(rows) < 2:
        raise FailedError(
            f"a run made {len(rows)} iterations, and the first one is not timed: raise --seconds, "
            f"--iterations or --total-steps"
        )
    return TimedRun(nprocs, tomllib.loads((folder / "config.toml").read_text()), rows)
