"""Measure what --env-processes costs: python benchmarks/env_process.py CartPole Walker2d.

A step in this process and in a process of its own, and the start of 16 processes: with their fork
server, and from one that runs already.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rollout import draw, step
from table import alternate, ratio, show

from rank0rl.envs import process
from rank0rl.envs.make import make, own_module, resolve
from rank0rl.envs.process import EnvProcess

STARTED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env_ids", nargs="*", default=["CartPole", "Walker2d"])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    for env_id in args.env_ids:
        full_id = resolve(env_id)
        here = partial(make, full_id)
        apart = partial(EnvProcess, here, preload=own_module(full_id))
        limited = partial(EnvProcess, here, 60.0, preload=own_module(full_id))
        with_server = f"start of {STARTED} processes and their fork server, s"
        figures = {
            **steps(
                {
                    "a step in the rank's process, us": here,
                    "a step in a process of its own, us": apart,
                    "with --step-timeout too, us": limited,
                },
                args.steps,
                args.repeats,
            ),
            **alternate(
                {
                    with_server: partial(start_s, apart, True),
                    f"start of {STARTED} processes, s": partial(start_s, apart, False),
                },
                args.repeats,
            ),
        }
        first, second, *_ = figures.values()
        figures["in a process of its own / in the rank's"] = ratio(second, first)
        show(f"{env_id} with --env-processes", figures, args.out)


def steps(makes: dict, count: int, repeats: int) -> dict[str, list[float]]:
    made = {name: make() for name, make in makes.items()}
    ways = {name: partial(step_us, env, count) for name, env in made.items()}
    figures = alternate(ways, repeats)
    for env in made.values():
        env.close()
    return figures


def step_us(env, steps: int) -> float:
    env.action_space.seed(0)
    actions = draw(env.action_space, steps)
    env.reset(seed=0)
    start = time.perf_counter()
    for action in actions:
        step(env, action)
    return 1e6 * (time.perf_counter() - start) / steps


def start_s(make, server_too: bool) -> float:
    if server_too:
        process._server()._process.kill()
        process._server()._process.wait()
    start = time.perf_counter()
    made = [make() for _ in range(STARTED)]
    seconds = time.perf_counter() - start
    for env in made:
        env.close()
    return seconds


if __name__ == "__main__":
    main()
