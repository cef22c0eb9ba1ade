"""Proximal policy optimization with the clipped objective.

Source: Schulman et al. 2017, arXiv:1707.06347; scaling of observations and values, initialization
and the decreasing step size as in Andrychowicz et al. 2021, arXiv:2006.05990.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import ClosedForm, MakeNetworks, NetworkOptions, Part
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.recurrent import Cell, recurrent_networks
from rank0rl.nets.update import GradientSteps
from rank0rl.options import OptionError, Scheduled, changing, option, value_at
from rank0rl.returns import explained_variance


@dataclass(frozen=True)
class PPOOptions(NetworkOptions):
    """Options of PPO."""

    recurrent: Cell | None = None
    """Memory: a layer before the hidden layers, gru or lstm, shared by policy and value function."""
    memory_size: int = option(64, "[1, inf)")
    """With --recurrent: units of that layer."""
    chunk_steps: int = option(32, "[1, inf)")
    """With --recurrent: steps through which gradients flow, usually 8 to 64. A minibatch holds whole chunks."""
    gamma: float = option(0.99, "[0, 1]")
    """Discount per step, usually 0.97 to 0.999."""
    lam: float = option(0.95, "[0, 1]")
    """GAE mixing, usually 0.9 to 0.98. 0 trusts the value function alone, 1 the returns alone."""
    minibatch_size: int = option(64, "[1, inf)")
    """Rows per gradient step, usually 32 to 512."""
    epochs: int = option(10, "[1, inf)")
    """Passes over the batch per update, usually 3 to 10."""
    lr: Scheduled = option("linear:3e-4:0", "(0, inf)")
    """Adam's step size, usually from 1e-4 to 1e-3. A number, linear:START:END or cosine:START:END."""
    clip_ratio: Scheduled = option(0.2, "(0, inf)")
    """Limit of the distance from 1 of the ratio of new to old probability, usually 0.1 to 0.3. May be a schedule, as lr."""
    target_kl: float | None = option(None, "(0, inf)")
    """An update ends early when the mean KL divergence from the acting policy exceeds this, in nats, usually 0.01 to 0.05. None: never."""
    normalize: Literal["batch", "minibatch"] = "batch"
    """Rows over which advantages are normalized to mean 0 and standard deviation 1. Minibatches make noisier, larger steps."""
    value_coef: float = option(0.5, "[0, inf)")
    """Weight of the value loss, usually 0.5 to 1."""
    entropy_coef: Scheduled = option(0.0, "[0, inf)")
    """Weight of the entropy bonus, usually 0 to 0.01. May be a schedule, as lr."""
    max_grad_norm: float = option(0.5, "(0, inf)")
    """Norm to which larger gradients are scaled down, usually 0.5 to 1."""


