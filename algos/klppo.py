"""Proximal policy optimization with an adaptive KL penalty, and a value function that remembers a batch.

Source: Heess et al. 2017, arXiv:1707.02286, appendix A; sizes, step sizes and servo as in Patrick
Coady's public description of his agent for the MuJoCo tasks. That agent treats every end of an
episode as terminal and scales observations on every rank; this one does neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import ActorCritic, Part, ValueFunction
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.normalize import normalizer
from rank0rl.nets.policies import Actions, make_policy
from rank0rl.nets.update import ValueFit
from rank0rl.options import CheckedOptions, option
from rank0rl.returns import explained_variance


@dataclass(frozen=True)
class KLPPOOptions(CheckedOptions):
    """Options of PPO with a KL penalty."""

    gamma: float = option(0.995, "[0, 1]")
    """Discount per step, usually 0.97 to 0.999."""
    lam: float = option(0.98, "[0, 1]")
    """GAE mixing, usually 0.9 to 0.98. 0 trusts the value function alone, 1 the returns alone."""
    hidden: tuple[int, ...] | None = option(None, "[1, inf)")
    """Units of each hidden layer of the policy. None: three layers, with 10 units per number of the observation, the geometric mean of the other two layers, and 10 units per number or choice of the action."""
    value_hidden: tuple[int, ...] | None = option(None, "[1, inf)")
    """Units of each hidden layer of the value function. None: three layers, with 10 units per number of the observation, the geometric mean of the other two layers, and 5 units."""
    target_kl: float = option(0.003, "(0, inf)")
    """Mean KL divergence of one update that the penalty aims at, in nats, usually 0.001 to 0.01."""
    eta: float = option(50.0, "[0, inf)")
    """Weight of an extra penalty: the square of how far the divergence is above twice its target."""
    epochs: int = option(20, "[1, inf)")
    """Full-batch gradient steps of the policy per update, usually 10 to 20."""
    lr: float | None = option(None, "(0, inf)")
    """Adam's step size for the policy. None: 9e-4 divided by the square root of the units of its middle layer."""
    value_lr: float | None = option(None, "(0, inf)")
    """Adam's step size for the value function. None: 1e-2 divided by the square root of the units of its middle layer."""
    value_epochs: int = option(10, "[1, inf)")
    """Passes of the value function over this batch and the one before it, usually 5 to 10."""
    value_minibatch_size: int = option(256, "[1, inf)")
    """Rows per gradient step of the value function."""
    log_std: float = option(-0.5, "(-inf, inf)")
    """Initial log standard deviation of continuous actions, usually -1 to 0."""
    actions: Actions = "normal"
    """Distribution of continuous actions: normal (clipped to the bounds), squashed (tanh of normal) or beta. The last two never leave the bounds."""

    def __post_init__(self) -> None:
        """Check the numbers, and that both networks have hidden layers."""
        super().__post_init__()
        if () in (self.hidden, self.value_hidden):
            raise ValueError(
                "both networks of klppo need hidden layers: got none; leave out --hidden and "
                "--value-hidden, or give them units"
            )


