"""Rollouts beside the bare `env.step`, in as many processes: how close to the limit collecting is.

    python benchmarks/rollout.py Walker2d HalfCheetah Pendulum CartPole --nprocs 2

Bare stepping is what Gymnasium itself costs: one environment per process, actions drawn before from
the distribution of a new policy. Between the two, loops that keep nothing: over the environments of all lanes
in turn; the same with the products and tanhs of a policy and nothing else; the same with `act`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import rank0rl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env_ids", nargs="*", default=["Walker2d"])
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=16, help="environments of each rank")
    parser.add_argument("--steps", type=int, default=128, help="of each environment")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", help="CSV in benchmarks/results, to add the rows to")
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":
        sys.exit()
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from table import alternate, ratio, show

    from rank0rl.mpi.threads import set_threads

    set_threads(1)
    gc.freeze()  # as a run does, for all
    for env_id in args.env_ids:
        figures = alternate(ways(args, env_id), args.repeats)
        bare, *rest = figures.items()
        for name, rates in rest:
            figures[f"{name.removesuffix(', steps/s')} / bare"] = ratio(rates, bare[1])
        if rank0rl.rank == 0:
            title = f"{env_id}, ranks: {args.nprocs}, lanes a rank: {args.lanes}"
            show(title, figures, args.out)


def ways(args: argparse.Namespace, env_id: str) -> dict[str, Callable[[], float]]:
    import numpy as np
    from rank0rl.session import make_rollout

    from algos.ppo import PPO, PPOOptions
    from rank0rl import envs, seeding
    from rank0rl.mpi import comm
    from rank0rl.run.options import RunOptions

    lanes = args.lanes * args.nprocs
    options = RunOptions(envs.resolve(env_id), num_envs=lanes, steps_per_batch=lanes * args.steps)
    rollout = make_rollout(options, comm.get_rank(), comm.get_nworkers())
    agent = PPO(rollout.spaces, PPOOptions(), seeding.stream(0, "init"))
    env = envs.make(options.env_id)
    env.action_space.seed(0)
    actions = draw(env.action_space, args.lanes * args.steps)
    turn = iter(range(1, 1_000_000))

    def bare() -> None:
        env.reset(seed=next(turn))
        for action in actions:
            step(env, action)

    def all_step(choose: Callable) -> None:
        every = [lane.env for lane in rollout.lanes]
        obs = np.zeros((len(every), *rollout.spaces.obs.shape), rollout.spaces.obs.dtype)
        noise = np.zeros((len(every), agent.noise[1]), np.float32)
        for one in every:
            one.reset(seed=next(turn))
        for t in range(args.steps):
            choose(obs, noise)
            for one, action in zip(every, actions[t * len(every) :], strict=False):
                step(one, action)
        for lane in rollout.lanes:
            lane.over = True  # the rollout begins with new episodes

    def rate(what: Callable[[], None]) -> float:
        comm.barrier()
        start = time.perf_counter()
        what()
        comm.barrier()
        return lanes * args.steps / (time.perf_counter() - start)

    forward = products(rollout.spaces.obs.size, rollout.spaces.act.size)
    return {
        "bare env.step, steps/s": lambda: rate(bare),
        "env.step of all lanes alone, steps/s": lambda: rate(lambda: all_step(lambda *_: None)),
        "products, tanh and env.step alone, steps/s": lambda: rate(
            lambda: all_step(lambda obs, _: forward(obs))
        ),
        "act and env.step alone, steps/s": lambda: rate(
            lambda: all_step(lambda obs, noise: agent.act(obs, noise, np.arange(len(obs))))
        ),
        "rollout, steps/s": lambda: rate(lambda: rollout.collect(agent, next(turn)) and None),
    }


def products(inputs: int, outputs: int) -> Callable:
    """A policy of two layers of 64 with nothing around: no noise, no scaling, no promise of bits."""
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = [inputs, 64, 64, outputs]
    weights = [rng.standard_normal(s, dtype=np.float32) for s in pairwise(sizes)]
    biases = [np.zeros(n, np.float32) for n in sizes[1:]]

    def forward(obs) -> None:
        x = obs.astype(np.float32)
        for w, b in zip(weights[:-1], biases, strict=False):
            x = np.tanh(x @ w + b)
        x @ weights[-1] + biases[-1]

    return forward


def step(env, action) -> None:
    _, _, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
        env.reset()


def draw(space, count: int) -> list:
    """As a new policy acts, because how a robot moves decides what its step costs."""
    import numpy as np

    if not hasattr(space, "low"):
        return [space.sample() for _ in range(count)]
    drawn = np.random.default_rng(0).standard_normal((count, *space.shape), dtype=np.float32)
    return list(np.clip(drawn, space.low, space.high))


if __name__ == "__main__":
    main()
