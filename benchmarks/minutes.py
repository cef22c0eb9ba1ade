"""Minutes that 1M steps take with rank0rl on N ranks and with stable-baselines3: python benchmarks/minutes.py Walker2d Hopper.

Both have the whole machine, in turns, and the settings with which docs/results.md compares them: rank0rl those of
`train.py TASK`, stable-baselines3 those in rivals.toml. A turn makes --steps steps. Its start is not counted.
It needs the bench extra.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from pathlib import Path

from rivals import SETTINGS
from table import alternate, ratio, show

ROOT = Path(__file__).parent.parent


def main() -> None:
    tasks = [*tomllib.loads(SETTINGS.read_text())]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=tasks)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20_480)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    for task in args.tasks:
        ours = f"rank0rl, ranks: {args.nprocs}"
        ways = {
            ours: partial(rank0rl, task, args.nprocs, args.steps),
            "stable-baselines3": partial(sb3, task, args.steps),
        }
        figures = alternate(ways, args.repeats)
        quotient = ratio(figures[ours], figures["stable-baselines3"])
        show(
            f"{task}, minutes for 1M steps",
            {**figures, "rank0rl / stable-baselines3": quotient},
            args.out,
        )


def rank0rl(task: str, nprocs: int, steps: int) -> float:
    """Return the minutes for 1M steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", task, "--nprocs", str(nprocs), "--quiet"]
        command += ["--total-steps", str(steps), "--run-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return minutes(Path(folder, "progress.csv"))


def sb3(task: str, steps: int) -> float:
    """Return the minutes for 1M steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "curve.csv")
        command = [sys.executable, str(ROOT / "benchmarks" / "rivals.py"), task]
        command += ["--seeds", "0", "--total-steps", str(steps), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return minutes(out)


def minutes(path: Path) -> float:
    """Return the minutes for 1M steps, from the first and the last row of a curve."""
    with path.open(newline="") as file:
        first, *_, last = (
            (int(row["steps"]), float(row["seconds"])) for row in csv.DictReader(file)
        )
    return (last[1] - first[1]) / (last[0] - first[0]) * 1e6 / 60


if __name__ == "__main__":
    main()
