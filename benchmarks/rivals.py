"""Learning curves of other libraries' PPO: python benchmarks/rivals.py Walker2d Hopper --rival sb3.

sb3 is stable-baselines3 with the settings of rl-baselines3-zoo, which are in rivals.toml; it needs the bench extra.
cleanrl is examples/cleanrl_style.py with one environment and 2048 steps a batch, as CleanRL has them. One process
and one torch thread for each run, as many runs at once as --jobs says. A run whose CSV is in
benchmarks/results/rivals is not trained again. Rows are the mean return of the last 100 episodes, as in
progress.csv, after every hundredth of the steps.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from table import RESULTS

FOLDER = RESULTS / "rivals"
SETTINGS = Path(__file__).with_suffix(".toml")


def main() -> None:
    tasks = tomllib.loads(SETTINGS.read_text())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=[*tasks])
    parser.add_argument("--rival", choices=["sb3", "cleanrl"], default="sb3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--out", type=Path, help="train the one run that is named, into this file")
    args = parser.parse_args()
    if args.out:
        (task, *_), (seed, *_) = args.tasks, args.seeds
        if args.rival == "sb3":
            rows = sb3(task, tasks[task], seed, args.total_steps)
        else:
            rows = cleanrl(task, seed, args.total_steps)
        write(rows, args.out)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for seed in args.seeds:
            for task in args.tasks:
                pool.submit(start, args.rival, task, seed, args.total_steps)


def start(rival: str, task: str, seed: int, total_steps: int) -> None:
    """Train in a process of its own, unless the result is there."""
    out = FOLDER / f"{rival}-{task}-seed{seed}.csv"
    if out.exists():
        return
    command = [sys.executable, __file__, task, "--rival", rival, "--seeds", str(seed)]
    command += ["--total-steps", str(total_steps), "--out", str(out)]
    done = subprocess.run(command, check=False)
    rows = out.read_text().splitlines() if out.exists() else ["no result"]
    print(f"{out.stem}: exit code {done.returncode}, {rows[-1]}", flush=True)


Rows = list[tuple[int, float, float]]
"""Steps, mean return of the last 100 episodes, seconds."""


def sb3(task: str, settings: dict[str, Any], seed: int, total_steps: int) -> Rows:
    """Train with stable-baselines3; return the curve."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    rows: Rows = []
    begin = time.perf_counter()

    class Curve(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            returns = [info["r"] for info in self.model.ep_info_buffer]
            due = not rows or self.num_timesteps >= rows[-1][0] + total_steps / 100
            if returns and (due or self.num_timesteps >= total_steps):
                seconds = round(time.perf_counter() - begin, 2)
                rows.append((self.num_timesteps, float(np.mean(returns)), seconds))

    options = {name: value for name, value in settings.items() if name != "wide"}
    if settings.get("wide"):
        layers = {"pi": [256, 256], "vf": [256, 256]}
        options["policy_kwargs"] = {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": layers,
        }
    envs = make_vec_env(f"{task}-v5", 1, seed=seed)
    envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    PPO("MlpPolicy", envs, seed=seed, device="cpu", **options).learn(total_steps, callback=Curve())
    return rows


def cleanrl(task: str, seed: int, total_steps: int) -> Rows:
    """Train with the CleanRL-style file; return the curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = Path(__file__).parents[1] / "examples" / "cleanrl_style.py"
    options = ["--env-id", f"{task}-v5", "--seed", seed, "--total-timesteps", total_steps]
    options += ["--num-envs", 1, "--num-steps", 2048]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        command = [sys.executable, str(file), *map(str, options)]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        (run,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        episodes = events.Scalars("charts/episodic_return")
    rows: Rows = []
    for i, each in enumerate(episodes):
        if not rows or each.step >= rows[-1][0] + total_steps / 100 or i == len(episodes) - 1:
            last = [e.value for e in episodes[max(0, i - 99) : i + 1]]
            rows.append((each.step, float(np.mean(last)), round(each.wall_time - begin, 2)))
    return rows


def write(rows: Rows, out: Path) -> None:
    """Write a curve."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["steps", "return_mean", "seconds"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
