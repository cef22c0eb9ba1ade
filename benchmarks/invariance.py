"""What the same curve for every nprocs costs: the rollout rate with it, over the rate without.

    python benchmarks/invariance.py Walker2d CartPole

Without: one matrix product for all lanes, whose rounding depends on their number; one random stream
for all of them; environments that are reset without a seed. Both alternate, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from algos.ppo import PPO, PPOOptions
from rank0rl import envs, seeding
from rank0rl.mpi.threads import set_threads
from rank0rl.nets.policies import CategoricalPolicy
from rank0rl.rollout import Lane, Rollout


class FreePPO(PPO):
    """Acts with one product for all lanes."""

    def act(self, obs, noise, fragment_id):
        x = self.norm.numpy(obs)
        if isinstance(self.policy, CategoricalPolicy):
            logits = self.policy.mlp.numpy(x)[-1]
            logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
            cumulative = np.add.accumulate(np.exp(logits), axis=1)
            return np.add.reduce(noise * cumulative[:, -1:] >= cumulative[:, :-1], axis=1), {}
        return self.policy.mlp.numpy(x)[-1] + np.exp(
            self.policy.log_std.detach().numpy()
        ) * noise, {}


class FreeRollout(Rollout):
    """Lanes share a random stream, and begin episodes wherever their environment's own one is."""

    rng = np.random.default_rng(0)

    def _noise(self, agent, iteration, unit):
        k = agent.noise[1]
        if agent.noise[0] == "normal":
            return lambda steps: self.rng.standard_normal((steps, k), dtype=np.float32)
        return lambda steps: self.rng.random((steps, k), dtype=np.float32)

    def _begin_next(self, lane: Lane) -> None:
        lane.episode += 1
        lane.over, self._ret[lane.row], self._length[lane.row] = False, 0.0, 0
        self._obs[lane.row], _ = lane.env.reset()


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
    full_id = envs.resolve(env_id)
    steps = args.steps_per_batch // num_envs
    pairs = []
    for rollout_class, agent_class in ((Rollout, PPO), (FreeRollout, FreePPO)):
        rollout = rollout_class(lambda: envs.make(full_id), range(num_envs), 0, steps=steps)
        agent = agent_class(rollout.spaces, PPOOptions(), seeding.stream(0, "init"))
        pairs.append((rollout, agent))
    rates: list[list[float]] = [[], []]
    for repeat in range(args.repeats + 1):
        for i, (rollout, agent) in enumerate(pairs):
            start = time.perf_counter()
            rollout.collect(agent, repeat)
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
