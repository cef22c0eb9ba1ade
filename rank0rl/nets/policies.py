"""Policies: drawing actions, their probabilities, and the distance of two policies.

Each works over one memory in two ways, as `mlp.MLP` does: in torch, where autograd takes the
gradient of any loss, and in NumPy, for acting. The constructors take what `make_policy` takes.

Where `act` returns "draw" besides the actions, all methods but `act`, `mode` and `entropy` are about draws.
Squashed actions are a + b tanh(u), with u the draw. Ratios and divergences of the actions are those of the
draws, because tanh has an inverse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import NEVER, Space, choose
from rank0rl.batch import Batch
from rank0rl.nets.flat import Views
from rank0rl.nets.hybrid import HybridPolicy
from rank0rl.nets.networks import Hidden, Inputs, network
from rank0rl.options import OptionError

Array = npt.NDArray[Any]

_LOG_2PI = math.log(2 * math.pi)
_NODES = 12  # the error of the quadrature is below 1e-4 nats for deviations up to 1, 2e-3 up to 1.5
_EDGE = np.float32(1e-6)  # draws stay this far from 0 and 1, where the log-density is infinite


class GaussianPolicy(nn.Module):
    """Independent normal draws. A network gives the means; the log standard deviations are parameters.

    With `squash`, actions are the tanh of draws, scaled to the space's bounds.
    """

    _each = 1  # outputs of the network for an action

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Hidden,
        rng: np.random.Generator,
        log_std: float = 0.0,
        rows: int = 1,
        squash: bool = False,
        **layers: Any,
    ) -> None:
        super().__init__()
        self.noise = ("normal", space.size)
        self.shape = space.shape
        self.bounds = _Bounds(space, "squashed") if squash else None
        self.mlp = network(inputs, hidden, self._each * space.size, rng, 0.01, **layers)
        one = torch.full((space.size,), log_std)
        self.log_std = nn.Parameter(one if rows == 1 else one.repeat(rows, 1) / rows)
        self._views = Views(self._parameters)

    def act(
        self, x: Array, noise: Array, mask: Any = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Return actions (B, *shape) for inputs (B, inputs) and noise (B, k). No row depends on B."""
        draw = self._draw(self.mlp.numpy(x[:, None, :])[:, 0], noise)
        if self.bounds is None:
            return draw.reshape(-1, *self.shape), {}
        return self.bounds.numpy(0.5 * np.tanh(draw) + np.float32(0.5)), {"draw": draw}

    def distribution(self, x: Tensor, mask: Any = None) -> tuple[Tensor, ...]:
        """Return means (N, k) for inputs (N, inputs), and log standard deviations (k,)."""
        log_std = self.log_std.clone() if self.log_std.ndim == 1 else self.log_std.sum(dim=0)
        return self.mlp(x), log_std

    def mode(self, x: Tensor, mask: Any = None) -> Tensor:
        """Return the actions (N, *shape) of the means, for inputs (N, inputs)."""
        mean, _ = self.distribution(x)
        if self.bounds is None:
            return mean.reshape(-1, *self.shape)
        return self.bounds.torch(0.5 * torch.tanh(mean) + 0.5)

    def logp(self, of: tuple[Tensor, ...], draw: Tensor) -> Tensor:
        """Return the log-densities (N,) of draws (N, *shape)."""
        mean, log_std = of
        z = (draw.reshape(len(draw), -1) - mean) * torch.exp(-log_std)
        return -0.5 * z.square().sum(dim=1) - log_std.sum() - 0.5 * _LOG_2PI * len(log_std)

    def entropy(self, of: tuple[Tensor, ...]) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats.

        Of squashed actions it is that of tanh(u), in -1..1: an integral by quadrature with 12 nodes.
        Its error grows with the standard deviation: 0.002 at 1.5, 0.04 at 3, 0.3 at 7.
        """
        mean, log_std = of
        entropy = log_std.sum(dim=-1).mean() + 0.5 * (_LOG_2PI + 1) * log_std.shape[-1]
        if self.bounds is None:
            return entropy
        at, weight = _quadrature(mean.dtype, mean.device)
        u = mean[..., None] + torch.exp(log_std)[..., None] * at
        log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # log (1 - tanh(u)^2)
        return entropy + (log_slope @ weight).sum(dim=1).mean()

    def kl(self, old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats."""
        (mean0, log_std0), (mean1, log_std1) = old, new
        spread = torch.exp(2 * (log_std0 - log_std1))
        z = (mean1 - mean0) * torch.exp(-log_std1)
        return (0.5 * (spread + z.square() - 1) + log_std1 - log_std0).sum(dim=1)

    def log_prob(self, x: Array, draw: Array, mask: Any = None) -> Array:
        """Return the log-densities (N,) of draws (N, *shape) for inputs (N, inputs), in NumPy."""
        log_std = self._log_std()
        z = draw.reshape(len(draw), -1) - self.mlp.numpy(x)
        z *= np.exp(-log_std)
        z *= z
        logp = np.add.reduce(z, axis=1)
        logp *= -0.5
        logp -= np.add.reduce(log_std).item() + 0.5 * _LOG_2PI * len(log_std)
        return logp

    def _draw(self, out: Array, noise: Array) -> Array:
        """Return the draws (B, k) for outputs of the network and noise (B, k)."""
        out += np.exp(self._log_std()) * noise
        return out

    def _log_std(self) -> Array:
        [log_std] = self._views()
        return log_std if log_std.ndim == 1 else np.add.reduce(log_std)


