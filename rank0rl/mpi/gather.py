"""Gather rows of all ranks: flat dicts of arrays in the training loop, anything nested in scripts.

`gather_rows` moves the arrays. `rank0_accum_batches`, which scripts call, flattens nested dicts, lists,
tensors and numbers to arrays first. Between nodes, the rows of a node travel together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.launch import job
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.arrays import NUMBERS, SAME, Kind, Value, as_value, as_values, is_tensor
from rank0rl.mpi.comm import (
    ROW,
    Comm,
    allgather_obj,
    among,
    nodes,
    pickled,
    row_type,
    split,
    unpickled,
)
from rank0rl.mpi.wait import MOVE_S, wait
from rank0rl.mpi.world import agreed, attempt, collective, get_rank

Array = npt.NDArray[Any]
Path = tuple[str, ...]

MOST_ROWS = int(np.iinfo(np.int32).max)  # MPI's counts and displacements are 32-bit integers
_LIST = Kind("list", np.dtype(np.uint8), (ROW,))


@collective
def gather_rows(batch: Mapping[str, Array], comm: Comm | None = None) -> dict[str, Array]:
    """Return the rows of all ranks, concatenated in rank order, on rank 0; no rows on the other ranks.

    Collective: every rank calls this, in the same order.

    Args:
        batch: name -> array of one or more axes, rows first, as in `rank0_accum_batches`.
        comm: the ranks; all of the job by default.

    Returns:
        The same names on every rank. A single process gets its own arrays, not copies of them.

    Raises:
        ValueError: in the same cases as `rank0_accum_batches`.
    """
    values, problem = attempt(
        lambda: {name: _array_as_rows(array, name) for name, array in batch.items()}, {}
    )
    values, _ = _gather_values(values, problem, "gather_rows", comm, to_all=False)
    return {name: value.array for name, value in values.items()}


def rank0_accum_batches(batch: Mapping[str, Any], comm: Comm | None = None) -> dict[str, Any]:
    """Return the batches of all ranks, concatenated in rank order, on rank 0.

    Arrays travel as they are, whatever their dtype and shape. Tensors travel as arrays, and come
    back as tensors: detached, of the same dtype, on the device of this rank's own tensor. Lists are
    pickled, which costs time and memory: pass large data as arrays or tensors.

    Collective: every rank calls this, in the same order.

    Args:
        batch: name -> array or tensor of one or more axes, rows first; number; list; or another
            such dict. Names are strings. Any dtype except object. The number of rows may differ
            between ranks and between names, and may be zero. A rank that has collected nothing, and
            so knows no names, passes {}.
        comm: the ranks; all of the job by default.

    Returns:
        On rank 0, name -> the rows, or the items, of rank 0, then of rank 1, and so on; numbers
        become an array, and tensors without axes a tensor, with one number per rank. On the other
        ranks the same names with no rows or items, so that no rank goes on with incomplete data by
        mistake. A rank that passes {} gets tensors in main memory.

    Raises:
        ValueError: the same on every rank, if the ranks disagree on names, dtypes or trailing
            shapes, or if one of them passes anything else.
        RuntimeError: on the ranks that receive an item that they cannot unpickle.
    """
    whole = _accumulate(batch, "rank0_accum_batches", comm, to_all=False)
    job.rows_are_on_rank0 = get_rank(comm) > 0
    return whole


def all_accum_batches(batch: Mapping[str, Any], comm: Comm | None = None) -> dict[str, Any]:
    """Return on every rank what `rank0_accum_batches` returns on rank 0.

    Collective: every rank calls this, in the same order.
    """
    return _accumulate(batch, "all_accum_batches", comm, to_all=True)


@collective
def gather_many(
    things: Mapping[str, Any],
    what: str,
    comm: Comm | None = None,
    problem: str = "",
    to_all: bool = True,
) -> dict[str, Any]:
    """Return the things of all ranks, stacked along a new first axis in rank order, on every rank.

    With `to_all` false, only rank 0 gets them. The others then get stacks of no things. A `problem` is
    what else is wrong on this rank.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if ranks pass different things, or something that cannot
            be sent.
    """
    values, wrong = attempt(lambda: as_values(things), {})
    layout = {name: value.kind for name, value in values.items()}
    counts = check_layout(
        layout, what, problem or wrong, SAME, comm=comm, numbers=[1] * len(values)
    )
    comm = among(comm)
    stacked = [value.array[None] for value in values.values()]
    if comm:
        stacked = _move_rows(stacked, counts, what, comm, to_all)
    out = {name: v.restore(a) for (name, v), a in zip(values.items(), stacked, strict=True)}
    return {name: out[name] for name in things}


@collective
def _move_rows(
    arrays: Sequence[Array], counts: Array, what: str, comm: Comm, to_all: bool = False
) -> list[Array]:
    """Do what `gather_rows` does, or give every rank the rows of all ranks, after `check_layout`.

    A row is copied once, from the memory of its rank to that of rank 0; once more on the way if there
    are nodes of several ranks and its rank is not on that of rank 0.

    Collective: every rank calls this, in the same order, with the counts of rows, (ranks, arrays).

    Raises:
        ValueError: the same on every rank, if there are more rows than MPI can count.
    """
    totals = counts.sum(axis=0)
    if totals.size and totals.max() > MOST_ROWS:
        raise agreed(
            ValueError(
                f"{what}: MPI counts up to {MOST_ROWS} rows in one array: got {totals.max()}; put "
                f"more numbers into each row"
            )
        )
    by_node = None if to_all else nodes(comm)
    receives = to_all or comm.rank == 0
    outs = [_empty_rows(a, n if receives else 0) for a, n in zip(arrays, totals, strict=True)]
    if by_node is None:
        _gather_into(outs, arrays, counts, what, comm, to_all)
        return outs
    starts, inner = by_node.starts, by_node.inner
    mine = counts[comm.rank - inner.rank :][: inner.size]
    sums = mine.sum(axis=0)
    if comm.rank == 0:
        near = [out[:n] for out, n in zip(outs, sums, strict=True)]
    else:
        near = [
            _empty_rows(a, n if inner.rank == 0 else 0) for a, n in zip(arrays, sums, strict=True)
        ]
    _gather_into(near, arrays, mine, what, inner)
    if by_node.outer:
        _gather_into(outs, near, np.add.reduceat(counts, starts), what, by_node.outer)
    return outs


def _empty_rows(like: Array, n: int) -> Array:
    return np.empty((n, *like.shape[1:]), like.dtype)


def _gather_into(
    outs: Sequence[Array],
    arrays: Sequence[Array],
    counts: Array,
    what: str,
    comm: Comm,
    to_all: bool = False,
) -> None:
    """Move rows into `outs`. Rank 0's own rows may be there already."""
    from mpi4py import MPI

    requests, rows, sent = [], [], []
    starts = np.cumsum(counts, axis=0) - counts
    for i, (array, out) in enumerate(zip(arrays, outs, strict=True)):
        rows.append(row := row_type(array))
        mine = np.ascontiguousarray(array)
        sent.append(mine)  # keeps a copy alive until it is sent
        send: Any = [mine, len(mine), row]
        receive = [out, (counts[:, i], starts[:, i]), row]
        if to_all:
            requests.append(comm.Iallgatherv(send, receive))
        elif comm.rank:
            requests.append(comm.Igatherv(send, None))
        else:
            is_there = array.base is out
            requests.append(comm.Igatherv(MPI.IN_PLACE if is_there else send, receive))
    wait(comm, what, *requests, spin_s=MOVE_S)
    for row in rows:
        row.Free()


