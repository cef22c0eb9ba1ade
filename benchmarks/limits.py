"""Measure the limits of this machine: python benchmarks/limits.py Walker2d --processes 1 2.

They are bare `env.step`, a copy of memory, and the matrix products of a gradient.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from table import alternate, ratio, show

FOLDERS = [str(folder) for folder in Path(__file__).resolve().parents[:2]]
STEP = """
import gymnasium as gym, sys, time
sys.path[:0] = {folders}
from rank0rl.envs import make as envs
from rollout import draw
env = envs.make(envs.resolve("{env}"))
actions = draw(env.action_space, {count})
env.reset(seed=0)
start = time.perf_counter()
for action in actions:
    _, _, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
        env.reset()
print({count} / (time.perf_counter() - start))
"""
COPY = """
import numpy as np, time
a = np.ones({count} * 125_000)
np.empty_like(a)[...] = a
start = time.perf_counter()
for _ in range(5):
    np.empty_like(a)[...] = a
print(5 * a.nbytes / 1e9 / (time.perf_counter() - start))
"""
# Products of two networks with two layers of 64: forward, backward to weights and backward to inputs.
PRODUCTS = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np, time
sizes = [(17, 64), (64, 64), (64, 6), (17, 64), (64, 64), (64, 1)]
layers = [(np.ones(({count}, i), "f"), np.ones((i, o), "f"), np.ones(({count}, o), "f")) for i, o in sizes]
start = time.perf_counter()
for _ in range(1000):
    for x, w, y in layers:
        x @ w, x.T @ y, y @ w.T
print(1000 * (time.perf_counter() - start))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env_ids", nargs="*", default=["Walker2d"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    ways = {
        f"{env}, processes: {n}, env.step/s": lambda n=n, env=env: total(
            n, STEP.format(env=env, count=args.steps, folders=FOLDERS)
        )
        for env in args.env_ids
        for n in args.processes
    }
    ways["copy of 100 MB, GB/s"] = lambda: total(1, COPY.format(count=100))
    for rows in (64, 256):
        ways[f"products of a gradient of {rows} rows, us"] = lambda rows=rows: total(
            1, PRODUCTS.format(count=rows)
        )
    figures = alternate(ways, args.repeats)
    most, least = args.processes[-1], args.processes[0]
    for env in args.env_ids:
        many, few = (figures[f"{env}, processes: {n}, env.step/s"] for n in (most, least))
        figures[f"{env}, {most} processes / {least}"] = ratio(many, few)
    show("limits", figures, args.out)


def total(processes: int, code: str) -> float:
    """Run this code in several processes at the same time; return the sum of what they print."""
    these = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    return sum(float(process.communicate()[0]) for process in these)


if __name__ == "__main__":
    main()
