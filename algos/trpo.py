"""Trust region policy optimization: the largest natural-gradient step that keeps the policy close.

Source: Schulman et al. 2015, arXiv:1502.05477; advantages as in Schulman et al. 2016,
arXiv:1506.02438.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import MakeNetworks, NetworkOptions, Part
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.update import FisherProducts, ValueFit, compiled_products
from rank0rl.options import OptionError, Scheduled, changing, option, value_at
from rank0rl.returns import explained_variance


@dataclass(frozen=True)
class TRPOOptions(NetworkOptions):
    """Options of TRPO."""

    gamma: float = option(0.99, "[0, 1]")
    """Discount per step, usually 0.97 to 0.999."""
    lam: float = option(0.97, "[0, 1]")
    """GAE mixing, usually 0.9 to 0.98. 0 trusts the value function alone, 1 the returns alone."""
    target_kl: Scheduled = option(0.01, "(0, inf)")
    """Mean KL divergence from the acting policy that a step aims at, in nats, usually 0.005 to 0.05. A number, linear:START:END or cosine:START:END."""
    damping: float = option(0.1, "[0, inf)")
    """Number added to the diagonal of the Fisher matrix, usually 0.01 to 0.1."""
    cg_iterations: int = option(10, "[1, inf)")
    """Iterations of conjugate gradient, usually 10 to 20."""
    fisher_stride: int = option(5, "[1, inf)")
    """Compute the Fisher matrix from every n-th row of the batch, where n is this number."""
    backtracks: int = option(10, "[0, inf)")
    """Number of times that the line search shortens the step before it gives up. 0: no line search, the full natural-gradient step."""
    backtrack_ratio: float = option(0.8, "(0, 1)")
    """Factor by which the line search shortens the step each time, usually 0.5 to 0.8."""
    value_lr: Scheduled = option(1e-3, "(0, inf)")
    """Adam's step size for the value function, usually 3e-4 to 3e-3. May be a schedule, as target_kl."""
    value_epochs: int = option(5, "[1, inf)")
    """Passes of the value function over the batch, usually 3 to 10."""
    value_minibatch_size: int = option(256, "[1, inf)")
    """Rows per gradient step of the value function."""


