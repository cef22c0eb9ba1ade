"""A limit on a cost: PPO learns from reward - multiplier * cost, and the multiplier grows while the cost is too high.

    python train.py examples.lagrange:make --algo examples/lagrange.py --config ppo-Pendulum --total-steps 200000

Source: Tessler et al. 2019, arXiv:1805.11074.
"""

from dataclasses import dataclass, replace

import gymnasium
import numpy as np

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.options import option


@dataclass(frozen=True)
class LagrangeOptions(PPOOptions):
    """Options of PPO, and two more."""

    cost_limit: float = option(0.5, "[0, inf)")
    """Mean cost of a step that is allowed."""
    multiplier_lr: float = option(1.0, "(0, inf)")
    """Step size of the multiplier."""


class Lagrange(PPO):
    """PPO whose rewards lack the cost, at a price that it learns."""

    Options = LagrangeOptions
    info = ("cost",)

    def __init__(self, spaces, options, rng):
        super().__init__(spaces, options, rng)
        self.multiplier = np.zeros(1)

    def process(self, fragment):
        """Take the cost from the rewards."""
        cost = fragment.extras["cost"]
        rew = fragment.rew - self.multiplier * cost
        return {**super().process(replace(fragment, rew=rew)), "cost": cost}

    def update(self, batch, rng, progress):
        """Learn, then move the multiplier towards the limit."""
        cost, before = batch["cost"].mean(), self.multiplier.item()
        excess = cost - self.options.cost_limit
        self.multiplier[:] = max(0, before + self.options.multiplier_lr * excess)
        return {**super().update(batch, rng, progress), "cost": cost, "multiplier": before}

    def modules(self):
        """Return PPO's modules and the multiplier, which `process` reads on every rank."""
        return {**super().modules(), "multiplier": self.multiplier}


class Costs(gymnasium.Wrapper):
    """An environment in whose info is the cost of each step: the squared action."""

    def step(self, action):
        """Step the environment."""
        *answer, info = self.env.step(action)
        return *answer, {**info, "cost": np.square(action).sum()}


def make():
    """Return a pendulum whose torque has a cost."""
    return Costs(gymnasium.make("Pendulum-v1"))
