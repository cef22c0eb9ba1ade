"""Proximal policy optimization with the clipped objective.

Source: Schulman et al. 2017, arXiv:1707.06347; scaling of observations and values, initialization
and the annealed learning rate as in Andrychowicz et al. 2021, arXiv:2006.05990.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.agent import Agent, Array, Fragment, Spaces
from rank0rl.batch import Batch, minibatches
from rank0rl.nets.actor_critic import ActorCritic, normalized
from rank0rl.nets.conv import ConvNet
from rank0rl.nets.cuda import Twin, joined
from rank0rl.nets.flat import Adam, flatten_
from rank0rl.nets.normalize import normalizer
from rank0rl.nets.policies import make_policy
from rank0rl.nets.value import ValueFunction
from rank0rl.options import CheckedOptions, option
from rank0rl.returns import explained_variance


@dataclass(frozen=True)
class PPOOptions(CheckedOptions):
    """Options of PPO."""

    gamma: float = option(0.99, "[0, 1]")
    """Discount per step, usually 0.97 to 0.999."""
    lam: float = option(0.95, "[0, 1]")
    """GAE mixing, usually 0.9 to 0.98: 0 trusts the value function alone, 1 the returns alone."""
    hidden: tuple[int, ...] = option((64, 64), "[1, inf)")
    """Units of each hidden layer, of the policy and of the value function."""
    minibatch_size: int = option(64, "[1, inf)")
    """Rows of one gradient step, usually 32 to 512."""
    epochs: int = option(10, "[1, inf)")
    """Passes over the batch in one update, usually 3 to 10."""
    lr: float = option(3e-4, "(0, inf)")
    """Adam's step size, usually 1e-4 to 1e-3."""
    anneal: bool = True
    """Let the step size fall linearly to 0 at the end of the run."""
    clip_ratio: float = option(0.2, "(0, inf)")
    """How far the ratio of new to old probability pays off, usually 0.1 to 0.3."""
    target_kl: float | None = option(None, "(0, inf)")
    """Mean KL divergence from the acting policy at which an update ends early, in nats, usually 0.01 to 0.05. None: never."""
    normalize: Literal["batch", "minibatch"] = "batch"
    """Over what advantages get mean 0 and standard deviation 1; minibatches make noisier, larger steps."""
    value_coef: float = option(0.5, "[0, inf)")
    """Weight of the value loss, usually 0.5 to 1."""
    entropy_coef: float = option(0.0, "[0, inf)")
    """Weight of the entropy bonus, usually 0 to 0.01."""
    max_grad_norm: float = option(0.5, "(0, inf)")
    """Norm to which a larger gradient is scaled down, usually 0.5 to 1."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions, usually -1 to 0."""


