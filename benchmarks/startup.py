"""Measure the time from the command to the first `env.step`, and all memory: python benchmarks/startup.py --nprocs 2.

Beside it, one process imports torch and Gymnasium, makes the environment and steps it. Memory is the PSS
of all processes, which counts what they share once. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST = "STARTUP_FIRST_STEP"  # environment variable: the file that the first step makes
BARE = """
import torch, gymnasium as gym, benchmarks.startup
env = gym.make("FirstStep-v0")
env.reset(seed=0)
env.step(env.action_space.sample())
"""


def register() -> None:
    """Register a Walker2d that makes a file at its first step."""
    import gymnasium as gym
    from gymnasium.envs.mujoco.walker2d_v5 import Walker2dEnv

    class FirstStep(Walker2dEnv):
        def step(self, action):
            Path(os.environ[FIRST]).touch()
            self.step = super().step
            return self.step(action)

    gym.register("FirstStep-v0", FirstStep)


if FIRST in os.environ:
    register()


def main() -> None:
    from table import alternate, ratio, show

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    memory: dict[str, list[float]] = {}

    def first_step(command: list[str], name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            first = Path(folder, "first")
            paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            env = {**os.environ, FIRST: str(first), "PYTHONPATH": paths}
            start = time.perf_counter()
            process = subprocess.Popen(
                [
                    sys.executable,
                    *command,
                    *(["--run-dir", folder] if "train.py" in command else []),
                ],
                env=env,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            while not first.exists():
                assert process.poll() is None, "the process ended before its first step"
                time.sleep(0.005)
            took = time.perf_counter() - start
            if "train.py" in command:
                time.sleep(3)
                memory.setdefault(name, []).append(pss(first))
            process.terminate()
            process.wait()
            return took

    def train(n: int) -> float:
        options = ["--config", "benchmarks/ppo-64x64.toml", "--nprocs", str(n)]
        return first_step(["train.py", "benchmarks.startup:FirstStep-v0", *options], f"ranks: {n}")

    ways = {
        "one process, torch and environment, s": lambda: first_step(["-c", BARE], "bare"),
        f"train.py, ranks: {args.nprocs}, s": lambda: train(args.nprocs),
        f"train.py, ranks: {args.nprocs + 1}, s": lambda: train(args.nprocs + 1),
    }
    figures = alternate(ways, args.repeats)
    bare, ours, _ = figures.values()
    figures["train.py / one process"] = ratio(ours, bare)
    few, more = memory.values()
    figures["PSS, MB, " + next(iter(memory))] = few
    figures["PSS of one more rank, MB"] = [b - a for a, b in zip(few, more, strict=True)]
    show("start", figures, args.out)


def pss(first: Path) -> float:
    """Return the memory of all processes that know this file, in MB."""
    token = f"{FIRST}={first}".encode()
    total = 0
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if token in environ.read_bytes().split(b"\0"):
                text = (environ.parent / "smaps_rollup").read_text()
                total += int(text.partition("\nPss:")[2].split()[0])
        except OSError:
            continue
    return total / 1000


if __name__ == "__main__":
    main()
