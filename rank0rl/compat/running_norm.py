"""Running mean and variance over all ranks, for scripts that scale observations or rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.gather import all_accum_batches
from rank0rl.nets.normalize import Moments

Array = npt.NDArray[Any]

_MANY = (
    1 << 20
)  # bytes of rows that are counted at once: update by update takes several times as long


class RunningNorm:
    """Mean and variance of the rows that all ranks have seen before the last `merge`.

    Between two merges they stay as they are, so that all ranks scale alike, bit for bit. Before the
    first one they are 0 and 1. The names are those of the statistics in Gymnasium's wrappers
    (`obs_rms` and `return_rms`), whose place it can take.

    Args:
        shape: shape of one row.
    """

    def __init__(self, shape: Sequence[int] = ()) -> None:
        """Start with no rows."""
        self.moments = Moments(shape)
        """The statistics as a torch module: for `state_dict`, and for `rank0_bcast_wts`."""
        self._new = Moments(shape)
        self._rows: list[Array] = []
        self._bytes = 0

    @property
    def mean(self) -> Array:
        """Mean, (*shape), float64."""
        return self.moments.mean.numpy().copy()

    @property
    def var(self) -> Array:
        """Variance, (*shape), float64."""
        return self.moments.var.numpy().copy()

    @property
    def count(self) -> int:
        """Number of rows of all ranks."""
        return int(self.moments.count)

    def update(self, x: Array) -> None:
        """Note rows that this rank has seen. They count after the next `merge`.

        Args:
            x: rows, (N, *shape).

        Raises:
            ValueError: if x has another shape.
        """
        rows = np.array(x)  # a copy: environments may return the same memory again
        shape = tuple(self.moments.mean.shape)
        if rows.ndim == 0 or rows.shape[1:] != shape:
            raise ValueError(f"rows must have the shape (N, *{shape}): got {rows.shape}")
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _MANY:
            self._count()

    def merge(self, *others: RunningNorm) -> None:
        """Add the rows that all ranks have noted, in rank order. Call it once per iteration.

        Collective: every rank calls this, in the same order.

        Args:
            others: more statistics, each of which gets its own rows, by the same messages.

        Raises:
            ValueError: the same on every rank, if the ranks pass other numbers or shapes.
        """
        norms = (self, *others)
        noted = {str(i): norm._as_rows() for i, norm in enumerate(norms)}
        for norm, groups in zip(norms, all_accum_batches(noted).values(), strict=True):
            for count, mean, var in zip(*groups.values(), strict=True):
                if count:
                    norm.moments.add(count, np.asarray(mean), np.asarray(var))
            norm._new = Moments(norm.mean.shape)

    def scale(self, x: Array) -> Array:
        """Return x, (..., *shape), as (x - mean) / std, float32, limited to +-10."""
        std = np.sqrt(self.var + 1e-8)  # 1e-8: some inputs never change
        return np.clip((x - self.mean) / std, -10, 10).astype(np.float32)

    def _count(self) -> None:
        """Add the rows of the last updates to the new statistics."""
        if self._bytes:
            self._new.merge(np.concatenate(self._rows))
        self._rows, self._bytes = [], 0

    def _as_rows(self) -> dict[str, Array]:
        """Return the new count, mean and variance as one row each."""
        self._count()
        new = self._new
        return {"count": new.count.numpy()[None], "mean": new.mean.numpy()[None]} | {
            "var": new.var.numpy()[None]
        }
