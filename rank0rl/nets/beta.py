"""A policy with Beta distributions: every draw lies within the bounds of the actions.

Source: Chou et al. 2017, proceedings.mlr.press/v70/chou17a (a and b above 1, by softplus).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Space
from rank0rl.batch import Batch
from rank0rl.nets.conv import Hidden, network
from rank0rl.nets.gaussian import Bounds

Array = npt.NDArray[Any]

_EDGE = np.float32(1e-6)  # draws stay this far from 0 and 1, where the log-density is infinite


class BetaPolicy(nn.Module):
    """Independent draws in 0..1 from Beta(a, b), scaled to the bounds. A network gives a and b, both above 1.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, a box.
        hidden: units of each hidden layer, or a network of one's own.
        rng: draws the weights.
        layers: "activation", "layer_norm" and "columns" of the network, see `conv.network`.

    Raises:
        OptionError: if the actions have no finite bounds.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Hidden,
        rng: np.random.Generator,
        **layers: Any,
    ) -> None:
        """Draw the weights."""
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

        The noise is taken to 0..1 by the normal distribution function, and to the draws by the
        inverse of Beta's. So noise 0 gives the median.

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
