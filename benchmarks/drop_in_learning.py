"""Final returns and speed of examples/cleanrl_style.py, and of the same file after the eight steps.

    python benchmarks/drop_in_learning.py                      # CartPole-v1
    python benchmarks/drop_in_learning.py --env Walker2d-v5 --total-timesteps 1000000

Every repeat has a seed of its own, the same for all ways. The ways take turns. A final return is the
mean of all episodes that ended within the last part of the steps, as TensorBoard's file has them.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scipy import stats
from table import RESULTS, machine
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parent.parent / "examples"
LINE = re.compile(r"step (\d+)  steps/s (\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, default=100_000)
    parser.add_argument("--nprocs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--last", type=float, default=0.1, help="part of the steps, for returns")
    parser.add_argument("--out", default="drop_in_learning.csv", help='"" for none')
    args = parser.parse_args()
    ways = {"serial": "cleanrl_style.py"}
    for n in args.nprocs:
        ways[f"{n} rank{'s' * (n > 1)}"] = f"cleanrl_style_ranks.py --nprocs {n}"
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for seed in range(args.first_seed, args.first_seed + args.repeats):
        for name, command in ways.items():
            runs[name].append(train(command, seed, args))
            final, rate = runs[name][-1]
            print(f"{name}, seed {seed}: return {final:.1f}, {rate:.0f} steps/s", flush=True)
            record(args, name, seed, final, rate)
    table(args, runs)


def train(command: str, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """Train once; return the final return, and the steps per second of the whole run."""
    options = ["--env-id", args.env, "--total-timesteps", args.total_timesteps, "--seed", seed]
    with tempfile.TemporaryDirectory() as folder:
        file, *more = command.split()
        line = [sys.executable, str(EXAMPLES / file), *more, *map(str, options)]
        done = subprocess.run(line, check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
        [run] = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        episodes = events.Scalars("charts/episodic_return")
    steps, rate = LINE.findall(done.stdout)[-1]
    late = [each.value for each in episodes if each.step > (1 - args.last) * int(steps)]
    return statistics.mean(late) if late else float("nan"), float(rate)


def record(args: argparse.Namespace, name: str, seed: int, final: float, rate: float) -> None:
    """Add a run to the CSV in benchmarks/results."""
    if not args.out:
        return
    path = RESULTS / args.out
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(
                ["env", "steps", "way", "seed", "final_return", "steps_per_s", "machine", "command"]
            )
        command = shlex.join(["python", *sys.argv])
        steps = args.total_timesteps
        writer.writerow([args.env, steps, name, seed, final, rate, machine(), command])


def table(args: argparse.Namespace, runs: dict[str, list[tuple[float, float]]]) -> None:
    """Print means over seeds with 95 % intervals (Student's t), and medians of the speed."""
    print(
        f"\n{args.env}, {args.total_timesteps:,} steps, mean return of the last {args.last:.0%}\n"
    )
    print("| | mean | 95 % interval | by seed | steps/s, median |\n|---|---|---|---|---|")
    for name, each in runs.items():
        returns, rates = zip(*each, strict=True)
        mean, low, high = interval(returns)
        by_seed = ", ".join(f"{x:.0f}" for x in returns)
        rate = statistics.median(rates)
        print(f"| {name} | {mean:.0f} | {low:.0f} to {high:.0f} | {by_seed} | {rate:,.0f} |")


def interval(x: tuple[float, ...]) -> tuple[float, float, float]:
    """Return the mean, and the ends of its 95 % interval; nan for the ends of a single figure."""
    mean = statistics.mean(x)
    if len(x) == 1:
        return mean, float("nan"), float("nan")
    half = float(stats.t.ppf(0.975, len(x) - 1)) * statistics.stdev(x) / len(x) ** 0.5
    return mean, mean - half, mean + half


if __name__ == "__main__":
    main()
