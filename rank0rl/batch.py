"""Dicts of arrays with rows along the first axis: check, concatenate, take, minibatches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Batch = dict[str, Array]


def count(batch: Mapping[str, Array]) -> int:
    """Number of rows, N.

    Raises:
        ValueError: if the arrays do not all have the same number of rows.
    """
    rows = {name: len(array) for name, array in batch.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"all arrays of a batch must have the same number of rows: got {rows}")
    return next(iter(rows.values()), 0)


def concatenate(batches: Sequence[Mapping[str, Array]]) -> Batch:
    """One batch of the rows of all, in order.

    Raises:
        ValueError: if the batches do not have the same names.
    """
    for batch in batches:
        if batch.keys() != batches[0].keys():
            raise ValueError(
                f"batches must have the same names: got {sorted(batches[0])} and {sorted(batch)}"
            )
    return {
        name: np.ascontiguousarray(np.concatenate([batch[name] for batch in batches]))
        for name in (batches[0] if batches else ())
    }


def take(batch: Mapping[str, Array], index: Array) -> Batch:
    """The rows that an index array or a mask picks, of every array."""
    return {name: array[index] for name, array in batch.items()}


def in_order(batch: Batch, key: Array) -> Batch:
    """The rows sorted by key, shape (N,); equal keys keep their order. The same dict if already sorted."""
    if (key[1:] >= key[:-1]).all():
        return batch
    return take(batch, np.argsort(key, kind="stable"))


def sha256(batch: Mapping[str, Array]) -> str:
    """Hash of names, dtypes, shapes and bytes, whatever the order of the names."""
    digest = hashlib.sha256()
    for name, array in sorted(batch.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        if array.size:  # no view of the bytes of nothing
            digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def minibatches(batch: Mapping[str, Array], size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """One epoch in random order, in parts of `size` rows; the last takes what is left.

    Rows are moved once an epoch; the parts are views of them.
    """
    rows = count(batch)
    shuffled = take(batch, rng.permutation(rows))
    for start in range(0, rows, size):
        yield {name: array[start : start + size] for name, array in shuffled.items()}
