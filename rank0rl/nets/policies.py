"""Policies: drawing actions, their probabilities, and the distance of two policies.

Each works over one memory in two ways, as `mlp.MLP` does: in torch, where autograd takes the
gradient of any loss, and in NumPy, for acting. Where `act` returns "draw" besides the actions, the
probabilities are those of the draws. Normal draws are in `gaussian`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import NEVER, Space, choose
from rank0rl.batch import Batch
from rank0rl.nets.gaussian import Bounds, GaussianPolicy, StateStdPolicy
from rank0rl.nets.mlp import MLP
from rank0rl.nets.networks import Hidden, network
from rank0rl.options import OptionError

Array = npt.NDArray[Any]

_EDGE = np.float32(1e-6)  # draws stay this far from 0 and 1, where the log-density is infinite


class CategoricalPolicy(nn.Module):
    """One of n choices, or several such choices at once, independent of each other.

    The probabilities are the softmax of a network's output. A mask (N, all choices) tells which
    choices may be taken; the others then have probability 0.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, discrete.
        hidden: units of each hidden layer, or a network of your own.
        rng: draws the weights.
        layers: "activation", "layer_norm" and "columns" of the network, see `networks.network`.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Hidden,
        rng: np.random.Generator,
        **layers: Any,
    ) -> None:
        super().__init__()
        self.noise = ("uniform", len(space.choices))
        self.space = space
        self.mlp = network(inputs, hidden, space.size, rng, 0.01, **layers)
        self._choices = space.choice_slices()

    def act(
        self, x: Array, noise: Array, mask: Array | None = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Draw choices (B, *shape), int64, from inputs (B, inputs) and noise (B, k). No row depends on B.

        Without `explore`, take the most probable ones.
        """
        return choose(self.mlp.numpy(x[:, None, :])[:, 0], noise, self.space, mask, explore), {}

    def distribution(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return log-probabilities for inputs (N, inputs): (N, n) for each of the choices at once."""
        logits = self.mlp(x)
        if mask is not None:
            logits = logits.masked_fill(~mask, NEVER)
        return tuple(torch.log_softmax(logits[:, columns], dim=1) for columns in self._choices)

    def tables(self, theta: Tensor) -> tuple[Array, Array | None, Array | None]:
        """Return what `GaussianPolicy.tables` does: here the second is None.

        The third has the columns at which each choice begins, and their number.
        """
        assert isinstance(self.mlp, MLP)  # see `update.has_kernels`
        starts = np.array([0, *np.cumsum(self.space.choices)])
        return self.mlp.table(theta), None, starts

    def mode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the most probable choices (N, *shape), int64, for inputs (N, inputs)."""
        each = [logp.argmax(dim=1) for logp in self.distribution(x, mask)]
        return torch.stack(each, dim=1).reshape(-1, *self.space.shape)

    @staticmethod
    def logp(of: tuple[Tensor, ...], act: Tensor) -> Tensor:
        """Return the log-probabilities (N,) of choices (N, *shape)."""
        act = act.reshape(len(act), -1)
        each = [p.gather(1, act[:, i : i + 1]) for i, p in enumerate(of)]
        return torch.cat(each, dim=1).sum(dim=1)

    @staticmethod
    def entropy(of: tuple[Tensor, ...]) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats."""
        return -torch.stack([(p.exp() * p).sum(dim=1).mean() for p in of]).sum()

    @staticmethod
    def kl(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats."""
        each = [(p.exp() * (p - q)).sum(dim=1) for p, q in zip(old, new, strict=True)]
        return torch.stack(each).sum(dim=0)

    def log_prob(self, x: Array, act: Array, mask: Array | None = None) -> Array:
        """Return the log-probabilities (N,) of choices (N, *shape) for inputs (N, inputs), in NumPy."""
        logits = self.mlp.numpy(x)
        if mask is not None:
            logits[~mask] = NEVER
        for columns in self._choices:
            some = logits[:, columns]
            some -= some.max(axis=1, keepdims=True)
            some -= np.log(np.exp(some).sum(axis=1, keepdims=True))
        taken = act.reshape(len(act), -1) + np.array([columns.start for columns in self._choices])
        return np.add.reduce(np.take_along_axis(logits, taken, axis=1), axis=1)


class BetaPolicy(nn.Module):
    """Independent draws in 0..1 from Beta(a, b), scaled to the bounds. A network gives a and b, both above 1.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, a box.
        hidden: units of each hidden layer, or a network of your own.
        rng: draws the weights.
        layers: "activation", "layer_norm" and "columns" of the network, see `networks.network`.

    Raises:
        OptionError: if the actions have no finite bounds.

    Source: Chou et al. 2017, proceedings.mlr.press/v70/chou17a (a and b above 1, by softplus).
    """

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Hidden,
        rng: np.random.Generator,
        **layers: Any,
    ) -> None:
        super().__init__()
        from scipy import special  # 0.3 s and some memory, for this policy alone

        self._ndtr, self._inverse = special.ndtr, special.betaincinv
        self.noise = ("normal", space.size)
        self.bounds = Bounds(space, "beta")
        self.mlp = network(inputs, hidden, 2 * space.size, rng, 0.01, **layers)

    def act(
        self, x: Array, noise: Array, mask: Any = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Draw actions (B, *shape) with inputs (B, inputs) and noise (B, k). No row depends on B.

        The normal distribution function maps the noise to 0..1, and the inverse of Beta's maps that to the
        draws. So noise 0 gives the median.

        Returns:
            Actions; and the draws, "draw", (B, k).
        """
        out = self.mlp.numpy(x[:, None, :])[:, 0]
        a, b = np.split(1 + np.logaddexp(out, np.float32(0)), 2, axis=1)
        above = noise > 0  # as 1 - Beta(b, a), whose tail float32 can tell from 0
        a, b = np.where(above, b, a), np.where(above, a, b)
        draw = self._inverse(a, b, self._ndtr(-abs(noise)))
        draw = np.where(above, 1 - draw, draw)
        draw = np.minimum(np.maximum(draw, _EDGE), 1 - _EDGE)
        return self.bounds.numpy(draw), {"draw": draw}

    def distribution(self, x: Tensor, mask: Any = None) -> tuple[Tensor, ...]:
        """Return a and b, (N, k) each, for inputs (N, inputs)."""
        return (1 + nn.functional.softplus(self.mlp(x))).chunk(2, dim=1)

    def mode(self, x: Tensor, mask: Any = None) -> Tensor:
        """Return the actions (N, *shape) of the medians, for inputs (N, inputs).

        Source: Kerman 2011, arXiv:1111.0433, eq. 2.2; its error is below 0.01 of the range.
        """
        a, b = self.distribution(x)
        return self.bounds.torch((a - 1 / 3) / (a + b - 2 / 3))

    @staticmethod
    def logp(of: tuple[Tensor, ...], draw: Tensor) -> Tensor:
        """Return the log-densities (N,) of draws (N, k) in 0..1."""
        a, b = of
        logs = (a - 1) * torch.log(draw) + (b - 1) * torch.log1p(-draw)
        return (logs - _log_beta(a, b)).sum(dim=1)

    @staticmethod
    def entropy(of: tuple[Tensor, ...]) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats, of the draws scaled to -1..1."""
        a, b = of
        each = (
            _log_beta(a, b)
            - (a - 1) * torch.digamma(a)
            - (b - 1) * torch.digamma(b)
            + (a + b - 2) * torch.digamma(a + b)
            + np.log(2)
        )
        return each.sum(dim=1).mean()

    @staticmethod
    def kl(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats."""
        (a0, b0), (a1, b1) = old, new
        each = (
            _log_beta(a1, b1)
            - _log_beta(a0, b0)
            + (a0 - a1) * torch.digamma(a0)
            + (b0 - b1) * torch.digamma(b0)
            + (a1 - a0 + b1 - b0) * torch.digamma(a0 + b0)
        )
        return each.sum(dim=1)

    def log_prob(self, x: Array, draw: Array, mask: Any = None) -> Array:
        """Return the log-densities (N,) of draws (N, k) for inputs (N, inputs)."""
        with torch.no_grad():
            of = self.distribution(torch.from_numpy(x))
            return self.logp(of, torch.from_numpy(draw)).numpy()


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


Policy: TypeAlias = GaussianPolicy | CategoricalPolicy | BetaPolicy

Actions: TypeAlias = Literal["normal", "squashed", "beta"]
"""Distribution of continuous actions."""


def make_policy(
    inputs: Sequence[int],
    act: Space,
    hidden: Hidden,
    rng: np.random.Generator,
    log_std: float = 0.0,
    rows: int = 1,
    actions: Actions = "normal",
    state_std: bool = False,
    **layers: Any,
) -> Policy:
    """Return a policy for a space of actions: continuous for a box, categorical for choices.

    Its attribute `noise` says which random numbers it takes: make it the agent's `noise`.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        act: the space of actions.
        hidden: units of each hidden layer, or a network of your own.
        rng: draws the weights.
        log_std: initial log standard deviation of normal draws.
        rows: number of log-std parameters that are summed, see `GaussianPolicy`.
        actions: distribution of continuous actions.
        state_std: True if the network also gives the standard deviations of normal draws.
        layers: "activation", "layer_norm" and "columns" of the network, see `networks.network`.

    Raises:
        OptionError: if there is no such policy for this space.
    """
    if act.choices:
        if actions != "normal" or state_std:
            raise OptionError(
                f"actions here are choices, which have one distribution: got --actions {actions}"
                f"{' --state-std' if state_std else ''}; leave it out"
            )
        return CategoricalPolicy(inputs, act, hidden, rng, **layers)
    if actions == "beta":
        if state_std:
            raise OptionError("beta has no standard deviation: leave out --state-std")
        return BetaPolicy(inputs, act, hidden, rng, **layers)
    kind = StateStdPolicy if state_std else GaussianPolicy
    squash = actions == "squashed"
    return kind(inputs, act, hidden, rng, log_std, rows, squash, **layers)


class Mode(nn.Module):
    """A module from observations to a policy's most probable actions, for an agent's `mode`.

    Args:
        policy: takes normalized observations.
        norm: normalizes observations; None leaves them as they are.
    """

    def __init__(self, policy: Policy, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.policy, self.norm = policy, norm or nn.Identity()

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return actions (N, *act) for flattened observations (N, numbers), float32."""
        return self.policy.mode(self.norm(obs), mask)
