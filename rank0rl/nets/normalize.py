"""Running moments, and what scales observations before they enter a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.nets.conv import is_image
from rank0rl.nets.mlp import View

Array = npt.NDArray[Any]


class Moments(nn.Module):
    """Running mean and variance of rows, in float64: 0 and 1 before the first row.

    Args:
        shape: of one row.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        """Begin with no rows."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def merge(self, rows: Array) -> None:
        """Add rows, (N, *shape).

        Source: Chan, Golub and LeVeque 1983, eq. 1.5.
        """
        n, old = len(rows), self.count.item()
        mean = torch.from_numpy(np.asarray(rows.mean(axis=0, dtype=np.float64)))
        var = torch.from_numpy(np.asarray(rows.var(axis=0, dtype=np.float64)))
        delta, total = mean - self.mean, old + n
        squares = self.var * old + var * n + delta**2 * (old * n / total)
        self.mean += delta * (n / total)
        self.var.copy_(squares / total)
        self.count += n


class ObsNormalizer(nn.Module):
    """(obs - mean) / std, limited to +-10. It flattens observations.

    `merge` is for rank 0, after the last gradient step: an iteration acts, evaluates and learns
    with the statistics that were broadcast before it.

    Args:
        shape: of an observation.
        coarse: divide by 3 (std + 0.1) instead, which takes most of them to +-1, and those that
            hardly vary to less.
    """

    shift: Tensor
    scale: Tensor
    limit = 10.0

    def __init__(self, shape: Sequence[int], coarse: bool = False) -> None:
        """Begin with mean 0 and variance 1."""
        super().__init__()
        self._coarse = coarse
        size = math.prod(shape)
        self.moments = Moments((size,))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self._views = View(self._buffers, "shift"), View(self._buffers, "scale")

    def forward(self, obs: Tensor) -> Tensor:
        """(N, *shape) -> (N, size), float32."""
        flat = obs.reshape(obs.shape[0], -1)  # len is a constant to torch.export
        return ((flat - self.shift) * self.scale).clamp_(-self.limit, self.limit)

    def numpy(self, obs: Array) -> Array:
        """The same on NumPy arrays."""
        shift, scale = self._views
        if obs.dtype != np.float32:  # integers would make numbers of double precision
            obs = obs.astype(np.float32)
        x = obs.reshape(len(obs), -1) - shift()
        x *= scale()
        np.minimum(x, self.limit, out=x)  # half the time of np.clip
        np.maximum(x, -self.limit, out=x)
        return x  # type: ignore[no-any-return]

    def merge(self, obs: Array) -> None:
        """Add the observations of a batch, (N, *shape)."""
        self.moments.merge(obs.reshape(len(obs), -1))
        self.shift.copy_(self.moments.mean)
        if self._coarse:
            self.scale.copy_(1 / (3 * (torch.sqrt(self.moments.var) + 0.1)))
        else:
            self.scale.copy_(1 / torch.sqrt(self.moments.var + 1e-8))  # 1e-8: some never change


class PixelScale(nn.Module):
    """Bytes to numbers from 0 to 1, flattened: in the place of `ObsNormalizer`, for images."""

    def forward(self, obs: Tensor) -> Tensor:
        """(N, *shape) -> (N, size), float32."""
        return obs.reshape(obs.shape[0], -1) * (1 / 255)

    def numpy(self, obs: Array) -> Array:
        """The same on NumPy arrays."""
        return obs.reshape(len(obs), -1) * np.float32(1 / 255)  # type: ignore[no-any-return]

    def merge(self, obs: Array) -> None:
        """There is nothing to learn."""


def normalizer(
    shape: Sequence[int], dtype: str, coarse: bool = False
) -> tuple[ObsNormalizer | PixelScale, tuple[int, ...]]:
    """What scales observations of this shape and type, and the shape of inputs for networks."""
    if is_image(shape, dtype):
        return PixelScale(), tuple(shape)
    return ObsNormalizer(shape, coarse), (math.prod(shape),)