class PPO(Agent):
    """Clipped PPO for box and discrete actions."""

    Options = PPOOptions
    devices = ("cpu", "cuda")

    def __init__(self, spaces: Spaces, options: PPOOptions, rng: np.random.Generator) -> None:
        """Build policy, value function and optimizer over one flat vector."""
        self.options = options
        self.norm, inputs = normalizer(spaces.obs.shape, spaces.obs.dtype)
        self.policy = make_policy(inputs, spaces.act, options.hidden, rng, options.log_std)
        self.value = ValueFunction(inputs, options.hidden, rng)
        self.nets = ActorCritic(self.norm, self.policy, self.value)
        self.noise = self.policy.noise
        self.flat = flatten_(nn.ModuleList([self.policy, self.value, self.norm]))
        self.adam = Adam(self.flat, eps=1e-5)
        self.twin: Twin | None = (
            None  # on rank 0, where autograd takes the gradient: on a GPU, or of images
        )

    def act(
        self, obs: Array, noise: Array, fragment_id: Array, mask: Array | None = None
    ) -> tuple[Array, Batch]:
        """Sample actions."""
        return self.nets.act(obs, noise, mask)

    def process(self, fragment: Fragment) -> Batch:
        """Log-probabilities, advantages and returns."""
        return self.nets.process(fragment, self.options.gamma, self.options.lam)

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Epochs of minibatch gradient steps on the clipped objective and the value loss."""
        opt = self.options
        lr = opt.lr * (1 - progress) if opt.anneal else opt.lr
        ev = explained_variance(batch["val"], batch["ret"])
        self.value.merge(batch["ret"])
        rows = self.nets.learned_from(batch)
        rows["ret"] = batch["ret"] / self.value.scale.numpy()
        self.flat.check()
        step, size = self.step, opt.minibatch_size
        if self.device != "cpu" or isinstance(self.value.mlp, ConvNet):
            nets = nn.ModuleDict({"policy": self.policy, "value": self.value})
            self.twin = self.twin or Twin(
                nets, self.adam, self.loss, opt.max_grad_norm, self.device
            )
            rows, step = self.twin.begin(rows, size), self.twin.step
        epoch = 0
        while epoch < opt.epochs:
            epoch += 1
            seen = [step(part, lr) for part in minibatches(rows, size, rng)]
            log_ratio, error, entropy = (joined(parts) for parts in zip(*seen, strict=True))
            distance = (np.expm1(log_ratio) - log_ratio).mean()  # unbiased and never negative
            kl = float(distance)
            if opt.target_kl is not None and kl > opt.target_kl:
                break
        if self.twin:
            self.twin.end()
        self.norm.merge(batch["obs"])
        return {
            "kl": kl,
            "entropy": float(entropy.mean()),
            "clip_fraction": float((abs(np.expm1(log_ratio)) > opt.clip_ratio).mean()),
            "value_loss": float(np.square(error).mean()),
            "explained_variance": ev,
            "epochs": epoch,
            "lr": lr,
        }

    def step(self, part: Batch, lr: float) -> tuple[Array, Array, Array]:
        """One gradient step on a minibatch; what `gradient` gives."""
        opt = self.options
        if opt.normalize == "minibatch":
            part["adv"] = normalized(part["adv"])
        seen = self.gradient(**part)
        self.flat.clip_norm(opt.max_grad_norm)
        self.adam.step(lr)
        return seen

    def gradient(
        self,
        obs: Array,
        act: Array,
        old: Array,
        adv: Array,
        ret: Array,
        mask: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Gradient of -E[min(r A, clip(r) A)] + c_v E[(V - R)^2] - c_e H, r the ratio of new to old probability.

        Where the clipped term is the smaller one, its derivative is 0; elsewhere it is that of r A.

        Args:
            obs: normalized, (n, inputs).
            act: actions, (n, *act).
            old: their log-probabilities when they were taken, (n,).
            adv: advantages, normalized, (n,).
            ret: returns in units of the value function's scale, (n,).
            mask: which choices could be taken, (n, all choices), if not all.

        Returns:
            Log of r, (n,); error of the value, (n,); entropy, (1,).

        Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9.
        """
        opt, n = self.options, len(adv)
        logp, entropy, policy_pullback = self.policy.numpy(obs, act, mask)
        log_ratio = logp - old
        ratio = np.exp(log_ratio)
        pays = (ratio - 1) * np.sign(adv) < opt.clip_ratio
        policy_pullback(
            np.where(pays, ratio * adv * np.float32(-1 / n), np.float32(0)), -opt.entropy_coef
        )
        val, value_pullback = self.value.numpy(obs)
        error = val - ret
        value_pullback(2 * opt.value_coef / n * error)
        return log_ratio, error, np.array([entropy])

    def loss(
        self,
        nets: Any,
        obs: Tensor,
        act: Tensor,
        old: Tensor,
        adv: Tensor,
        ret: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss whose gradient `gradient` gives, in torch, for autograd on any device; and the same to record."""
        opt = self.options
        if opt.normalize == "minibatch":
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
        policy = nets["policy"]
        now = policy.distribution(obs, mask)
        entropy = policy.entropy(now)
        log_ratio = policy.logp(now, act) - old
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - opt.clip_ratio, 1 + opt.clip_ratio)
        error = nets["value"](obs) - ret
        loss = (
            -torch.minimum(ratio * adv, clipped * adv).mean()
            + opt.value_coef * error.square().mean()
            - opt.entropy_coef * entropy
        )
        return loss, (log_ratio, error, entropy.reshape(1))

    def modules(self) -> dict[str, Any]:
        """All networks and statistics."""
        return self.nets.modules()

    def state(self) -> dict[str, Any]:
        """Adam's moments."""
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Take back Adam's moments."""
        self.adam.load(state["adam"])

    def mode(self) -> nn.Module:
        """Means, or the most probable choices."""
        return self.nets.mode()
