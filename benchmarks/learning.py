"""Measure learning curves: python benchmarks/learning.py Walker2d HalfCheetah Hopper --seeds 0 1 2 --nprocs 2.

train.py runs once for each environment and seed. Each run gives a CSV; all runs give a table. The curves are
the same for every --nprocs; `--nprocs 1 --jobs 2` keeps two cores just as busy.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rank0rl

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "learning"
KEPT = ("iteration", "steps", "episodes", "return_mean", "length_mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env_ids", nargs="*", help="none: only the table of the existing results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--evaluate", type=int, default=0, help="episodes to evaluate the final policy with"
    )
    parser.add_argument(
        "--options", default="", help='more options of train.py, such as "--overlap"'
    )
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [(env_id, seed) for env_id in args.env_ids for seed in args.seeds]
        list(pool.map(lambda run: train(args, *run), runs))
    table()


def train(args: argparse.Namespace, env_id: str, seed: int) -> None:
    """Train one run; write what does not depend on the machine's speed to the results."""
    label = args.algo + args.options.replace(" ", "")
    name = f"{label}-{env_id}-seed{seed}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", env_id, "--algo", args.algo, "--seed", str(seed)]
        command += ["--total-steps", str(args.total_steps), "--nprocs", str(args.nprocs)]
        command += shlex.split(args.options)
        subprocess.run(
            [*command, "--run-dir", folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        with Path(folder, "progress.csv").open(newline="") as file:
            rows = [{key: row[key] for key in KEPT} for row in csv.DictReader(file)]
        with (RESULTS / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, KEPT)
            writer.writeheader()
            writer.writerows(rows)
        summary = {**json.loads(Path(folder, "summary.json").read_text()), "algo": label}
        if args.evaluate:
            ended = rank0rl.evaluate(folder, args.evaluate, deterministic=True)
            summary["evaluation"] = float(ended["return"].mean())
        (RESULTS / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(name, summary["return_mean"], flush=True)


def results() -> dict[tuple[str, str], list[dict]]:
    """Return (environment, agent) -> summaries of all seeds, each with its "curve"."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        summary = json.loads(path.read_text())
        with path.with_suffix(".csv").open(newline="") as file:
            summary["curve"] = list(csv.DictReader(file))
        groups.setdefault((summary["env_id"], summary["algo"]), []).append(summary)
    return groups


def table() -> None:
    print("| environment | agent | steps | mean return of the last 100 episodes, by seed | mean |")
    print("|---|---|---|---|---|")
    for (env_id, algo), runs in results().items():
        steps = max(run["steps"] for run in runs)
        figures = {steps: [run["return_mean"] for run in runs]}
        if steps > 1.5e6:
            figures = {1_000_000: [after(run["curve"], 1_000_000) for run in runs], **figures}
        if "evaluation" in runs[0]:
            figures[f"{steps:,}, evaluated"] = [run["evaluation"] for run in runs]
        for when, means in figures.items():
            each = ", ".join(f"{mean:.0f}" for mean in means)
            label = f"{when:,}" if isinstance(when, int) else when
            print(f"| {env_id} | {algo} | {label} | {each} | {statistics.mean(means):.0f} |")


def after(curve: list[dict[str, str]], steps: int) -> float:
    return next(float(row["return_mean"]) for row in curve if int(row["steps"]) >= steps)


if __name__ == "__main__":
    main()
