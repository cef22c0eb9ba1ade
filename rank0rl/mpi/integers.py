"""Sums and products of 64-bit integers over ranks: exact, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.errors import agreed

Array = npt.NDArray[Any]

_LOW = (1 << 32) - 1
_NEAR = 1 - 1e-12  # a product so near a limit may be beyond it, because it is computed in float64


def halves(x: Array) -> Array:
    """Return the upper and the lower 32 bits of 64-bit integers, (2, *shape), int64.

    Sums of either half over less than 2^31 ranks are exact.
    """
    return np.stack([x >> 32, x & _LOW]).astype(np.int64)


def whole(sums: Array, dtype: np.dtype[Any], what: str) -> Array:
    """Return the integers whose halves have these sums, (2, *shape).

    Args:
        sums: sums of `halves`, the same on every rank.
        dtype: int64 or uint64.
        what: name of the collective, for the error message.

    Raises:
        OverflowError: the same on every rank, if one does not fit the dtype.
    """
    high, low = sums[0] + (sums[1] >> 32), sums[1] & _LOW
    limits = np.iinfo(dtype)
    if high.size and (high.min() < limits.min >> 32 or high.max() > limits.max >> 32):
        raise _overflow(high.astype(np.float64) * 2.0**32, what)
    return np.asarray((high.astype(dtype) << 32) | low.astype(dtype))


def check_products(rough: Array, dtype: np.dtype[Any], what: str) -> None:
    """Raise OverflowError if products, computed in float64, do not fit the dtype, or may not."""
    limits = np.iinfo(dtype)
    low, high = _NEAR * limits.min, _NEAR * limits.max
    if rough.size and ((rough.min() <= low < 0) or rough.max() >= high):
        raise _overflow(rough, what)


def _overflow(rough: Array, what: str) -> OverflowError:
    return agreed(
        OverflowError(
            f"{what}: a result does not fit 64 bits: {rough.min():g} to {rough.max():g}; pass floats"
        )
    )
