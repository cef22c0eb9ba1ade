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


class Loops:
    """The loops of one rank over its envs, each with as many steps as a rollout.

    Collective: every rank makes one and calls the same loops.
    """

    def __init__(self, args: argparse.Namespace, env_id: str) -> None:
        import numpy as np

        from rank0rl import seeding
        from rank0rl.agent import Step
        from rank0rl.algos.ppo import PPO, PPOOptions
        from rank0rl.envs.make import make, resolve
        from rank0rl.mpi import comm
        from rank0rl.run.options import RunOptions
        from rank0rl.run.shares import make_rollout

        self.steps, self.num_envs = args.steps, args.envs * args.nprocs
        options = RunOptions(
            resolve(env_id),
            num_envs=self.num_envs,
            steps_per_batch=self.num_envs * args.steps,
        )
        self.comm, self.turn = comm, iter(range(1, 1_000_000))
        self.rollout = make_rollout(options, comm.get_rank(), comm.get_nworkers())
        spaces = self.rollout.spaces
        self.agent, self.learner = (
            PPO(spaces, PPOOptions(), seeding.stream(0, "init")) for _ in range(2)
        )
        if comm.get_rank() == 0:
            self.learner.prepare()
        self.env = make(options.env_id)
        self.env.action_space.seed(0)
        self.actions = draw(self.env.action_space, args.envs * args.steps)
        self.ids, self.as_step = np.arange(args.envs), Step
        self.forward = products(spaces.obs.size, spaces.act.size)

    def bare(self) -> None:
        self.env.reset(seed=next(self.turn))
        for action in self.actions:
            step(self.env, action)

    def all_step(self, choose: Callable) -> None:
        import numpy as np

        envs, obs_space = self.rollout.envs, self.rollout.spaces.obs
        every = [env.gym for env in envs]
        obs = np.zeros((len(every), *obs_space.shape), obs_space.dtype)
        noise = np.zeros((len(every), self.agent.noise[1]), np.float32)
        for one in every:
            one.reset(seed=next(self.turn))
        for t in range(self.steps):
            choose(obs, noise)
            for one, action in zip(every, self.actions[t * len(every) :], strict=False):
                step(one, action)
        for env in envs:
            env.over = True  # the rollout begins with new episodes

    def collect(self) -> None:
        self.rollout.collect(self.agent, next(self.turn))

    def update(self) -> None:
        """Do what an iteration does besides: process on every rank, and update on rank 0."""
        import numpy as np

        from rank0rl.batch import concatenate

        fragments, _ = self.rollout.collect(self.agent, next(self.turn))
        batch = concatenate([self.agent.process(fragment) for fragment in fragments])
        if self.comm.get_rank() == 0:
            self.learner.update(batch, np.random.default_rng(0), 0.0)  # `agent` stays as it is
        self.comm.barrier()

    def rate(self, what: Callable[..., None], *args: Callable) -> float:
        """Return steps per second of all ranks."""
        self.comm.barrier()
        start = time.perf_counter()
        what(*args)
        self.comm.barrier()
        return self.num_envs * self.steps / (time.perf_counter() - start)


def ways(args: argparse.Namespace, env_id: str) -> dict[str, Callable[[], float]]:
    """Return name -> function that steps and returns steps per second of all ranks."""
    of = Loops(args, env_id)

    def after_an_update() -> float:
        of.update()
        return of.rate(of.collect)

    return {
        "bare env.step, steps/s": lambda: of.rate(of.bare),
        "env.step of all envs alone, steps/s": lambda: of.rate(of.all_step, lambda *_: None),
        "products, tanh and env.step alone, steps/s": lambda: of.rate(
            of.all_step, lambda obs, _: of.forward(obs)
        ),
        "act and env.step alone, steps/s": lambda: of.rate(
            of.all_step, lambda obs, noise: of.agent.act(of.as_step(obs, noise, of.ids))
        ),
        "rollout, steps/s": lambda: of.rate(of.collect),
        "rollout after an update, steps/s": after_an_update,
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
