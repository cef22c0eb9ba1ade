"""Dicts of arrays with rows along the first axis: collect, check, concatenate, order, minibatches, replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Batch = dict[str, Array]


def count(batch: Mapping[str, Array]) -> int:
    """Return the number of rows, N.

    Raises:
        ValueError: if the arrays do not all have the same number of rows.
    """
    rows = {name: len(array) for name, array in batch.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"all arrays of a batch must have the same number of rows: got {rows}")
    return next(iter(rows.values()), 0)


def concatenate(batches: Sequence[Mapping[str, Array]]) -> Batch:
    """Return one batch with the rows of all batches, in order.

    Raises:
        ValueError: if the batches do not have the same names and dtypes.
    """
    kinds = [_kind(batch) for batch in batches]
    for kind in kinds:
        if kind != kinds[0]:
            raise ValueError(
                f"batches must have the same names, dtypes and shapes: got {kinds[0]} and {kind}"
            )
    return {
        name: np.ascontiguousarray(np.concatenate([batch[name] for batch in batches]))
        for name in (batches[0] if batches else ())
    }


def take(batch: Mapping[str, Array], index: Array) -> Batch:
    """Return the rows of every array that an index array or a boolean mask picks."""
    rows = np.flatnonzero(index) if index.dtype == bool else index
    return {
        name: array.take(rows, axis=0) if isinstance(array, np.ndarray) else array[rows]
        for name, array in batch.items()  # which takes a quarter of the time of array[rows]
    }


def in_order(batch: Batch, key: Array) -> Batch:
    """Return the rows sorted by key, (N,); equal keys keep their order. A sorted batch is returned as it is."""
    if (key[1:] >= key[:-1]).all():
        return batch
    return take(batch, np.argsort(key, kind="stable"))


def minibatches(batch: Mapping[str, Array], size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield one epoch in random order, in minibatches of `size` rows; the last takes what is left.

    Rows are moved once an epoch; minibatches are views of them.
    """
    rows = count(batch)
    shuffled = take(batch, rng.permutation(rows))
    for start in range(0, rows, size):
        yield {name: array[start : start + size] for name, array in shuffled.items()}


class Buffer:
    """Rows of several envs while these collect them: name -> (envs, capacity, ...).

    Args:
        envs: number of envs.
        capacity: steps per env that there is room for at first.
    """

    def __init__(self, envs: int, capacity: int) -> None:
        """Begin without names."""
        self.rows: Batch = {}
        self._envs, self._capacity = envs, capacity

    def write(self, at: Any, /, **values: Array) -> None:
        """Write values at [at] = [rows, steps]; a new name gets its array by its first values."""
        for name, value in values.items():
            if name not in self.rows:
                shape = (self._envs, self._capacity, *value.shape[1:])
                self.rows[name] = np.empty(shape, value.dtype)
            if value.dtype != self.rows[name].dtype:
                raise ValueError(
                    f"{name!r} must have one dtype in all steps: got {value.dtype} after {self.rows[name].dtype}"
                )
            self.rows[name][at] = value

    def reserve(self, steps: int) -> None:
        """Make room for so many steps per env."""
        if steps > self._capacity:
            self._capacity *= 2
            for name, rows in self.rows.items():
                self.rows[name] = np.concatenate([rows, np.empty_like(rows)], axis=1)


