"""REINFORCE with a memory: an agent of one's own whose actions depend on all that it has seen in an episode.

python train.py examples.05_memory:recall --algo examples/remember.py --episodes-per-batch 64 --num-episodes 12800
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.policies import make_policy
from rank0rl.nets.recurrent import Recurrent, chunked, filled, firsts
from rank0rl.options import CheckedOptions, option
from rank0rl.returns import discounted_sum


@dataclass(frozen=True)
class RememberOptions(CheckedOptions):
    """Options of REINFORCE with a memory."""

    gamma: float = option(0.99, "[0, 1]")
    """Discount per step, usually 0.95 to 1."""
    lr: float = option(1e-2, "(0, inf)")
    """Adam's step size, usually 1e-3 to 1e-2."""
    size: int = option(32, "[1, inf)")
    """Units of the GRU."""
    chunk_steps: int = option(50, "[1, inf)")
    """Steps through which gradients flow."""


class Remember(Agent):
    """Policy gradient through a GRU, with the batch's mean return as baseline."""

    Options = RememberOptions

    def __init__(self, spaces: Spaces, options: RememberOptions, rng: np.random.Generator) -> None:
        self.options = options
        self.layer = Recurrent("gru", spaces.obs.size, options.size, rng)
        self.policy = make_policy((options.size,), spaces.act, (), rng)
        self.noise, self.memory = self.policy.noise, self.layer.memory
        self.flat = Flat(nn.ModuleList([self.layer, self.policy]))
        self.adam = Adam(self.flat)

    def act(self, step: Step) -> tuple[Array, Batch]:
        """Draw actions, and return the memory for the next step."""
        now = self.layer.numpy(inputs(step.obs), step.memory)  # a GRU's memory is its features
        act, _ = self.policy.act(now, step.noise, explore=step.explore)
        return act, {"memory": now}

    def process(self, fragment: Fragment) -> Batch:
        """Cut the fragment into chunks, each with the memory before its first step."""
        length, episodes = self.options.chunk_steps, fragment.episodes()
        ret = [discounted_sum(fragment.rew[steps], self.options.gamma) for steps in episodes]
        steps = {"obs": inputs(fragment.obs), "act": fragment.act, "ret": np.concatenate(ret)}
        memory = firsts(fragment.extras["memory"], episodes, length)
        return {**chunked(steps, episodes, length), "memory": memory}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Make one step along the gradient of all chunks."""
        there = torch.from_numpy(filled(batch["steps"], self.options.chunk_steps))
        obs, act, ret, memory = (
            torch.from_numpy(batch[name]) for name in ("obs", "act", "ret", "memory")
        )
        ret = ret[there].float()
        adv = (ret - ret.mean()) / (ret.std() + 1e-8)  # 1e-8: no variance
        now = self.policy.distribution(self.layer(obs, memory)[there])
        loss = -(self.policy.logp(now, act[there]) * adv).mean()
        self.flat.zero_grad()
        loss.backward()
        self.flat.limit_norm(0.5)
        self.adam.step(self.options.lr)
        return {"loss": loss.item()}

    def modules(self) -> dict[str, Any]:
        """Return all that acts."""
        return {"layer": self.layer, "policy": self.policy}

    def state(self) -> dict[str, Any]:
        """Return Adam's moments."""
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore Adam's moments."""
        self.adam.load(state["adam"])


def inputs(obs: Array) -> Array:
    """Return observations of any shape and dtype as rows of float32."""
    return obs.reshape(len(obs), -1).astype(np.float32)
