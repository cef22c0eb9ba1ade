"""Processes that only call `env.step`, for `speedup`: the speed of the machine without rank0rl."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rank0rl.envs import make as envs

_DRAWN = 1000  # actions that each process takes over and over again


def rate(settings: Mapping[str, Any], processes: int, seconds: float, path: Path) -> float:
    """Measure the steps per second of processes that each step an environment at the same time.

    Args:
        settings: settings of a run. Only "env_id", "wrappers" and "env_kwargs" count.
        processes: number of processes.
        seconds: time for which they step.
        path: folder in which the environment's module may be found.

    Returns:
        The sum over all processes; nan if one cannot make the environment, or step it with allowed
        actions.
    """
    what = {name: settings[name] for name in ("env_id", "wrappers", "env_kwargs")}
    command = [
        sys.executable,
        "-m",
        "rank0rl.tools.speedup._bare",
        json.dumps({**what, "seconds": seconds}),
    ]
    paths = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        while process.stdout.readline() not in ("ready\n", ""):  # the environment may print, too
            pass
    for process in running:  # all start at once
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # this process has failed
            process.stdin.write("go\n")
            process.stdin.flush()
    printed = [process.communicate()[0].split() for process in running]
    return sum(
        float(words[-1]) if words and process.returncode == 0 else float("nan")
        for words, process in zip(printed, running, strict=True)
    )


def main() -> None:
    """Run one process: make the environment, print "ready", wait for a line, step, print the rate."""
    what = json.loads(sys.argv[1])
    env = envs.make(what["env_id"], what["wrappers"], **what["env_kwargs"])
    space = env.action_space
    space.seed(0)
    actions = [space.sample() for _ in range(_DRAWN)]
    if isinstance(space, gym.spaces.Box):
        # As a new policy acts, because the cost of a robot's step depends on how it moves.
        drawn = np.random.default_rng(0).standard_normal((_DRAWN, *space.shape), dtype=np.float32)
        actions = list(np.clip(drawn, space.low, space.high))
    _, info = env.reset(seed=0)
    print("ready", flush=True)
    sys.stdin.readline()
    steps, took, begin = 0, 0.0, time.perf_counter()
    for action in itertools.cycle(actions):
        if "action_mask" in info:
            action = space.sample(info["action_mask"])  # noqa: PLW2901 - only some actions are allowed
        _, _, terminated, truncated, info = env.step(action)
        steps += 1
        if terminated or truncated:
            _, info = env.reset()
        took = time.perf_counter() - begin
        if took > what["seconds"]:
            break
    print(steps / took)


if __name__ == "__main__":
    main()