class Replay:
    """The last rows of all batches, for an agent that learns from rows more than once: a part of its `state`.

    However large it is, iterations copy nothing of it, and a checkpoint writes only the rows that have come since the last one.

    Args:
        capacity: number of rows; later ones take the place of the first ones.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.added = 0
        """Number of rows that were added so far."""
        self.parts: list[dict[str, Any]] = []
        """Files of the run with these rows, as checkpoints list them."""
        self._rows: Batch = {}
        self._size = 0  # rows that there is room for
        self._boundary = 0  # `added` at the last iteration's end

    def __len__(self) -> int:
        """Return the number of rows to sample from."""
        return min(self.added, self.capacity)

    def add(self, rows: Mapping[str, Array]) -> None:
        """Add N rows, name -> (N, ...).

        Raises:
            ValueError: if arrays differ in N, hold no numbers, or have other names, dtypes or shapes than earlier rows.
        """
        for name, array in rows.items():
            dtype = array.dtype
            if dtype.kind not in "biuf" or dtype.itemsize > 8 or not dtype.isnative:
                raise ValueError(
                    f"rows of a replay must be of real numbers that a checkpoint can hold: got {name!r} of "
                    f"dtype {dtype}"
                )
        end = self.added + count(rows)
        kind, before = _kind(rows), _kind(self._rows)
        if before and kind != before:
            raise ValueError(f"all rows of a replay must be alike: got {kind} after {before}")
        self._make_room(end, rows)
        at = np.arange(self.added, end) % self._size
        for name, array in self._rows.items():
            array[at] = rows[name]
        self.added = end

    def _make_room(self, end: int, like: Mapping[str, Array]) -> None:
        """Make room for rows up to a number. The rows of the last iteration's end stay, for its checkpoint."""
        first = max(0, self._boundary - self.capacity)
        needed = max(self.capacity + end - self._boundary, end - first)
        if needed <= self._size:
            return
        rows = {name: np.empty((needed, *x.shape[1:]), x.dtype) for name, x in like.items()}
        for name, array in self.rows(first, self.added).items():
            rows[name][np.arange(first, self.added) % needed] = array
        self._rows, self._size = rows, needed

    def sample(self, number: int, rng: np.random.Generator) -> Batch:
        """Return rows that are drawn uniformly, each from all of them: name -> (number, ...).

        Raises:
            ValueError: if there are none.
        """
        if not self.added:
            raise ValueError("a replay without rows cannot be sampled: add some first")
        first = self.added - len(self)
        return take(self._rows, rng.integers(first, self.added, size=number) % self._size)

    def rows(self, first: int, end: int) -> Batch:
        """Return rows by their numbers, in the order in which they were added, from 0."""
        return take(self._rows, np.arange(first, end) % self._size) if self._rows else {}

    def mark(self) -> int:
        """Keep the present rows until the next mark, whatever is added; return their number, `added`."""
        self._boundary = self.added
        return self.added

    def load(self, saved: Any) -> None:
        """Take back what a checkpoint has in place of a replay, in an agent's `load`.

        Raises:
            ValueError: if it is of another capacity, or its files are not as they were written.
        """
        if saved.capacity != self.capacity:
            raise ValueError(
                f"this replay has {self.capacity} rows, and the saved one {saved.capacity}"
            )
        rows, self._rows, self._size = saved.rows(), {}, 0
        self.added = self._boundary = saved.added - (count(rows) if rows else 0)
        if rows:
            self.add(rows)
        self.mark()
        self.parts = [*saved.parts]


def _kind(rows: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{x.dtype} {x.shape[1:]}" for name, x in rows.items()}


@dataclass(frozen=True, eq=False)
class Gathered:
    """The batch that all ranks collected in one iteration: everything on rank 0, no rows elsewhere."""

    rows: Batch
    """Rows of all fragments in order of fragment ids, and "fragment_id", that of each row."""
    ended: Batch
    """Episodes that ended: "fragment_id", "return", "length", (E,) each.

    They are in order of the steps at which they ended, then of fragment ids; whole-episode batches, which
    have no such steps, in order of fragment ids.
    """
    steps: int
    """Environment steps of all ranks."""
    sha256: str = ""
    """Hash of the rows, to compare runs."""
    settings: str = ""
    """Settings of a curriculum with which its episodes began, as JSON, if there is one."""
    ranks: Batch = field(default_factory=dict)
    """Figures of each rank, (ranks,): "took_s", seconds it collected and processed; "peak_mb", its memory."""
