"""Measure rollouts beside bare `env.step`: python benchmarks/rollout.py Walker2d HalfCheetah Pendulum CartPole --nprocs 2.

Bare stepping is what Gymnasium itself costs: one environment per process, and actions drawn before from the
distribution of a new policy. Between the two are loops that keep nothing: one over all envs in turn, one that also
computes the products and tanhs of a policy, and one that calls `act`. The last loop is a rollout as training has it:
each rank has processed its fragments just before, and rank 0 has made an update.
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
    parser.add_argument("--envs", type=int, default=16, help="envs of each rank")
    parser.add_argument("--steps", type=int, default=128, help="steps of each env")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":
        sys.exit()
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from table import alternate, ratio, show

    from rank0rl.mpi.threads import set_threads

    set_threads(1)
    gc.freeze()  # as a run does
    for env_id in args.env_ids:
        figures = alternate(ways(args, env_id), args.repeats)
        bare, *rest = figures.items()
        for name, rates in rest:
            figures[f"{name.removesuffix(', steps/s')} / bare"] = ratio(rates, bare[1])
        if rank0rl.rank == 0:
            title = f"{env_id}, ranks: {args.nprocs}, envs a rank: {args.envs}"
            show(title, figures, args.out)


def ways(args: argparse.Namespace, env_id: str) -> dict[str, Callable[[], float]]:
    """Return name -> function that steps and returns steps per second of all ranks."""
    import numpy as np

    from algos.ppo import PPO, PPOOptions
    from rank0rl import batch as batches
    from rank0rl import envs, seeding
    from rank0rl.collector import make_rollout
    from rank0rl.mpi import comm
    from rank0rl.run.options import RunOptions

    num_envs = args.envs * args.nprocs
    options = RunOptions(
        envs.resolve(env_id), num_envs=num_envs, steps_per_batch=num_envs * args.steps
    )
    rollout = make_rollout(options, comm.get_rank(), comm.get_nworkers())
    agent = PPO(rollout.spaces, PPOOptions(), seeding.stream(0, "init"))
    learner = PPO(rollout.spaces, PPOOptions(), seeding.stream(0, "init"))
    if comm.get_rank() == 0:
        learner.prepare()
    env = envs.make(options.env_id)
    env.action_space.seed(0)
    actions = draw(env.action_space, args.envs * args.steps)
    turn = iter(range(1, 1_000_000))

    def bare() -> None:
        env.reset(seed=next(turn))
        for action in actions:
            step(env, action)

    def all_step(choose: Callable) -> None:
        every = [env.gym for env in rollout.envs]
        obs = np.zeros((len(every), *rollout.spaces.obs.shape), rollout.spaces.obs.dtype)
        noise = np.zeros((len(every), agent.noise[1]), np.float32)
        for one in every:
            one.reset(seed=next(turn))
        for t in range(args.steps):
            choose(obs, noise)
            for one, action in zip(every, actions[t * len(every) :], strict=False):
                step(one, action)
        for env in rollout.envs:
            env.over = True  # the rollout begins with new episodes

    def work_of_an_iteration() -> None:
        fragments, _ = rollout.collect(agent, next(turn))
        batch = batches.concatenate([agent.process(fragment) for fragment in fragments])
        if comm.get_rank() == 0:
            learner.update(batch, np.random.default_rng(0), 0.0)  # `agent` stays as it is
        comm.barrier()

    def collect() -> None:
        rollout.collect(agent, next(turn))

    def rate(what: Callable[[], None]) -> float:
        comm.barrier()
        start = time.perf_counter()
        what()
        comm.barrier()
        return num_envs * args.steps / (time.perf_counter() - start)

    forward = products(rollout.spaces.obs.size, rollout.spaces.act.size)
    return {
        "bare env.step, steps/s": lambda: rate(bare),
        "env.step of all envs alone, steps/s": lambda: rate(lambda: all_step(lambda *_: None)),
        "products, tanh and env.step alone, steps/s": lambda: rate(
            lambda: all_step(lambda obs, _: forward(obs))
        ),
        "act and env.step alone, steps/s": lambda: rate(
            lambda: all_step(lambda obs, noise: agent.act(obs, noise, np.arange(len(obs))))
        ),
        "rollout, steps/s": lambda: rate(collect),
        "rollout after an update, steps/s": lambda: (work_of_an_iteration(), rate(collect))[1],
    }


def products(inputs: int, outputs: int) -> Callable:
    """Return a policy of two layers of 64 and nothing else: no noise, no scaling, no promise of equal bits."""
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
    """Draw actions of a new policy, because the cost of a robot's step depends on how it moves."""
    import numpy as np

    if not hasattr(space, "low"):
        return [space.sample() for _ in range(count)]
    drawn = np.random.default_rng(0).standard_normal((count, *space.shape), dtype=np.float32)
    return list(np.clip(drawn, space.low, space.high))


if __name__ == "__main__":
    main()
