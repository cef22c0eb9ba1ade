"""Advantage actor-critic: the smallest agent with a value function, to copy.

Source: Mnih et al. 2016, arXiv:1602.01783, with ranks that wait for each other; advantages as in
Schulman et al. 2016, arXiv:1506.02438.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import ValueFunction, normalized
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.normalize import normalizer
from rank0rl.nets.policies import Mode, make_policy
from rank0rl.options import CheckedOptions, Scheduled, option, value_at
from rank0rl.returns import advantages


@dataclass(frozen=True)
class A2COptions(CheckedOptions):
    """Options of A2C."""

    gamma: float = option(0.99, "[0, 1]")
    """Discount per step, usually 0.97 to 0.999."""
    lam: float = option(0.95, "[0, 1]")
    """GAE mixing, usually 0.9 to 1. 0 trusts the value function alone, 1 the returns alone."""
    lr: Scheduled = option("linear:2e-3:0", "(0, inf)")
    """Adam's step size, usually 5e-4 to 5e-3. A number, linear:START:END or cosine:START:END."""
    value_coef: float = option(0.5, "[0, inf)")
    """Weight of the value loss, usually 0.25 to 1."""
    entropy_coef: float = option(0.0, "[0, inf)")
    """Weight of the entropy bonus, usually 0 to 0.01."""
    max_grad_norm: float = option(0.5, "(0, inf)")
    """Norm to which larger gradients are scaled down, usually 0.5 to 1."""
    hidden: tuple[int, ...] = option((64, 64), "[1, inf)")
    """Units of each hidden layer of the policy and of the value function."""


class A2C(Agent):
    """One gradient step per batch, on advantages from a value function. Choose small batches."""

    Options = A2COptions
    settings = "a2c"
    coefficients = ("lr", "gamma", "lam", "value_coef", "entropy_coef")

    def __init__(self, spaces: Spaces, options: A2COptions, rng: np.random.Generator) -> None:
        self.options = options
        self.norm, shape = normalizer(spaces.obs.shape, spaces.obs.dtype)
        self.policy = make_policy(shape, spaces.act, options.hidden, rng)
        self.value = ValueFunction(shape, options.hidden, rng)
        self.noise = self.policy.noise
        self.flat = Flat(nn.ModuleList(self.modules().values()))
        self.adam = Adam(self.flat)

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.policy.act(self.norm.numpy(step.obs), step.noise, step.mask, step.explore)

    def process(self, fragment: Fragment) -> Batch:
        val = self.value.predict(self.norm.numpy(fragment.obs))
        end_val = self.value.predict(self.norm.numpy(fragment.end_obs))
        adv = advantages(fragment, val, end_val, self.options.gamma, self.options.lam)
        adv = adv.astype(np.float32)
        rows = {"obs": fragment.obs, "act": fragment.act, "adv": adv, "ret": adv + val}
        return {**rows, **fragment.extras}  # "action_mask", where the environment gives it

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        opt = self.options
        self.value.merge(batch["ret"])
        x = torch.from_numpy(self.norm.numpy(batch["obs"]))
        adv, ret = map(torch.from_numpy, (normalized(batch["adv"]), batch["ret"]))
        mask = torch.from_numpy(batch["action_mask"]) if "action_mask" in batch else None
        now = self.policy.distribution(x, mask)
        policy_loss = -(self.policy.logp(now, torch.from_numpy(batch["act"])) * adv).mean()
        value_loss = (self.value(x) - ret / self.value.scale).square().mean()
        entropy = self.policy.entropy(now)
        self.flat.zero_grad()
        (policy_loss + opt.value_coef * value_loss - opt.entropy_coef * entropy).backward()
        self.flat.check(nn.ModuleDict(self.modules()))
        self.flat.limit_norm(opt.max_grad_norm)
        self.adam.step(value_at(opt.lr, progress))
        self.norm.merge(batch["obs"])
        return {"value_loss": value_loss.item(), "entropy": entropy.item()}

    def modules(self) -> dict[str, Any]:
        return {"policy": self.policy, "value": self.value, "norm": self.norm}

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])

    def mode(self) -> nn.Module:
        return Mode(self.policy, self.norm)