class KLPPO(Agent):
    """PPO with an adaptive KL penalty, for box, discrete and hybrid actions."""

    Options = KLPPOOptions
    settings = "klppo"
    norm, policy, value = Part(), Part(), Part()
    coefficients = ("gamma", "lam", "target_kl", "eta")

    def __init__(self, spaces: Spaces, options: KLPPOOptions, rng: np.random.Generator) -> None:
        self.options = options
        norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype, coarse=True)
        size = inputs[0] if len(inputs) == 1 else 12  # an image has too many numbers
        hidden = options.hidden or _sizes(10 * size, 10 * spaces.act.size)
        value_hidden = options.value_hidden or _sizes(10 * size, 5)
        self.lr = options.lr or 9e-4 / _middle(hidden) ** 0.5
        self.value_lr = options.value_lr or 1e-2 / _middle(value_hidden) ** 0.5
        # The original adds up (10 hid3) // 48 rows of log-variances. Half as many rows of log
        # standard deviations move as fast.
        rows = max(1, 10 * hidden[-1] // 96)
        about: Any = {"log_std": options.log_std, "rows": rows, "actions": options.actions}
        policy = make_policy(inputs, spaces.act, hidden, rng, **about)
        value = ValueFunction(inputs, value_hidden, rng)
        self.nets = ActorCritic(norm, policy, value)
        self.noise = self.policy.noise
        self.flat = Flat(self.policy)
        self.value_flat = Flat(nn.ModuleList([self.value, self.norm]))
        self.adam, self.value_adam = Adam(self.flat), Adam(self.value_flat)
        self.beta, self.multiplier = 1.0, 1.0  # weight of the KL penalty; factor of the step size
        self.previous: Batch = {}

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.nets.act(step)

    def process(self, fragment: Fragment) -> Batch:
        """Compute log-probabilities, advantages and returns."""
        return self.nets.process(fragment, self.options.gamma, self.options.lam)

    def prepare(self) -> None:
        """Compile the gradient steps of the value function."""
        self.fit_value = ValueFit(self.value, self.value_adam, self.threads)

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Make full-batch steps of the policy, then epochs of the value function."""
        opt = self.options
        rows = self.nets.training_rows(batch)
        obs, ret = rows["obs"], rows.pop("ret")
        metrics = self.improve(**{name: torch.from_numpy(x) for name, x in rows.items()})
        ev = explained_variance(batch["val"], ret)
        self.value.merge(ret)
        self.value_flat.check(self.value)
        if self.previous:
            obs = np.concatenate([obs, self.norm.numpy(self.previous["obs"])])
            ret = np.concatenate([ret, self.previous["ret"]])
        lr, epochs, size = self.value_lr, opt.value_epochs, opt.value_minibatch_size
        loss = self.fit_value(obs, ret, rng, lr, epochs, size)
        self.previous = {name: batch[name] for name in ("obs", "ret")}
        self.norm.merge(batch["obs"])
        return {**metrics, "value_loss": loss, "explained_variance": ev}

    def improve(
        self, obs: Tensor, act: Tensor, logp: Tensor, adv: Tensor, mask: Tensor | None = None
    ) -> dict[str, float]:
        """Make full-batch steps on the loss, until the divergence exceeds four times its target.

        The arguments are rows of `ActorCritic.training_rows`, as tensors. Returns numbers for the record.
        """
        opt, policy = self.options, self.policy
        self.flat.check(policy)
        with torch.no_grad():
            was = policy.distribution(obs, mask)
        for epoch in range(opt.epochs + 1):
            now = policy.distribution(obs, mask)
            kl = policy.kl(was, now).mean()
            moved = kl.item()
            if epoch == opt.epochs or moved > 4 * opt.target_kl:
                break
            loss = self.loss(policy.logp(now, act) - logp, adv, kl)
            self.flat.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.adam.step(self.lr * self.multiplier)
        beta, multiplier = self.beta, self.multiplier
        self.steer(moved)
        return {
            "kl": moved,
            "entropy": float(policy.entropy(was)),
            "beta": beta,
            "lr": self.lr * multiplier,
            "epochs": epoch,
        }

    def loss(self, log_ratio: Tensor, adv: Tensor, kl: Tensor) -> Tensor:
        """Return -E[r A] + beta KL + eta max(0, KL - 2 target)^2, with r the ratio of new to old probability.

        Source: Heess et al. 2017, arXiv:1707.02286, appendix A.
        """
        opt = self.options
        excess = torch.relu(kl - 2 * opt.target_kl)
        return self.beta * kl + opt.eta * excess.square() - (torch.exp(log_ratio) * adv).mean()

    def steer(self, kl: float) -> None:
        """Adapt the penalty's weight to the divergence kl; near its limits, adapt the step size too."""
        target = self.options.target_kl
        if kl > 2 * target:
            self.beta = min(35.0, 1.5 * self.beta)
            if self.beta > 30 and self.multiplier > 0.1:
                self.multiplier /= 1.5
        elif kl < target / 2:
            self.beta = max(1 / 35, self.beta / 1.5)
            if self.beta < 1 / 30 and self.multiplier < 10:
                self.multiplier *= 1.5

    def modules(self) -> dict[str, Any]:
        return self.nets.modules()

    def state(self) -> dict[str, Any]:
        return {
            "adam": self.adam.state(),
            "value_adam": self.value_adam.state(),
            "beta": self.beta,
            "multiplier": self.multiplier,
            "previous": self.previous,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])
        self.value_adam.load(state["value_adam"])
        self.beta, self.multiplier = state["beta"], state["multiplier"]
        self.previous = {name: np.asarray(x) for name, x in state["previous"].items()}

    def mode(self) -> nn.Module:
        return self.nets.mode()


def _sizes(first: int, last: int) -> tuple[int, ...]:
    """Return the sizes of three layers. The middle one is the geometric mean of the others."""
    return first, int((first * last) ** 0.5), last


def _middle(hidden: tuple[int, ...]) -> int:
    return hidden[len(hidden) // 2]
