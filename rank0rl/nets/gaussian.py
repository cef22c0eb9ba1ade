"""Policies that draw independent normal numbers. A draw is an action; or its tanh is, scaled to the bounds.

Such squashed actions are a + b tanh(u), with u the draw. Ratios and divergences of the actions are those of
the draws, because tanh has an inverse. So all methods but `act`, `mode` and `entropy` are about draws.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Space
from rank0rl.batch import Batch
from rank0rl.nets.flat import Views, place
from rank0rl.nets.mlp import MLP
from rank0rl.nets.networks import Hidden, network
from rank0rl.options import OptionError

Array = npt.NDArray[Any]


class Bounds:
    """Scales numbers in 0..1 to actions within an environment's bounds.

    Args:
        space: the space of actions, a box.
        kind: the distribution that needs bounds, for the error.

    Raises:
        OptionError: if a bound is missing or infinite.
    """

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
        """Return the actions, (B, *shape), for shares of the range, (B, k)."""
        act = self._low + self._width * share
        return act.reshape(-1, *self._shape)

    def torch(self, share: Tensor) -> Tensor:
        """Do what `numpy` does, in torch."""
        act = torch.from_numpy(self._low) + torch.from_numpy(self._width) * share
        return act.reshape(-1, *self._shape)


_LOG_2PI = math.log(2 * math.pi)
_LOW, _HIGH = np.float32(-5), np.float32(2)  # of log standard deviations that a network gives
_NODES = 12  # the error of the quadrature is below 1e-4 nats for deviations up to 1, 2e-3 up to 1.5


@functools.cache
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of an average over normal numbers."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    at = torch.tensor(nodes, dtype=dtype, device=device)
    return at, torch.tensor(weights / weights.sum(), dtype=dtype, device=device)


class GaussianPolicy(nn.Module):
    """Independent normal draws. A network gives the means; the log standard deviations are parameters.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, a box.
        hidden: units of each hidden layer, or a network of one's own.
        rng: draws the weights.
        log_std: initial log standard deviation.
        rows: number of log-std parameters that are summed. Adam steps each of them, so the sum
            moves `rows` times as fast.
        squash: True if actions are the tanh of draws, scaled to the space's bounds.
        layers: "activation", "layer_norm" and "columns" of the network, see `networks.network`.

    Raises:
        OptionError: if squashed actions have no finite bounds.
    """

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
        self.bounds = Bounds(space, "squashed") if squash else None
        self.mlp = network(inputs, hidden, self._outputs(space.size), rng, 0.01, **layers)
        one = torch.full((space.size,), log_std)
        self.log_std = nn.Parameter(one if rows == 1 else one.repeat(rows, 1) / rows)
        self._views = Views(self._parameters)

    def act(
        self, x: Array, noise: Array, mask: Any = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Draw actions (B, *shape) with inputs (B, inputs) and noise (B, k). No row depends on B.

        Returns:
            Actions; and of squashed ones the draws, "draw", (B, k).
        """
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

        Of squashed actions it is that of tanh(u), in -1..1. It is no closed form but an integral by
        quadrature with 12 nodes, which serves autograd as well.
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

    def tables(self, theta: Tensor) -> tuple[Array, Array | None, Array | None]:
        """Return where the parameters lie in the flat vector theta, for kernels.

        Returns:
            The table of the network's layers; where the log standard deviations begin, how many are
            summed, and of how many actions; and None, as these are no choices.
        """
        assert isinstance(self.mlp, MLP)  # see `update.has_kernels`
        shape = self.log_std.shape if self.log_std.ndim == 2 else (1, *self.log_std.shape)
        return self.mlp.table(theta), np.array([place(self.log_std, theta), *shape]), None

    @staticmethod
    def _outputs(k: int) -> int:
        """Return the number of outputs of the network for k actions."""
        return k

    def _draw(self, out: Array, noise: Array) -> Array:
        """Return the draws (B, k) for outputs of the network and noise (B, k)."""
        out += np.exp(self._log_std()) * noise
        return out

    def _log_std(self) -> Array:
        [log_std] = self._views()
        return log_std if log_std.ndim == 1 else np.add.reduce(log_std)


class StateStdPolicy(GaussianPolicy):
    """Normal draws whose log standard deviations are outputs of the network too, within -5..2.

    The parameters `log_std` are added to these outputs.
    """

    def distribution(self, x: Tensor, mask: Any = None) -> tuple[Tensor, ...]:
        """Return means and log standard deviations, (N, k) each, for inputs (N, inputs)."""
        mean, more = self.mlp(x).chunk(2, dim=1)
        return mean, (self.log_std + more).clamp(float(_LOW), float(_HIGH))

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

    @staticmethod
    def _outputs(k: int) -> int:
        return 2 * k

    def _draw(self, out: Array, noise: Array) -> Array:
        mean, log_std = self._split(out)
        return mean + np.exp(log_std) * noise

    def _split(self, out: Array) -> tuple[Array, Array]:
        k = out.shape[-1] // 2
        log_std = np.minimum(np.maximum(self._log_std() + out[..., k:], _LOW), _HIGH)
        return out[..., :k], log_std