def _gather_values(
    values: dict[Any, Value], problem: str, what: str, comm: Comm | None, to_all: bool
) -> tuple[dict[Any, Value], dict[Any, Array]]:
    """Gather rows, by name or path of names; return them and how many each rank has, (ranks,), by name."""
    comm = among(comm)
    names = sorted(values)
    layout = {_readable(name): values[name].kind for name in names}
    rows = [len(values[name].array) for name in names]
    counts = check_layout(layout, what, problem, comm=comm, numbers=rows, or_nothing=True)
    if comm:
        nothing = (counts < 0).any(axis=1)
        if nothing.any():
            counts = np.maximum(counts, 0)
            kinds = {name: value.kind for name, value in values.items()}
            known = allgather_obj(kinds, what, comm)[nothing.argmin()]
            if not values:
                values = {name: _no_rows(kind) for name, kind in known.items()}
                names = sorted(values)
        whole = _move_rows([values[name].array for name in names], counts, what, comm, to_all)
        gathered = dict(zip(names, whole, strict=True))
        values = {name: value._replace(array=gathered[name]) for name, value in values.items()}
    return values, dict(zip(names, counts.T, strict=True))


@collective
def _accumulate(
    batch: Mapping[str, Any], what: str, comm: Comm | None, to_all: bool
) -> dict[str, Any]:
    comm = among(comm)
    values, problem = attempt(lambda: _flattened(batch), {})
    values, counts = _gather_values(values, problem, what, comm, to_all)
    out: dict[str, Any] = {}
    for path, (rows, restore, kind) in values.items():
        whole: Any = rows
        if kind.name == "list":
            whole = _items(rows, counts[path], f"{what}: the list {_readable(path)!r}")
        elif not isinstance(kind.dtype, np.dtype):
            whole = restore(rows if comm else rows.copy())
        elif comm is None:
            whole = rows.copy()  # not the caller's, as with several ranks
        inner = out
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = whole
    return out