class StateStdPolicy(GaussianPolicy):
    """Normal draws whose log standard deviations are outputs of the network too, within limits.

    The parameters `log_std` are added to these outputs.
    """

    limits = np.float32(-5), np.float32(2)
    _each = 2

    def distribution(self, x: Tensor, mask: Any = None) -> tuple[Tensor, ...]:
        """Return means and log standard deviations, (N, k) each, for inputs (N, inputs)."""
        out, log_std = super().distribution(x)
        mean, more = out.chunk(2, dim=1)
        return mean, (log_std + more).clamp(*map(float, self.limits))

    def logp(self, of: tuple[Tensor, ...], draw: Tensor) -> Tensor:
        """Return the log-densities (N,) of draws (N, *shape)."""
        mean, log_std = of
        z = (draw.reshape(len(draw), -1) - mean) * torch.exp(-log_std)
        return -(0.5 * z.square() + log_std + 0.5 * _LOG_2PI).sum(dim=1)

    def log_prob(self, x: Array, draw: Array, mask: Any = None) -> Array:
        """Return the log-densities (N,) of draws (N, *shape) for inputs (N, inputs), in NumPy."""
        mean, log_std = self._split(self.mlp.numpy(x))
        z = (draw.reshape(len(draw), -1) - mean) * np.exp(-log_std)
        return -(0.5 * z * z + log_std + np.float32(0.5 * _LOG_2PI)).sum(axis=1)

    def _draw(self, out: Array, noise: Array) -> Array:
        mean, log_std = self._split(out)
        return mean + np.exp(log_std) * noise

    def _split(self, out: Array) -> tuple[Array, Array]:
        k = out.shape[-1] // 2
        low, high = self.limits
        return out[..., :k], np.minimum(np.maximum(self._log_std() + out[..., k:], low), high)


