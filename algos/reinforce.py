"""REINFORCE: the smallest complete agent, to copy. Source: Williams 1992, Machine Learning 8, 229-256."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.policies import Mode, make_policy
from rank0rl.options import CheckedOptions, Scheduled, option, value_at
from rank0rl.returns import discounted_sum


@dataclass(frozen=True)
class ReinforceOptions(CheckedOptions):
    """Options of REINFORCE."""

    gamma: float = option(0.99, "[0, 1]")
    """Discount per step, usually 0.95 to 1."""
    lr: Scheduled = option(1e-2, "(0, inf)")
    """Adam's step size, usually 1e-3 to 1e-2. A number, linear:START:END or cosine:START:END."""
    hidden: tuple[int, ...] = option((32,), "[1, inf)")
    """Units of each hidden layer of the policy."""


class Reinforce(Agent):
    """Policy gradient with the batch's mean return as baseline."""

    Options = ReinforceOptions
    settings = "reinforce"
    coefficients = ("lr", "gamma")

    def __init__(self, spaces: Spaces, options: ReinforceOptions, rng: np.random.Generator) -> None:
        self.options = options
        self.policy = make_policy((spaces.obs.size,), spaces.act, options.hidden, rng)
        self.noise = self.policy.noise
        self.flat = Flat(self.policy)
        self.adam = Adam(self.flat)

    @classmethod
    def check(cls, spaces: Spaces, options: ReinforceOptions, run: Any) -> str | None:
        if run.episodes_per_batch:
            return None
        return (
            "reinforce has no value function, so a return ends where a batch of steps cuts its "
            "episode off: for whole returns, set --episodes-per-batch"
        )

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.policy.act(inputs(step.obs), step.noise, step.mask, step.explore)

    def process(self, fragment: Fragment) -> Batch:
        gamma = self.options.gamma
        ret = [discounted_sum(fragment.rew[steps], gamma) for steps in fragment.episodes()]
        rows = {"obs": inputs(fragment.obs), "act": fragment.act, "ret": np.concatenate(ret)}
        return {**rows, **fragment.extras}  # "action_mask", where the environment gives it

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        ret = batch["ret"]
        adv = torch.from_numpy((ret - ret.mean()) / (ret.std() + 1e-8)).float()  # 1e-8: no variance
        mask = torch.from_numpy(batch["action_mask"]) if "action_mask" in batch else None
        now = self.policy.distribution(torch.from_numpy(batch["obs"]), mask)
        loss = -(self.policy.logp(now, torch.from_numpy(batch["act"])) * adv).mean()
        self.flat.zero_grad()
        loss.backward()
        self.flat.check(self.policy)
        self.adam.step(value_at(self.options.lr, progress))
        return {"loss": loss.item()}

    def modules(self) -> dict[str, Any]:
        return {"policy": self.policy}

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])

    def mode(self) -> nn.Module:
        return Mode(self.policy)


def inputs(obs: Array) -> Array:
    """Return observations of any shape and dtype as rows of float32."""
    return obs.reshape(len(obs), -1).astype(np.float32)
