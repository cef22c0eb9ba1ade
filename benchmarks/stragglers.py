"""Ranks and episodes that take ten times as long: python benchmarks/stragglers.py --nprocs 4.

Batches of episodes of an environment that sleeps in its steps, 10 ms each, 10 of them. By turns all episodes are alike,
those of rank 1 take ten times as long, and one in twenty does. The idle share of a rank is the time in which it waits
for the slowest one, of all the time of the rollouts. The weights must have one hash.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import rank0rl

HERE = Path(__file__).parent
CASES = {
    "none": "all alike",
    "rank": "rank 1 is ten times slower",
    "episodes": "5 % of the episodes are ten times slower",
}
SIZES = "--num-envs 16 --episodes-per-batch 64 -n 256 --minibatch-size 64 --epochs 2 --quiet"


class Slow(gym.Env):
    """Environment that sleeps. `slow` says where it sleeps ten times as long, as in `CASES`."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, slow: str, step_s: float = 0.01) -> None:
        """Begin before the first episode."""
        self.slow, self.step_s = slow, step_s

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        self.first, self.t = seed or 0, 0
        is_slow = {"none": False, "rank": rank0rl.rank == 1, "episodes": self.first % 20 == 0}
        self.now_s = self.step_s * (10 if is_slow[self.slow] else 1)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep; the reward is the action."""
        time.sleep(self.now_s)
        self.t += 1
        return self._obs(), float(action[0]), self.t == 10, False, {}

    def _obs(self) -> np.ndarray:
        return np.array([self.first % 1000, self.t], np.float32)


def main() -> None:
    """Train in each case, and print the idle shares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nprocs", type=int, default=4)
    nprocs = parser.parse_args().nprocs
    found = set()
    print("| case | idle, mean | idle, most | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case, words in CASES.items():
            run = Path(folder, case)
            command = [sys.executable, str(HERE.parent / "train.py"), "stragglers:Slow"]
            command += ["--env-kwargs", f'slow="{case}"', *SIZES.split(), "--nprocs", str(nprocs)]
            env = {**os.environ, "PYTHONPATH": str(HERE)}
            subprocess.run([*command, "--run-dir", str(run)], check=True, env=env)
            summary = json.loads((run / "summary.json").read_text())
            idle, seconds = summary["idle_of_ranks"], summary["seconds"]
            print(
                f"| {words} | {np.mean(idle):.0%} | {max(idle):.0%} | {seconds:.1f} |", flush=True
            )
            found.add(summary["weights_sha256"])
    if len(found) > 1:
        sys.exit("the weights differ: the curve depends on how long steps take")


if __name__ == "__main__":
    main()
