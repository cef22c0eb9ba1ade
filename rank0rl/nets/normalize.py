"""Running mean and variance, and the normalizers that scale observations for a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.nets.flat import Views

Array = npt.NDArray[Any]


class Moments(nn.Module):
    """Running mean and variance of rows of a shape, in float64. They are 0 and 1 before the first row."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def merge(self, rows: Array) -> None:
        """Add rows, (N, *shape)."""
        mean = np.asarray(rows.mean(axis=0, dtype=np.float64))
        self.add(len(rows), mean, np.asarray(rows.var(axis=0, dtype=np.float64)))

    def add(self, n: int, of_mean: Array, of_var: Array) -> None:
        """Add n rows with this mean and variance, (*shape) each.

        Source: Chan, Golub and LeVeque 1983, eq. 1.5.
        """
        mean, var, before = torch.from_numpy(of_mean), torch.from_numpy(of_var), self.count.item()
        delta, total = mean - self.mean, before + n
        squares = self.var * before + var * n + delta**2 * (before * n / total)
        self.mean += delta * (n / total)
        self.var.copy_(squares / total)
        self.count += n


class ObsNormalizer(nn.Module):
    """Flattened observations, (obs - mean) / std, limited to +-10.

    Rank 0 calls `merge` after the last gradient step: an iteration acts, evaluates and learns with
    the statistics that were broadcast before it.

    A coarse one divides by 3 (std + 0.1) instead. That brings most numbers within +-1, and those that
    hardly vary closer to 0.
    """

    shift: Tensor
    scale: Tensor
    limit = 10.0

    def __init__(self, shape: Sequence[int], coarse: bool = False) -> None:
        super().__init__()
        self._coarse = coarse
        size = math.prod(shape)
        self.moments = Moments((size,))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self._views = Views(self._buffers)

    def forward(self, obs: Tensor) -> Tensor:
        """Scale observations (N, *shape) to (N, size), float32."""
        flat = obs.reshape(obs.shape[0], -1)  # len is a constant to torch.export
        shift = self.moments.mean if obs.dtype == torch.float64 else self.shift
        return ((flat - shift).to(self.scale.dtype) * self.scale).clamp_(-self.limit, self.limit)

    def numpy(self, obs: Array) -> Array:
        """Scale observations as `forward` does, in NumPy."""
        shift, scale = self._views()
        if obs.dtype == np.float64:  # rounded when the mean is gone, not before
            x = (obs.reshape(len(obs), -1) - self.moments.mean.numpy()).astype(np.float32)
        else:
            x = obs.reshape(len(obs), -1).astype(np.float32, copy=False) - shift
        x *= scale
        np.minimum(x, self.limit, out=x)  # half the time of np.clip
        np.maximum(x, -self.limit, out=x)
        return x

    def part(self, columns: Sequence[slice]) -> ObsNormalizer:
        """Return a copy for some columns of observations."""
        index = np.concatenate([np.arange(some.start, some.stop) for some in columns])
        copy = ObsNormalizer((len(index),), self._coarse)
        copy.shift.copy_(self.shift[index])
        copy.moments.mean.copy_(self.moments.mean[index])  # for float64
        copy.scale.copy_(self.scale[index])
        return copy

    def merge(self, obs: Array) -> None:
        """Add the observations of a batch, (N, *shape), to the statistics.

        Rank 0 only: its statistics are broadcast.
        """
        self.moments.merge(obs.reshape(len(obs), -1))
        self._follow()

    def forget(self) -> None:
        """Forget all observations: the next ones count as the first. Rank 0 only."""
        self.moments.count.zero_()

    def merge_groups(self, count: Array, mean: Array, var: Array) -> None:
        """Add E groups of observations, from their counts, (E,), means and variances, (E, size)."""
        total, share = int(count.sum()), (count / count.sum())[:, None]
        of_all = (share * mean).sum(axis=0)
        self.moments.add(total, of_all, (share * (var + np.square(mean - of_all))).sum(axis=0))
        self._follow()

    def _follow(self) -> None:
        """Compute shift and scale from the statistics."""
        self.shift.copy_(self.moments.mean)
        if self._coarse:
            self.scale.copy_(1 / (3 * (torch.sqrt(self.moments.var) + 0.1)))
        else:
            self.scale.copy_(1 / torch.sqrt(self.moments.var + 1e-8))  # 1e-8: some never change


class _Bytes(nn.Module):
    """Flattened images, as bytes: the counterpart of `ObsNormalizer`. Networks scale them to 0..1."""

    def forward(self, obs: Tensor) -> Tensor:
        return obs.reshape(obs.shape[0], -1)

    def numpy(self, obs: Array) -> Array:
        return obs.reshape(len(obs), -1)

    def merge(self, obs: Array) -> None:
        """Do nothing: the scale is fixed."""

    def forget(self) -> None:
        """Do nothing: the scale is fixed."""


Normalizer: TypeAlias = ObsNormalizer | _Bytes


def is_image(shape: Sequence[int], dtype: str) -> bool:
    """Return True if observations are images: bytes with two sides, and channels or frames before or behind them."""
    if dtype != "uint8" or len(shape) != 3:
        return False
    return sorted(shape)[1] >= 8 and min(shape) in (shape[0], shape[2])


def normalizer(
    shape: Sequence[int], dtype: str, coarse: bool = False
) -> tuple[Normalizer, tuple[int, ...]]:
    """Return a normalizer for observations, and the shape of a network's inputs behind it."""
    if is_image(shape, dtype):
        return _Bytes(), tuple(shape)
    return ObsNormalizer(shape, coarse), (math.prod(shape),)