class CategoricalPolicy(nn.Module):
    """One of n choices, or several such choices at once, independent of each other.

    The probabilities are the softmax of a network's output, 0 where a mask (N, all choices) is False.
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
        """Draw choices (B, *shape), int64, as `choose`, from inputs (B, inputs) and noise (B, k)."""
        return choose(self.mlp.numpy(x[:, None, :])[:, 0], noise, self.space, mask, explore), {}

    def distribution(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return log-probabilities for inputs (N, inputs): (N, n) for each of the choices at once."""
        logits = self.mlp(x)
        if mask is not None:
            logits = logits.masked_fill(~mask, NEVER)
        return tuple(torch.log_softmax(logits[:, columns], dim=1) for columns in self._choices)

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

    What follows from a and b is computed in float64, because large terms nearly cancel.

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
        self.bounds = _Bounds(space, "beta")
        self.mlp = network(inputs, hidden, 2 * space.size, rng, 0.01, **layers)

    def act(
        self, x: Array, noise: Array, mask: Any = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Return actions (B, *shape) for inputs (B, inputs) and noise (B, k). No row depends on B.

        The normal distribution function maps the noise to 0..1, and the inverse of Beta's maps that to the
        draws. So noise 0 gives the median.
        """
        # in float32, what follows differs by the version of the C library
        out = self.mlp.numpy(x[:, None, :])[:, 0].astype(np.float64)
        a, b = np.split(1 + np.logaddexp(out, 0), 2, axis=1)
        above = noise > 0  # as 1 - Beta(b, a), whose tail float32 can tell from 0
        a, b = np.where(above, b, a), np.where(above, a, b)
        draw = self._inverse(a, b, self._ndtr(-abs(noise)))
        draw = np.where(above, 1 - draw, draw)
        draw = np.minimum(np.maximum(draw, _EDGE), 1 - _EDGE).astype(x.dtype)
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
        a, b, x = of[0].double(), of[1].double(), draw.double()
        logs = (a - 1) * torch.log(x) + (b - 1) * torch.log1p(-x)
        return (logs - _log_beta(a, b)).sum(dim=1).to(of[0].dtype)

    @staticmethod
    def entropy(of: tuple[Tensor, ...]) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats, of the draws scaled to -1..1."""
        a, b = of[0].double(), of[1].double()
        each = (
            _log_beta(a, b)
            - (a - 1) * torch.digamma(a)
            - (b - 1) * torch.digamma(b)
            + (a + b - 2) * torch.digamma(a + b)
            + np.log(2)
        )
        return each.sum(dim=1).mean().to(of[0].dtype)

    @staticmethod
    def kl(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats."""
        a0, b0, a1, b1 = (x.double() for x in (*old, *new))
        each = (
            _log_beta(a1, b1)
            - _log_beta(a0, b0)
            + (a0 - a1) * torch.digamma(a0)
            + (b0 - b1) * torch.digamma(b0)
            + (a1 - a0 + b1 - b0) * torch.digamma(a0 + b0)
        )
        return each.sum(dim=1).to(new[0].dtype)

    def log_prob(self, x: Array, draw: Array, mask: Any = None) -> Array:
        """Return the log-densities (N,) of draws (N, k) for inputs (N, inputs)."""
        with torch.no_grad():
            of = self.distribution(torch.from_numpy(x))
            return self.logp(of, torch.from_numpy(draw)).numpy()


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


Policy: TypeAlias = GaussianPolicy | CategoricalPolicy | BetaPolicy | HybridPolicy

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
    """Return a policy for a space of actions: continuous for a box, categorical for choices, or both.

    Its attribute `noise` says which random numbers it takes: make it the agent's `noise`.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        act: the space of actions.
        hidden: units of each hidden layer, or a network of your own.
        rng: draws the weights.
        log_std: initial log standard deviation of normal draws.
        rows: number of log-std parameters that are summed. Adam steps each of them, so the sum
            moves `rows` times as fast.
        actions: distribution of continuous actions.
        state_std: True if the network also gives the standard deviations of normal draws.
        layers: "activation", "layer_norm" and "columns" of the network, see `networks.network`.

    Raises:
        OptionError: if there is no such policy for this space.
    """
    if act.kind == "hybrid":
        first, numbers = act.halves()
        outputs = numbers.size * (2 if state_std or actions == "beta" else 1)
        net = network(inputs, hidden, first.size + outputs, rng, 0.01, **layers)
        draws: Any = make_policy((), numbers, Inputs(), rng, log_std, rows, actions, state_std)
        return HybridPolicy(net, CategoricalPolicy((), first, Inputs(), rng), draws)
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


def built_in(policy: Any) -> Any:
    """Return the class of this module whose methods a policy has; None if it changes one, or has no such class."""
    classes = type(policy).__mro__
    for i, kind in enumerate(classes):
        if kind in (GaussianPolicy, StateStdPolicy, CategoricalPolicy, BetaPolicy):
            names = {name for each in (policy, *classes[:i]) for name in vars(each)}
            changed = (callable(getattr(kind, name, None)) for name in names - {*vars(nn.Module)})
            return None if any(changed) else kind
    return None


class Mode(nn.Module):
    """A module from observations to a policy's most probable actions, for an agent's `mode`."""

    def __init__(self, policy: Policy, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.policy, self.norm = policy, norm or nn.Identity()

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return actions (N, *act) for flattened observations (N, numbers), float32."""
        return self.policy.mode(self.norm(obs), mask)


class _Bounds:
    """Scales numbers in 0..1 to actions within an environment's bounds, which must be finite."""

    def __init__(self, space: Space, kind: str) -> None:
        low, high = space.low, space.high
        with np.errstate(over="ignore", invalid="ignore"):
            width = None if low is None or high is None else high - low
        if low is None or high is None or width is None or not np.isfinite(width).all():
            raise OptionError(
                f"actions {kind!r} need finite bounds: this environment's are from {low} to {high}; "
                f"set --actions normal, or wrap it in RescaleAction or ClipAction"
            )
        self._shape = space.shape
        self._low = low.reshape(-1).astype(np.float32)
        self._width = high.reshape(-1).astype(np.float32) - self._low

    def numpy(self, share: Array) -> Array:
        act = self._low + self._width * share
        return act.reshape(-1, *self._shape)

    def torch(self, share: Tensor) -> Tensor:
        act = torch.from_numpy(self._low) + torch.from_numpy(self._width) * share
        return act.reshape(-1, *self._shape)


@functools.cache
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of an average over normal numbers."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    at = torch.tensor(nodes, dtype=dtype, device=device)
    return at, torch.tensor(weights / weights.sum(), dtype=dtype, device=device)
