"""What the eight steps bring: examples/ppo_serial.py beside examples/ppo_ranks.py, in alternation.

    python benchmarks/eight_steps.py                           # needs the mujoco extra
    python benchmarks/eight_steps.py --env CartPole-v1 --iterations 20 --last 5

Every figure is a process of its own, and its first iteration does not count. The repeats have seeds
of their own, the same for both files.
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
    parser.add_argument("--out", default="eight_steps.csv", help='CSV in results/; "" for none')
    args = parser.parse_args()
    names = {"serial": "ppo_serial.py", f"ranks: {args.nprocs}": "ppo_ranks.py"}
    learned: dict[str, list[float]] = {name: [] for name in names}
    ways = {name: way(args, file, learned[name]) for name, file in names.items()}
    rates = alternate(ways, args.repeats)
    serial, ranks = names
    figures = {f"{name}, steps/s": x for name, x in rates.items()}
    figures["speedup"] = ratio(rates[ranks], rates[serial])
    what = f"mean return, iterations {args.iterations - args.last + 1} to {args.iterations}"
    for name, x in learned.items():
        figures[f"{name}, {what}"] = x[1:]  # the first one was to warm up
    size = f"{args.steps_per_batch} steps a batch, minibatches of {args.minibatch_size}, 10 epochs"
    show(f"The eight steps on {args.env}, {size}", figures, args.out)


def way(args: argparse.Namespace, file: str, learned: list[float]) -> Callable[[], float]:
    """Runs a file: steps per second; it adds the mean return of the last iterations to a list."""
    command = [sys.executable, str(EXAMPLES / file), "--env", args.env]
    command += ["--iterations", str(args.iterations)]
    command += ["--steps-per-batch", str(args.steps_per_batch)]
    command += ["--minibatch-size", str(args.minibatch_size)]
    if file == "ppo_ranks.py":
        command += ["--nprocs", str(args.nprocs)]

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
