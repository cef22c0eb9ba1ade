"""Measure whole iterations of PPO on Walker2d beside other projects and bare `env.step`: python benchmarks/train.py.

It needs the bench extra. A larger batch:

    python benchmarks/train.py --steps-per-batch 20000 --minibatch-size 256 --iterations 4

Every figure is a process of its own, and all ways take turns. The first iteration is not timed.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from table import alternate, ratio, show

ROOT = Path(__file__).parent.parent
PHASES = ("collect", "process", "wait", "gather", "update", "broadcast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nprocs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps-per-batch", type=int, default=2048)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument(
        "--sb3", type=int, nargs="*", default=[1, 8], help="environments of stable-baselines3"
    )
    parser.add_argument(
        "--single-file", type=int, nargs="*", default=[8], help="environments of the one-file loop"
    )
    parser.add_argument("--beside", help='other options of train.py, such as "--overlap"')
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    most = max(args.nprocs)
    phases: dict[str, list[float]] = {}
    ways = {f"bare env.step, processes: {most}": lambda: bare(most)}
    for n in args.nprocs:
        ways[f"rank0rl, ranks: {n}"] = lambda n=n: rank0rl(args, n, phases)
    if args.beside:
        ways[f"rank0rl, ranks: {most}, {args.beside}"] = lambda: rank0rl(
            args, most, {}, shlex.split(args.beside)
        )
    for name, counts in (("stable-baselines3", args.sb3), ("single-file", args.single_file)):
        for n in counts:
            ways[f"{name}, environments: {n}"] = lambda name=name, n=n: other(args, name, n)
    figures = alternate(ways, args.repeats)
    limit, *rest = figures.values()
    ours, theirs = rest[: len(args.nprocs)], rest[len(args.nprocs) :]
    if args.beside:
        figures[f"{args.beside} / without"] = ratio(theirs.pop(0), ours[-1])
    figures["rank0rl / bare"] = ratio(ours[-1], limit)
    if theirs:
        best = max(theirs, key=statistics.median)
        figures["rank0rl / the best other"] = ratio(ours[-1], best)
    if len(ours) > 1:
        figures["speedup"] = ratio(ours[-1], ours[0])
        figures["ceiling that the phases imply"] = phases.pop("ceiling")
    size = f"{args.steps_per_batch} steps a batch, minibatches of {args.minibatch_size}, 10 epochs"
    show(f"Walker2d, {size}, steps/s and ms", {**figures, **phases}, args.out)


def other(args: argparse.Namespace, name: str, environments: int) -> float:
    """Return the steps per second of another project."""
    sizes = environments, args.steps_per_batch, args.minibatch_size, max(3, args.iterations // 4)
    command = [sys.executable, str(ROOT / "benchmarks" / "others.py"), name, *map(str, sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def bare(processes: int, steps: int = 10_000) -> float:
    """Return the steps per second of so many processes that only call `env.step`, summed."""
    code = f"""
import gymnasium as gym, numpy as np, time
env = gym.make("Walker2d-v5", disable_env_checker=True)
draws = np.random.default_rng(0).standard_normal(({steps}, 6), dtype=np.float32)
env.reset(seed=0)
start = time.perf_counter()
for action in list(draws.clip(-1, 1)):
    _, _, over, cut, _ = env.step(action)
    if over or cut:
        env.reset()
print({steps} / (time.perf_counter() - start))
"""
    these = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    return sum(float(process.communicate()[0]) for process in these)


def rank0rl(
    args: argparse.Namespace,
    nprocs: int,
    phases: dict[str, list[float]],
    options: Sequence[str] = (),
) -> float:
    """Run train.py; return its steps per second, and add its phases to a dict of figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "Walker2d", "--config", "configs/ppo.toml"]
        command += ["--steps-per-batch", str(args.steps_per_batch), "--num-envs", "32"]
        command += ["--minibatch-size", str(args.minibatch_size), "--nprocs", str(nprocs)]
        command += [
            "--stop-after-iterations",
            str(args.iterations),
            "--run-dir",
            folder,
            *options,
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        with Path(folder, "progress.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    first, last = rows[0], rows[-1]
    took = float(last["seconds"]) - float(first["seconds"])
    means = {p: statistics.mean(float(row[f"{p}_s"]) for row in rows[1:]) for p in PHASES}
    each = took / (len(rows) - 1)
    if nprocs == min(args.nprocs):  # ranks share collecting and processing
        shared = (means["collect"] + means["process"]) / each
        phases.setdefault("ceiling", []).append(
            1 / (1 - shared + shared * nprocs / max(args.nprocs))
        )
    if nprocs == max(args.nprocs):
        for phase, mean in means.items():
            phases.setdefault(f"{phase}, ms", []).append(1000 * mean)
        other = each - sum(means.values())
        phases.setdefault("all else, ms", []).append(1000 * other)
    return args.steps_per_batch / each


if __name__ == "__main__":
    main()
