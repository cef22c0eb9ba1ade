"""Measure what the same curve for every nprocs costs: python benchmarks/invariance.py Walker2d CartPole.

It compares the rollout rate with the promise and without it. Without it, one matrix product serves all envs,
and its rounding depends on their number; all envs share one random stream; environments are reset without a
seed. Both ways take turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from rank0rl import rollout, seeding
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.envs.block import Env, EnvBlock, make_block
from rank0rl.envs.make import make, resolve
from rank0rl.mpi.threads import set_threads
from rank0rl.nets.policies import CategoricalPolicy
from rank0rl.rollout import FixedSteps


class FreePPO(PPO):
    """PPO that acts with one product for all envs."""

    def act(self, step):
        x = self.norm.numpy(step.obs)
        if isinstance(self.policy, CategoricalPolicy):
            logits = self.policy.mlp.numpy(x)
            logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
            cumulative = np.add.accumulate(np.exp(logits), axis=1)
            return np.add.reduce(step.noise * cumulative[:, -1:] >= cumulative[:, :-1], axis=1), {}
        std = np.exp(self.policy.log_std.detach().numpy())
        return self.policy.mlp.numpy(x) + std * step.noise, {}


class FreeBlock(EnvBlock):
    """Envs that begin episodes wherever their environment's own random stream is."""

    def begin_next(self, env: Env) -> None:
        env.episode += 1
        env.over, self.ret[env.row], self.length[env.row] = False, 0.0, 0
        self.obs[env.row], _ = env.gym.reset()


class FreeSteps(FixedSteps):
    """Rollout whose envs share a random stream."""

    def __init__(self, block, steps: int) -> None:
        super().__init__(block, steps)
        self.block.__class__ = FreeBlock

    def collect(self, agent, iteration: int):
        with mock.patch.object(rollout, "draws", shared_draws):
            return super().collect(agent, iteration)


RNG = np.random.default_rng(0)


def shared_draws(agent, seed, iteration, fragment_id):
    kind, k = agent.noise
    if kind == "normal":
        return lambda steps: RNG.standard_normal((steps, k)).astype(np.float32)
    return lambda steps: RNG.random((steps, k), dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env_ids", nargs="*", default=["Walker2d", "CartPole"])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps-per-batch", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    set_threads(1)
    for env_id in args.env_ids:
        for num_envs in args.num_envs:
            print(f"{env_id}, {num_envs} environments: {measure(args, env_id, num_envs)}")


def measure(args: argparse.Namespace, env_id: str, num_envs: int) -> str:
    """Return a line with both rates and their ratio."""
    full_id = resolve(env_id)
    steps = args.steps_per_batch // num_envs
    pairs = []
    for steps_class, agent_class in ((FixedSteps, PPO), (FreeSteps, FreePPO)):
        block = make_block(lambda _: make(full_id), range(num_envs), 0)
        agent = agent_class(block.spaces, PPOOptions(), seeding.stream(0, "init"))
        pairs.append((steps_class(block, steps), agent))
    rates: list[list[float]] = [[], []]
    for repeat in range(args.repeats + 1):
        for i, (steps_of, agent) in enumerate(pairs):
            start = time.perf_counter()
            steps_of.collect(agent, repeat)
            if repeat:  # the first one warms up
                rates[i].append(steps * num_envs / (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    with_it, without = (statistics.median(r) for r in rates)
    return (
        f"{with_it:,.0f} steps/s with, {without:,.0f} without; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