def _flattened(batch: Mapping[str, Any], path: Path = ()) -> dict[Path, Value]:
    """Return the values of a nested batch by path."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch must be a dict, name -> array, tensor, number, list or another such dict: got "
            f"{type(batch).__name__}; a rank that has nothing passes {{}}"
        )
    values: dict[Path, Value] = {}
    for key, value in batch.items():
        if not isinstance(key, str):
            raise ValueError(f"names must be strings: got {key!r}")
        below = (*path, key)
        if isinstance(value, Mapping):
            values |= _flattened(value, below)
        else:
            values[below] = _as_rows(value, _readable(below))
    return values


def _as_rows(value: Any, name: str) -> Value:
    """Return a value as rows; raise ValueError if it is of no kind that can be sent."""
    if is_tensor(value):
        try:
            array, restore, _ = as_value(value)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        rows = _array_as_rows(array, name)
        return Value(rows.array, restore, rows.kind._replace(dtype=value.dtype))
    if isinstance(value, list):
        try:
            return _array_as_rows(pickled(value), name)._replace(kind=_LIST)
        except ValueError as error:
            raise ValueError(f"the list {name!r} {error}") from None
    return _array_as_rows(np.array(value) if isinstance(value, NUMBERS) else value, name)


def _array_as_rows(value: Array, name: str) -> Value:
    """Return the rows of an array; one without axes is a number. Objects are refused, and masks, which would be lost."""
    is_array = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    if not is_array or value.dtype.hasobject:
        plain = type(value) is np.ndarray
        got = f"{value.dtype}, shape {value.shape}" if plain else type(value).__name__
        raise ValueError(
            f"{name!r} must be a numpy array with rows along its first axis and a "
            f"dtype other than object, a tensor, a number, a list, or a dict of these: got {got}; "
            f"make it one"
        )
    if value.ndim:
        return Value(value, np.asarray, Kind("", value.dtype, value.shape[1:]))
    return Value(value.reshape(1), np.asarray, Kind("number", value.dtype, ()))


def _no_rows(kind: Kind) -> Value:
    """Return no rows of a kind that other ranks have told this one."""
    if isinstance(kind.dtype, np.dtype):
        return Value(np.empty((0, *kind.shape), kind.dtype), np.asarray, kind)
    import torch  # a rank that has not loaded it gets tensors of others now

    return as_value(torch.empty((0, *kind.shape), dtype=kind.dtype))._replace(kind=kind)


def _readable(path: Path | str) -> str:
    """Return a name or a path for messages; no two are alike: a name, or ('a', 'b')."""
    if isinstance(path, str):
        return path
    return path[0] if len(path) == 1 and not path[0].startswith("(") else str(path)


def _items(rows: Array, counts: Array, name: str) -> list[Any]:
    """Return the items of all lists, one list after the other; none where no bytes have come."""
    if not rows.size:
        return []
    items: list[Any] = []
    for r, each in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
        items += unpickled(each, f"{name} of rank {r}") if each.size else []
    return items


class GatherThread:
    """Runs `gather_rows` in a thread, with a communicator of its own.

    Collective: every rank makes one, once for the job, and begins equally many batches.
    """

    def __init__(self) -> None:
        self._comm = split(0)
        if self._comm:
            nodes(self._comm)  # here, where all ranks are
        self._todo: SimpleQueue[tuple[Mapping[str, Array], Future[dict[str, Array]]]] = (
            SimpleQueue()
        )
        self._begun: list[Future[dict[str, Array]]] = []
        threading.Thread(target=self._work, daemon=True).start()  # ends with the process

    def begin(self, batch: Mapping[str, Array]) -> None:
        """Start to gather a batch, which must not change until `take` has returned it."""
        self._begun.append(Future())
        self._todo.put((batch, self._begun[-1]))

    def take(self) -> list[dict[str, Array]]:
        """Wait for all batches begun since the last call; return their `gather_rows`, in order.

        Raises:
            ValueError: if `gather_rows` raised it.
        """
        begun, self._begun = self._begun, []
        return [batch.result() for batch in begun]

    def _work(self) -> None:
        while True:
            batch, future = self._todo.get()
            try:
                future.set_result(gather_rows(batch, self._comm))
            except BaseException as error:
                future.set_exception(error)
            del batch, future  # else they stay in memory until the next one comes
