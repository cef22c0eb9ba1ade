"""Mean, standard deviation and extremes of samples that are spread over ranks."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from rank0rl.mpi.comm import Comm
from rank0rl.mpi.errors import attempt, collective
from rank0rl.mpi.layout import exchange
from rank0rl.mpi.values import as_value, check_numbers

# Number of samples, sum, sum of squared deviations from their mean, least, largest.
_OF_RANK = struct.Struct("5d")


@dataclass(frozen=True)
class Statistics:
    """Statistics of samples that are spread over ranks."""

    mean: float
    std: float
    """Standard deviation of the samples themselves: the sum of squares divided by their number."""
    min: float
    max: float
    count: int


@collective
def statistics(x: Any, comm: Comm | None = None) -> Statistics:
    """Return mean, standard deviation and extremes of all samples of all ranks, in float64.

    Collective: every rank calls this, in the same order.

    Args:
        x: this rank's samples, any number of them: an array, tensor, list or number.
        comm: the ranks; all of the job by default.

    Returns:
        The same on every rank. Without any samples nan, with inf and -inf as extremes.

    Raises:
        ValueError: the same on every rank, if one passes anything but real numbers.
    """
    here, problem = attempt(lambda: _of_rank(x), b"")
    each = exchange({}, "statistics", here, problem, comm=comm)
    counts, totals, squared, lows, highs = np.array([_OF_RANK.unpack(part) for part in each]).T
    count = counts.sum()
    if not count:
        return Statistics(float("nan"), float("nan"), float("inf"), float("-inf"), 0)
    mean = totals.sum() / count
    between = counts * np.square(totals / np.maximum(counts, 1) - mean)
    variance = (squared + between).sum() / count
    return Statistics(
        float(mean), float(variance**0.5), float(lows.min()), float(highs.max()), int(count)
    )


def _of_rank(x: Any) -> bytes:
    """Return what the statistics need of this rank's samples."""
    array = as_value(x).array
    check_numbers(array, "max")
    samples = array.astype(np.float64).reshape(-1)
    n, total = samples.size, samples.sum()
    squares = np.square(samples - total / max(1, n)).sum()
    return _OF_RANK.pack(
        n, total, squares, samples.min(initial=np.inf), samples.max(initial=-np.inf)
    )
