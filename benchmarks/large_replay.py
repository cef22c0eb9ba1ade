"""The cost of a large replay in an agent's state: python benchmarks/large_replay.py.

PPO with a replay of 1 GB that is full from the first update on, and takes the rows of every batch. All but the layers is as by default,
checkpoints too. The share is the seconds of `record_s`, which takes the state at each iteration's end and writes files,
of those of the run. The first checkpoint is told apart: it writes the whole replay. By turns the replay is as large, has one row, or its rows are an array in `state`.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl import Replay
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.options import option
from rank0rl.run.options import RunOptions

ROOT = Path(__file__).parents[1]
ROW = 256  # numbers: 1 kB
SIZES = {"Full": "replay of {gb:g} GB", "Tiny": "replay of one row", "Plain": "array of {gb:g} GB"}
_EVERY = RunOptions().checkpoint_every


@dataclass(frozen=True)
class Options(PPOOptions):
    """PPO's options, and the size of what it keeps."""

    gb: float = option(1.0, "(0, inf)")
    """Size of a replay or array that is large, in GB."""

    @property
    def rows(self) -> int:
        """Rows of that size."""
        return int(self.gb * 1e9) // (4 * ROW)


class Full(PPO):
    """PPO with a large replay."""

    settings = "ppo"
    Options = Options

    def __init__(self, *args: Any) -> None:
        """Make the replay."""
        super().__init__(*args)
        self.capacity = self._capacity()
        self.replay = Replay(self.capacity)

    def _capacity(self) -> int:
        return self.options.rows

    def update(self, batch: Any, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Add a row for each of the batch."""
        rows = len(batch["obs"]) if self.replay.added else self.capacity
        self.replay.add({"row": np.ones((rows, ROW), np.float32)})
        return super().update(batch, rng, progress)

    def state(self) -> dict[str, Any]:
        """Return the replay too."""
        return {**super().state(), "replay": self.replay}

    def load(self, state: Any) -> None:
        """Take the replay back."""
        super().load(state)
        self.replay.load(state["replay"])


class Tiny(Full):
    """PPO that keeps the last row."""

    def _capacity(self) -> int:
        return 1


class Plain(PPO):
    """PPO with as many rows in an array."""

    settings = "ppo"
    Options = Options

    def __init__(self, *args: Any) -> None:
        """Make the array."""
        super().__init__(*args)
        self.rows = np.ones((self.options.rows, ROW), np.float32)

    def state(self) -> dict[str, Any]:
        """Return the array too."""
        return {**super().state(), "rows": self.rows}

    def load(self, state: Any) -> None:
        """Take the array back."""
        super().load(state)
        self.rows[:] = state["rows"]


def share(agent: str, steps: int, gb: float, folder: Path) -> tuple[float, float]:
    """Train; return the seconds of record until the first checkpoint is written, and the share of record after it."""
    algo = f"{Path(__file__).resolve()}:{agent}"
    words = ["Walker2d", "--config", str(ROOT / "benchmarks" / "ppo-64x64.toml"), "--algo", algo]
    words += ["--total-steps", str(steps), "--run-dir", str(folder), "--gb", str(gb)]
    command = [sys.executable, str(ROOT / "train.py"), *words, "--quiet"]
    subprocess.run(command, check=True)
    with (folder / "progress.csv").open() as file:
        rows = [*csv.DictReader(file)]
    record, end = ([float(row[name]) for row in rows] for name in ("record_s", "seconds"))
    first = _EVERY + 1  # the row of its iteration is written before it
    return sum(record[:first]), sum(record[first:]) / (end[-1] - end[first - 1])


def main() -> None:
    """Print the share of each agent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--gb", type=float, default=Options.gb)
    given = parser.parse_args()
    for agent, what in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            first, after = share(agent, given.steps, given.gb, Path(folder, "run"))
            print(f"{what.format(gb=given.gb)}: {first:.1f} s at first, then {after:.1%}")


if __name__ == "__main__":
    main()
