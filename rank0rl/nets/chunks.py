"""Cut steps into chunks, rows of a batch for networks that learn from several steps in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.batch import Batch

Array = npt.NDArray[Any]


def chunked(steps: Batch, episodes: Sequence[slice], length: int) -> Batch:
    """Cut steps into chunks, none of which goes beyond the end of an episode.

    Args:
        steps: arrays of T steps, name -> (T, ...).
        episodes: the steps of each episode, as `Fragment.episodes` returns them.
        length: L, steps of a chunk at most.

    Returns:
        The arrays, (chunks, L, ...), with zeros where a chunk has fewer steps; and "steps", the
        number that it has, (chunks,), int64.
    """
    starts = [start for e in episodes for start in range(e.start, e.stop, length)]
    ends = [
        min(start + length, e.stop) for e in episodes for start in range(e.start, e.stop, length)
    ]
    counts = np.subtract(ends, starts)
    chunks = {}
    for name, array in steps.items():
        chunks[name] = np.zeros((len(starts), length, *array.shape[1:]), array.dtype)
        chunks[name][filled(counts, length)] = array
    return {**chunks, "steps": counts.astype(np.int64)}


def filled(counts: Array, length: int) -> Array:
    """Return True where a chunk has a step, (chunks, L), for the steps of each chunk, (chunks,)."""
    return np.arange(length) < counts[:, None]  # type: ignore[no-any-return]


def firsts(steps: Array, episodes: Sequence[slice], length: int) -> Array:
    """Return the row of the first step of each chunk, (chunks, ...), of an array (T, ...)."""
    return steps[[start for e in episodes for start in range(e.start, e.stop, length)]]