class TRPO(Agent):
    """TRPO for box, discrete and hybrid actions."""

    Options = TRPOOptions
    settings = "trpo"
    norm, policy, value = Part(), Part(), Part()
    coefficients = ("gamma", "lam", "target_kl", "value_lr")
    make_networks: MakeNetworks | None = None
    """A static method that makes the networks, in a class of one's own."""

    def __init__(self, spaces: Spaces, options: TRPOOptions, rng: np.random.Generator) -> None:
        self.options = options
        self.nets = options.networks(spaces, rng, self.make_networks)
        self.mode_obs = options.policy_obs
        self.noise = self.policy.noise
        if {*self.policy.parameters()} & {*self.value.parameters()}:
            raise OptionError("trpo steps policy and value function apart: they may share no layer")
        self.flat = Flat(self.policy)
        self.value_flat = Flat(nn.ModuleList([self.value, self.norm]))
        self.adam = Adam(self.value_flat)

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.nets.act(step)

    def process(self, fragment: Fragment) -> Batch:
        """Compute log-probabilities, advantages and returns."""
        return self.nets.process(fragment, self.options.gamma, self.options.lam)

    def prepare(self) -> None:
        """Compile the gradient steps of the value function, and products with the Fisher matrix."""
        self.fit_value = ValueFit(self.value, self.adam, self.threads)
        self.fisher = FisherProducts(self.policy, self.flat, self.options.damping, self.threads)

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        """Make one step of the policy, then some epochs of the value function."""
        opt = self.options
        rows = self.nets.training_rows(batch)
        obs, ret = rows["obs"], rows.pop("ret")
        target_kl, value_lr = value_at(opt.target_kl, progress), value_at(opt.value_lr, progress)
        tensors = {name: torch.from_numpy(x) for name, x in rows.items()}
        with compiled_products(self.policy, len(obs)):
            metrics = self.improve(target_kl, **tensors)
        ev = explained_variance(batch["val"], ret)
        self.value.merge(ret)
        self.value_flat.check(self.value)
        epochs, size = opt.value_epochs, opt.value_minibatch_size
        loss = self.fit_value(obs, ret, rng, value_lr, epochs, size)
        self.norm.merge(batch["obs"])
        now = changing(progress, target_kl=opt.target_kl, value_lr=opt.value_lr)
        return {**metrics, "value_loss": loss, "explained_variance": ev, **now}

    def improve(
        self,
        target_kl: float,
        obs: Tensor,
        act: Tensor,
        logp: Tensor,
        adv: Tensor,
        mask: Tensor | None = None,
    ) -> dict[str, float]:
        """Maximize E[r A], r the ratio of new to old probability, within E[KL] of about the target.

        The step is s = sqrt(2 target / (x' F x)) x with F x = g, g the gradient and F the Fisher
        matrix. It is shortened until it raises the objective and E[KL] <= 1.5 target. (A quadratic
        approximation by F gives E[KL] = target. 1.5 leaves room for its error, as in OpenAI's
        baselines.)

        The other arguments are rows of `ActorCritic.training_rows`, as tensors. Returns numbers for the
        record.

        Source: Schulman et al. 2015, arXiv:1502.05477, appendix C.
        """
        opt, policy = self.options, self.policy
        theta = self.flat.vectors[0]
        self.flat.check(policy)
        before = policy.distribution(obs, mask)
        was = tuple(x.detach() for x in before)

        def objective(of: tuple[Tensor, ...]) -> Tensor:
            return (torch.exp(policy.logp(of, act) - logp) * adv).mean()

        self.flat.zero_grad()
        gain = objective(before)
        gain.backward()  # type: ignore[no-untyped-call]
        gradient = theta.grad.clone()  # type: ignore[union-attr]
        some = slice(None, None, opt.fisher_stride)
        fisher = self.fisher(obs[some], None if mask is None else mask[some])
        direction = conjugate_gradient(fisher, gradient, opt.cg_iterations)
        curvature = float(direction @ fisher(direction))
        step = direction * (2 * target_kl / curvature) ** 0.5 if curvature > 0 else 0 * gradient
        start, taken = theta.detach().clone(), 0.0
        with torch.no_grad():
            for tries in range(opt.backtracks + 1):
                share = opt.backtrack_ratio**tries
                theta.copy_(start + share * step)
                now = policy.distribution(obs, mask)
                kl, gained = float(policy.kl(was, now).mean()), float(objective(now) - gain)
                if not opt.backtracks or (gained > 0 and kl <= 1.5 * target_kl):
                    taken = share if curvature > 0 else 0.0
                    break
            else:
                theta.copy_(start)
                kl = gained = 0.0
        return {
            "kl": kl,
            "entropy": float(policy.entropy(was)),
            "gain": gained,
            "step_taken": taken,
            "step_norm": float(step.norm()) * taken,
        }

    def modules(self) -> dict[str, Any]:
        return self.nets.modules()

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])

    def mode(self) -> nn.Module:
        return self.nets.mode()


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve A x = b, shape (n,), for a positive definite matrix A, given the function v -> A v.

    n iterations are exact. It stops where the squared norm of the residual, relative to that of b, is
    at most the tolerance, and where rounding has made A seem not to be positive definite.

    Source: Nocedal and Wright 2006, algorithm 5.2.
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = begun = residual @ residual
    for _ in range(iterations):
        if square <= tolerance * begun:
            break
        along = product(direction)
        curvature = direction @ along
        if curvature <= 0:
            break
        alpha = square / curvature
        x += alpha * direction
        residual -= alpha * along
        square, last = residual @ residual, square
        direction = residual + square / last * direction
    return x