class PPO(Agent):
    """Clipped PPO for box, discrete and hybrid actions."""

    Options = PPOOptions
    settings = "ppo"
    norm, policy, value = Part(), Part(), Part()
    coefficients = (
        *("lr", "gamma", "lam", "clip_ratio", "value_coef", "entropy_coef", "target_kl"),
    )
    make_networks: MakeNetworks | None = None
    """A static method that makes the networks, in a class of one's own."""
    devices = ("cpu", "cuda")

    @classmethod
    def check(cls, spaces: Spaces, options: PPOOptions, run: Any) -> None:
        chunk = options.chunk_steps if options.recurrent else 1
        if options.minibatch_size == chunk == 1 and options.normalize == "minibatch":
            raise OptionError(
                "an advantage that is normalized alone is 0, so the policy would not learn: got "
                "--minibatch-size 1 and --normalize minibatch; give more rows, or --normalize batch"
            )

    def __init__(self, spaces: Spaces, options: PPOOptions, rng: np.random.Generator) -> None:
        self.options = opt = options
        if opt.recurrent is None:
            self.nets = opt.networks(spaces, rng, self.make_networks, share=True)
        else:
            self.nets = recurrent_networks(opt, spaces, rng, self.make_networks)
        self.mode_obs = opt.policy_obs
        self.noise, self.memory = self.nets.noise, self.nets.memory
        if self.memory:
            self.devices = ("cpu",)
        self.flat = Flat(nn.ModuleList(self.nets.modules().values()))
        self.adam = Adam(self.flat, eps=1e-5)
        self.schedule(0.0)

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.nets.act(step)

    def process(self, fragment: Fragment) -> Batch:
        """Compute log-probabilities, advantages and returns."""
        return self.nets.process(fragment, self.options.gamma, self.options.lam)

    def prepare(self) -> None:
        """Make the gradient steps and compile them."""
        nets, limit = self.nets, self.options.max_grad_norm
        over_each, where = self.options.normalize == "minibatch", (self.device, self.threads)
        self.steps = GradientSteps(
            nets.trained(), nets.evaluate, self.adam, limit, *where, normalize=over_each
        )
        self.steps.compile(self.closed_form())

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Make epochs of minibatch gradient steps on the loss."""
        opt, size = self.options, self.nets.rows_of(self.options.minibatch_size)
        lr = value_at(opt.lr, progress)
        self.schedule(progress)
        steps = self.nets.each_step(batch)
        ev = explained_variance(steps["val"], steps["ret"])
        self.value.merge(steps["ret"])
        more = {name: x for name, x in batch.items() if name != "fragment_id"}
        rows = {**more, **self.nets.training_rows(batch)}
        rows["ret"] = rows["ret"] / self.value.scale.numpy()
        rows["val"] = rows["val"] / self.value.scale.numpy()
        self.flat.check(self.nets.trained())
        rows = self.steps.begin(rows, self.loss, self.closed_form())
        epoch = 0
        while epoch < opt.epochs:
            epoch += 1
            log_ratio, error, entropy = self.steps.epoch(rows, size, rng, lr)
            off = np.expm1(log_ratio, dtype=np.float64)  # in float32, it differs by the C library
            kl = float((off - log_ratio).mean())  # unbiased and never negative
            if opt.target_kl is not None and kl > opt.target_kl:
                break
        self.steps.end()
        self.updates = self.steps.how
        self.norm.merge(steps["obs"])
        return {
            "kl": kl,
            "entropy": float(entropy.mean()),
            "clip_fraction": float((abs(off) > self.clip_ratio).mean()),
            "value_loss": float(np.square(error).mean()),
            "explained_variance": ev,
            "epochs": epoch,
            "lr": lr,
            **changing(progress, clip_ratio=opt.clip_ratio, entropy_coef=opt.entropy_coef),
        }

    def schedule(self, progress: float) -> None:
        """Set the coefficients that may change during the run."""
        self.clip_ratio = value_at(self.options.clip_ratio, progress)
        self.entropy_coef = value_at(self.options.entropy_coef, progress)

    def loss(
        self, log_ratio: Tensor, entropy: Tensor, value: Tensor, rows: dict[str, Tensor]
    ) -> Tensor:
        """Return the loss of a minibatch, (). It is the one that trains, on every device: change it as you like.

        Args:
            log_ratio: log of the ratio of new to old probability of the actions, (n,).
            entropy: mean entropy of the policy, ().
            value: predictions of the value function, (n,), in units of its scale.
            rows: rows of the batch, (n, ...) each: those of `ActorCritic.training_rows`, others that
                `process` returns, and "val", values at the time. "ret" and "val" are in units of the scale.
                "adv" is normalized as `--normalize` says.
        """
        policy_loss = clipped_loss(log_ratio, rows["adv"], self.clip_ratio)
        value_loss = (value - rows["ret"]).square().mean()
        loss = policy_loss + self.options.value_coef * value_loss
        return loss - self.entropy_coef * entropy if self.entropy_coef else loss

    def closed_form(self) -> ClosedForm | None:
        """Return the derivatives of `loss`, which make updates on the CPU faster, or None.

        They are compared with `loss` before each update: a loss that differs is differentiated by torch.
        """
        value_coef = self.options.value_coef
        return ClosedForm(clipped_slope, self.clip_ratio, value_coef, self.entropy_coef)

    def modules(self) -> dict[str, Any]:
        return self.nets.modules()

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])

    def mode(self) -> nn.Module:
        return self.nets.mode()


def clipped_loss(log_ratio: Tensor, adv: Tensor, clip_ratio: float) -> Tensor:
    """Return -E[min(r A, clip(r) A)], with r the ratio of new to old probability of the actions.

    log r and the normalized advantages A have shape (n,); clip(r) limits r to 1 +- clip_ratio.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.minimum(ratio * adv, clipped * adv).mean()


def clipped_slope(log_ratio: float, adv: float, clip_ratio: float) -> float:
    """Return n times the derivative of `clipped_loss` by the log ratio of one of n rows, for kernels."""
    ratio = np.exp(log_ratio)
    clipped = (ratio - 1) * np.sign(adv) > clip_ratio  # nan is not
    return 0.0 if clipped else -ratio * adv
