"""Measure what --cpu portable costs: short trainings with it and with --cpu native, in turn: python benchmarks/portable.py.

Every figure is a process of its own, with one rank. A line is the time of `portable` in relation to `native`, or its
milliseconds for an iteration. The first iteration is not timed.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from table import alternate, ratio, show

ROOT = Path(__file__).parent.parent
WALKER = "Walker2d --steps-per-batch 2048"
PPO = f"{WALKER} --config benchmarks/ppo-64x64.toml"
CASES = {
    "PPO": PPO,
    "PPO, minibatches of 512": f"{PPO} --minibatch-size 512",
    "beta": f"{PPO} --actions beta",
    "TRPO": f"{WALKER} --algo trpo",
    "GRU": f"{PPO} --recurrent gru --epochs 4",
    "LSTM": f"{PPO} --recurrent lstm --epochs 4",
    "network of one's own": f"{PPO} --algo examples/04_network.py:MyPPO --epochs 4",
    "network of one's own, minibatches of 512": f"{PPO} --algo examples/04_network.py:MyPPO --minibatch-size 512",
    "images": "same_curve_envs:World --config benchmarks/ppo-64x64.toml --env-kwargs obs=image --steps-per-batch 1024 --epochs 4",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    for name in args.only:
        seen: dict[str, dict[str, list[float]]] = {"portable": {}, "native": {}}
        ways = {cpu: partial(train, CASES[name], cpu, args.iterations, seen[cpu]) for cpu in seen}
        alternate(ways, args.repeats)
        figures = {}
        for phase in ("collect", "update"):
            of = {cpu: seen[cpu][phase][1:] for cpu in seen}  # without that of warming up
            figures[f"{phase}, portable, ms"] = [1000 * x for x in of["portable"]]
            figures[f"{phase}, portable / native"] = ratio(of["portable"], of["native"])
        show(name, figures, args.out)


def train(words: str, cpu: str, iterations: int, seen: dict[str, list[float]]) -> float:
    """Train; add the median times of collecting and updating to `seen`, and return the latter."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *words.split(), "--cpu", cpu, "--run-dir", folder]
        command += ["--stop-after-iterations", str(iterations + 1), "--trust"]
        path = f"{ROOT / 'benchmarks'}"
        subprocess.run(
            command,
            cwd=ROOT,
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        with Path(folder, "progress.csv").open(newline="") as file:
            rows = [*csv.DictReader(file)][1:]
    for phase in ("collect", "update"):
        seen.setdefault(phase, []).append(
            statistics.median(float(row[f"{phase}_s"]) for row in rows)
        )
    return seen["update"][-1]


if __name__ == "__main__":
    main()
