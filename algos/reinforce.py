"""REINFORCE: the smallest complete agent, to copy for one of your own.

Source: Williams 1992, Machine Learning 8, 229-256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rank0rl.agent import Agent, Fragment, Spaces, check_ranges
from rank0rl.batch import Batch
from rank0rl.flat import flatten_
from rank0rl.nets import make_policy
from rank0rl.returns import discounted_sum


@dataclass(frozen=True)
class ReinforceOptions:
    """Options of REINFORCE."""

    gamma: float = 0.99
    """Discount per step, usually 0.95 to 1."""
    lr: float = 1e-2
    """Adam's step size, usually 1e-3 to 1e-2."""
    hidden: tuple[int, ...] = (32,)
    """Units of each hidden layer of the policy."""

    def __post_init__(self) -> None:
        """Check each number alone."""
        check_ranges(self, gamma="[0, 1]", lr="(0, inf)", hidden="[1, inf)")


class Reinforce(Agent):
    """Policy gradient with the batch's mean return as baseline."""

    Options = ReinforceOptions

    def __init__(self, spaces: Spaces, options: ReinforceOptions, rng: np.random.Generator) -> None:
        self.options = options
        self.policy = make_policy(spaces.obs.size, spaces.act, options.hidden, rng)
        self.noise = self.policy.noise
        self.flat = flatten_(self.policy)
        self.adam = torch.optim.Adam(self.flat.vectors, lr=options.lr)

    def act(self, obs, noise, unit):
        act, _ = self.policy.act(obs.reshape(len(obs), -1), noise)
        return act, {}

    def process(self, fragment: Fragment) -> Batch:
        parts = [
            discounted_sum(fragment.rew[part], self.options.gamma) for part in fragment.parts()
        ]
        return {"obs": fragment.obs, "act": fragment.act, "ret": np.concatenate(parts)}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        obs, act, ret = (torch.from_numpy(batch[name]) for name in ("obs", "act", "ret"))
        adv = ((ret - ret.mean()) / (ret.std() + 1e-8)).float()
        logp, entropy = self.policy.evaluate(obs.reshape(len(obs), -1), act)
        loss = -(logp * adv).mean()
        self.flat.zero_grad()
        loss.backward()
        self.adam.step()
        return {"loss": loss.item(), "entropy": entropy.item()}

    def modules(self) -> dict[str, Any]:
        return {"policy": self.policy}
