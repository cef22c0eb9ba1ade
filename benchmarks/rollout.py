"""Rollouts beside the bare `env.step`, in as many processes: how close to the limit collecting is.

    python benchmarks/rollout.py Walker2d HalfCheetah Pendulum CartPole --nprocs 2

Bare stepping is what Gymnasium itself costs: one environment per process, actions drawn before from
the distribution of a new policy.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
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

    from algos.ppo import PPO, PPOOptions
    from rank0rl import comm, envs, seeding
    from rank0rl.config import RunOptions
    from rank0rl.session import make_rollout
    from rank0rl.threads import set_threads

    set_threads(1)
    gc.freeze()  # as a run does, for both
    for env_id in args.env_ids:
        lanes = args.lanes * args.nprocs
        options = RunOptions(
            envs.resolve(env_id), num_envs=lanes, steps_per_batch=lanes * args.steps
        )
        rollout = make_rollout(options, comm.get_rank(), comm.get_nworkers())
        agent = PPO(rollout.spaces, PPOOptions(), seeding.stream(0, "init"))
        env = envs.make(options.env_id)
        env.action_space.seed(0)
        actions = draw(env.action_space, args.lanes * args.steps)
        turn = iter(range(1, 10_000))

        def rate(what, total=lanes * args.steps) -> float:
            comm.barrier()
            start = time.perf_counter()
            what()
            comm.barrier()
            return total / (time.perf_counter() - start)

        def bare(env=env, actions=actions, turn=turn) -> None:
            env.reset(seed=next(turn))
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        def collect(rollout=rollout, agent=agent, turn=turn) -> None:
            rollout.collect(agent, next(turn))

        ways = {
            "bare env.step, steps/s": lambda rate=rate, bare=bare: rate(bare),
            "rollout, steps/s": lambda rate=rate, collect=collect: rate(collect),
        }
        figures = alternate(ways, args.repeats)
        figures["rollout / bare"] = ratio(*reversed(figures.values()))
        if rank0rl.rank == 0:
            title = f"{options.env_id}, ranks: {args.nprocs}, lanes a rank: {args.lanes}"
            show(title, figures, args.out)


def draw(space, count: int) -> list:
    """As a new policy acts, because how a robot moves decides what its step costs."""
    import numpy as np

    if not hasattr(space, "low"):
        return [space.sample() for _ in range(count)]
    drawn = np.random.default_rng(0).standard_normal((count, *space.shape), dtype=np.float32)
    return list(np.clip(drawn, space.low, space.high))


if __name__ == "__main__":
    main()
