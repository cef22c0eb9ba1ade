"""The cost of a large replay in an agent's state: python benchmarks/large_replay.py.

PPO with a replay of 1 GB that is full from the first update on, and takes the rows of every batch. All is as by default,
checkpoints too. The share is the seconds of `record_s`, which takes the state at each iteration's end and writes files,
of those of the run. The first checkpoint is told apart: it writes the whole replay. By turns the replay is as large, has one row, or its rows are an array in `state`.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl import Replay
from rank0rl.algos.ppo import PPO
from rank0rl.run.options import RunOptions

ROOT = Path(__file__).parents[1]
ROW = 256  # numbers: 1 kB
SIZES = {"Full": "replay of {gb:g} GB", "Tiny": "replay of one row", "Plain": "array of {gb:g} GB"}
GB = 1.0
_EVERY = RunOptions().checkpoint_every


class Tiny(PPO):
    """PPO that keeps the last row."""

    settings = "ppo"
    capacity = 1

    def __init__(self, *args: Any) -> None:
        """Make the replay."""
        super().__init__(*args)
        self.replay = Replay(self.capacity)

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


class Full(Tiny):
    """PPO with a large replay."""

    capacity = int(GB * 1e9) // (4 * ROW)


class Plain(PPO):
    """PPO with as many rows in an array."""

    settings = "ppo"

    def __init__(self, *args: Any) -> None:
        """Make the array."""
        super().__init__(*args)
        self.rows = np.ones((Full.capacity, ROW), np.float32)

    def state(self) -> dict[str, Any]:
        """Return the array too."""
        return {**super().state(), "rows": self.rows}

    def load(self, state: Any) -> None:
        """Take the array back."""
        super().load(state)
        self.rows[:] = state["rows"]


def share(agent: str, steps: int, folder: Path) -> tuple[float, float]:
    """Train; return the seconds of record until the first checkpoint is written, and the share of record after it."""
    algo = f"{Path(__file__).resolve()}:{agent}"
    words = ["Walker2d", "--algo", algo, "--total-steps", str(steps), "--run-dir", str(folder)]
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
    given = parser.parse_args()
    for agent, what in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            first, after = share(agent, given.steps, Path(folder, "run"))
            print(f"{what.format(gb=GB)}: {first:.1f} s at first, then {after:.1%}")


if __name__ == "__main__":
    main()
