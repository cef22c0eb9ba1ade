"""Behaviour cloning: the policy imitates recorded actions, and the value function learns the policy's returns.

A PPO or TRPO run can begin with both, by --init-from. Source: Pomerleau 1989, NeurIPS 1, 305-313.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch, minibatches
from rank0rl.envs import demonstrations
from rank0rl.nets.actor_critic import NetworkOptions, Part
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.update import ValueFit
from rank0rl.options import OptionError, Scheduled, option, value_at
from rank0rl.returns import explained_variance


@dataclass(frozen=True)
class BCOptions(NetworkOptions):
    """Options of behaviour cloning."""

    data: str = ""
    """Observations and actions to clone: a Minari dataset, a file.npz with the arrays obs and act, or a folder of such files."""
    gamma: float = option(0.99, "[0, 1]")
    """Discount per step of the value function, usually 0.97 to 0.999."""
    lam: float = option(0.95, "[0, 1]")
    """GAE mixing of the value function's targets, usually 0.9 to 0.98."""
    lr: Scheduled = option("linear:1e-3:0", "(0, inf)")
    """Adam's step size, usually from 3e-4 to 3e-3. A number, linear:START:END or cosine:START:END."""
    minibatch_size: int = option(256, "[1, inf)")
    """Rows per gradient step, usually 64 to 512."""
    steps: int = option(500, "[1, inf)")
    """Gradient steps of the policy in an iteration, each on a minibatch of the data."""
    value_epochs: int = option(5, "[1, inf)")
    """Passes of the value function over the batch, usually 3 to 10."""


class BC(Agent):
    """Maximizes the log-probability of the data's actions.

    The ranks run the cloned policy. Their episodes show its return, and train the value function. From the
    first update on, the statistics of observations are those of the data.
    """

    Options = BCOptions
    settings = "bc"
    norm, policy, value = Part(), Part(), Part()
    coefficients = ("lr", "gamma", "lam")

    def __init__(self, spaces: Spaces, options: BCOptions, rng: np.random.Generator) -> None:
        self.options, self.spaces = options, spaces
        self.nets = options.networks(spaces, rng)
        self.mode_obs = options.policy_obs
        self.noise = self.nets.noise
        self.flat = Flat(self.policy)
        self.value_flat = Flat(nn.ModuleList([self.value, self.norm]))
        self.adam, self.value_adam = Adam(self.flat), Adam(self.value_flat)
        self.begun, self.sha256 = False, ""

    @classmethod
    def check(cls, spaces: Spaces, options: BCOptions, run: Any) -> None:
        """Read the data, to see that they fit."""
        if options.actions != "normal":
            raise OptionError(f"bc clones --actions normal: got {options.actions}")
        if not options.data:
            raise OptionError("--algo bc needs data: name them with --data")
        demonstrations.read(options.data, spaces)

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.nets.act(step)

    def process(self, fragment: Fragment) -> Batch:
        """Compute what the value function learns from."""
        rows = self.nets.process(fragment, self.options.gamma, self.options.lam)
        return {name: rows[name] for name in ("obs", "val", "ret")}

    def prepare(self) -> None:
        """Read the data, and compile the gradient steps of the value function."""
        self.data = demonstrations.read(self.options.data, self.spaces)
        digest = hashlib.sha256(b"".join(array.tobytes() for array in self.data.values()))
        if self.sha256 not in ("", digest.hexdigest()):
            raise ValueError(f"--data {self.options.data} is not what this run began with")
        self.sha256 = digest.hexdigest()
        self.fit_value = ValueFit(self.value, self.value_adam, self.threads)

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Make steps on the data, then epochs of the value function on the batch."""
        opt, lr = self.options, value_at(self.options.lr, progress)
        if not self.begun:
            self.norm.forget()  # what --init-from brought
            self.norm.merge(self.data["obs"])
            self.begun = True
        losses: list[float] = []
        while len(losses) < opt.steps:
            for few in minibatches(self.data, opt.minibatch_size, rng):
                losses.append(self.clone(few, lr))
                if len(losses) == opt.steps:
                    break
        ev = explained_variance(batch["val"], batch["ret"])
        self.value.merge(batch["ret"])
        self.value_flat.check(self.value)
        x, epochs, size = self.norm.numpy(batch["obs"]), opt.value_epochs, opt.minibatch_size
        value_loss = self.fit_value(x, batch["ret"], rng, lr, epochs, size)
        loss = float(np.mean(losses))
        return {"loss": loss, "value_loss": value_loss, "explained_variance": ev, "lr": lr}

    def clone(self, few: Batch, lr: float) -> float:
        """Make one step on a minibatch of the data; return its loss, the mean of -log p(act)."""
        now = self.policy.distribution(torch.from_numpy(self.norm.numpy(few["obs"])))
        loss = -self.policy.logp(now, torch.from_numpy(few["act"])).mean()
        self.flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.flat.check(self.policy)
        self.flat.limit_norm(1.0)
        self.adam.step(lr)
        return loss.item()

    def modules(self) -> dict[str, Any]:
        return self.nets.modules()

    def state(self) -> dict[str, Any]:
        adams = {"adam": self.adam.state(), "value_adam": self.value_adam.state()}
        return {**adams, "begun": self.begun, "data_sha256": self.sha256}

    def load(self, state: dict[str, Any]) -> None:
        self.begun, self.sha256 = state["begun"], state["data_sha256"]
        self.adam.load(state["adam"])
        self.value_adam.load(state["value_adam"])

    def mode(self) -> nn.Module:
        return self.nets.mode()
