"""Speed and returns of PPO on one rank, on n with gathered rows, and on n with averaged gradients, in alternation.

    python benchmarks/eight_steps.py                           # needs the mujoco extra
    python benchmarks/eight_steps.py --env CartPole-v1 --iterations 20 --last 5

The files are ppo_gathered.py and ppo_averaged.py in examples/. On one rank no MPI is loaded. Every
figure is a process of its own and its first iteration does not count. Every repeat has its own seed,
the same for all ways.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from table import alternate, ratio, show

EXAMPLES = Path(__file__).parent.parent / "examples"
LINE = re.compile(r"iteration \d+ +return (\S+) +steps/s (\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Walker2d-v5")
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--steps-per-batch", type=int, default=4096)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--last", type=int, default=10, help="iterations to average returns over")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", default="eight_steps.csv", help='CSV in benchmarks/results; "" for none'
    )
    args = parser.parse_args()
    gathered, averaged = (f"{args.nprocs} ranks, {way}" for way in ("gathered", "averaged"))
    files = {
        "1 rank": ("ppo_gathered.py", 1),
        gathered: ("ppo_gathered.py", args.nprocs),
        averaged: ("ppo_averaged.py", args.nprocs),
    }
    learned: dict[str, list[float]] = {name: [] for name in files}
    ways = {name: way(args, *file, learned[name]) for name, file in files.items()}
    rates = alternate(ways, args.repeats)
    figures = {f"{name}, steps/s": x for name, x in rates.items()}
    figures["gathered / 1 rank"] = ratio(rates[gathered], rates["1 rank"])
    figures["averaged / 1 rank"] = ratio(rates[averaged], rates["1 rank"])
    figures["averaged / gathered"] = ratio(rates[averaged], rates[gathered])
    what = f"mean return, iterations {args.iterations - args.last + 1} to {args.iterations}"
    for name, x in learned.items():
        figures[f"{name}, {what}"] = x[1:]  # the first one warms up
    size = f"{args.steps_per_batch} steps a batch, minibatches of {args.minibatch_size}, 10 epochs"
    show(f"The eight steps on {args.env}, {size}", figures, args.out)


def way(
    args: argparse.Namespace, file: str, nprocs: int, learned: list[float]
) -> Callable[[], float]:
    """Return a function that runs a file and returns its steps per second.

    The function also adds the mean return of the last iterations to a list.
    """
    command = [sys.executable, str(EXAMPLES / file), "--env", args.env]
    command += ["--iterations", str(args.iterations)]
    command += ["--steps-per-batch", str(args.steps_per_batch)]
    command += ["--minibatch-size", str(args.minibatch_size)]
    command += ["--nprocs", str(nprocs)]

    def once() -> float:
        seeded = [*command, "--seed", str(len(learned))]
        done = subprocess.run(seeded, check=True, stdout=subprocess.PIPE, text=True)
        lines = [(float(ret), float(rate)) for ret, rate in LINE.findall(done.stdout)]
        assert len(lines) == args.iterations, done.stdout
        learned.append(statistics.mean(ret for ret, _ in lines[-args.last :]))
        return statistics.harmonic_mean(rate for _, rate in lines[1:])  # all steps / all seconds

    return once


if __name__ == "__main__":
    main()
