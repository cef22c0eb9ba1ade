"""Gather batches of all ranks: nested dicts of arrays, tensors, numbers and lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.mpi import transport, trees
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.comm import Comm, allgather_obj, among, split
from rank0rl.mpi.errors import attempt, collective
from rank0rl.mpi.transport import gather_rows, nodes
from rank0rl.mpi.trees import as_value, is_tensor, tensor_restorer

Array = npt.NDArray[Any]
Restore = Callable[[Array], Any]


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
    return _accumulate(batch, "rank0_accum_batches", comm, to_all=False)


def all_accum_batches(batch: Mapping[str, Any], comm: Comm | None = None) -> dict[str, Any]:
    """Return on every rank what `rank0_accum_batches` returns on rank 0.

    Collective: every rank calls this, in the same order.
    """
    return _accumulate(batch, "all_accum_batches", comm, to_all=True)


class _Kind(NamedTuple):
    """Kind of value under a name, without its number of rows."""

    name: str
    """One of "rows", "number" and "list"."""
    dtype: Any
    row: tuple[int, ...]
    """Trailing shape."""
    tensor: str = ""
    """Dtype of the tensor that the rows are of, such as "torch.bfloat16"; "" for an array."""

    def __str__(self) -> str:
        if self.name == "list":
            return "a list"
        dtype = self.tensor or (self.dtype if self.dtype.names else self.dtype.str)
        return f"one number, {dtype}" if self.name == "number" else f"{dtype} {self.row}"


_LIST = _Kind("list", np.dtype(np.uint8), (transport.ROW,))


@collective
def _accumulate(
    batch: Mapping[str, Any], what: str, comm: Comm | None, to_all: bool
) -> dict[str, Any]:
    comm = among(comm)
    (kinds, arrays, restores), problem = attempt(lambda: _as_rows(batch), ({}, {}, {}))
    names = sorted(kinds)
    rows = [len(arrays[name]) for name in names]
    layout = {_readable(name): str(kind) for name, kind in kinds.items()}
    counts = check_layout(layout, what, problem, comm=comm, numbers=rows, or_nothing=True)
    if comm:
        nothing = (counts < 0).any(axis=1)
        if nothing.any():
            counts = np.maximum(counts, 0)
            known = allgather_obj(kinds, what, comm)[nothing.argmin()]
            if not kinds:
                kinds, names = known, sorted(known)
                arrays = {name: np.empty((0, *k.row), k.dtype) for name, k in kinds.items()}
        gathered = gather_rows([arrays[name] for name in names], counts, what, comm, to_all)
        arrays = dict(zip(names, gathered, strict=True))
    out: dict[str, Any] = {}
    for path, kind in kinds.items():
        whole: Any = arrays[path]
        if kind.name == "list":
            name = f"{what}: the list {_readable(path)!r}"
            whole = _items(whole, counts[:, names.index(path)], name)
        elif kind.tensor:
            restore = restores.get(path) or tensor_restorer(kind.tensor)
            whole = restore(whole if comm else whole.copy())
        inner = out
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = whole
    return out


def _as_rows(
    batch: Mapping[str, Any],
) -> tuple[dict[trees.Path, _Kind], dict[trees.Path, Array], dict[trees.Path, Restore | None]]:
    """Return path -> kind of value, path -> its rows, and path -> what makes rows a tensor again.

    Raises:
        ValueError: if anything in the batch cannot be sent.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch must be a dict, name -> array, tensor, number, list or another such dict: got "
            f"{type(batch).__name__}; a rank that has nothing passes {{}}"
        )
    kinds: dict[trees.Path, _Kind] = {}
    arrays: dict[trees.Path, Array] = {}
    restores: dict[trees.Path, Restore | None] = {}
    for path, value in trees.leaves(batch, trees.dict_items):
        for key in path:
            if not isinstance(key, str):
                raise ValueError(f"names must be strings: got {key!r}")
        kinds[path], arrays[path], restores[path] = _value_as_rows(value, path)
    return kinds, arrays, restores


def _value_as_rows(value: Any, path: trees.Path) -> tuple[_Kind, Array, Restore | None]:
    """Return the kind of a value, its rows, and, for a tensor, what makes rows a tensor again.

    Raises:
        ValueError: if it is of no kind that can be sent.
    """
    array: Array = np.empty(0, object)  # refused below, as is a mask, which would be lost
    kind = _LIST
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        array = value if value.ndim else value.reshape(1)
        number = _Kind("number", value.dtype, ())
        kind = _Kind("rows", value.dtype, value.shape[1:]) if value.ndim else number
    elif is_tensor(value):
        return _tensor_as_rows(value, path)
    elif isinstance(value, list):
        try:
            array = transport.as_rows(value)
        except ValueError as error:
            raise ValueError(f"the list {_readable(path)!r} {error}") from None
    elif isinstance(value, bool | int | float | complex | np.generic):
        array = np.array([value])
        kind = _Kind("number", array.dtype, ())
    if array.dtype.hasobject:
        plain = type(value) is np.ndarray
        got = f"{value.dtype}, shape {value.shape}" if plain else type(value).__name__
        raise ValueError(
            f"{_readable(path)!r} must be a numpy array with rows along its first axis and a "
            f"dtype other than object, a tensor, a number, a list, or a dict of these: got {got}; "
            f"make it one"
        )
    return kind, array, None


def _tensor_as_rows(tensor: Any, path: trees.Path) -> tuple[_Kind, Array, Restore]:
    try:
        array, restore, _ = as_value(tensor)
    except ValueError as error:
        raise ValueError(f"{_readable(path)!r}: {error}") from None
    kind, rows, _ = _value_as_rows(array, path)
    return kind._replace(tensor=str(tensor.dtype)), rows, restore


def _readable(path: trees.Path) -> str:
    """Return a path for messages; no two are alike: a name, or ('a', 'b')."""
    return path[0] if len(path) == 1 else str(path)


def _items(rows: Array, counts: Array, name: str) -> list[Any]:
    """Return the items of all lists, one list after the other; none where no bytes have come."""
    if not rows.size:
        return []
    items: list[Any] = []
    for r, each in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
        items += transport.from_rows(each, f"{name} of rank {r}") if each.size else []
    return items


class GatherThread:
    """Runs `rank0_accum_batches` in a thread.

    Collective: every rank makes one, once for the job, and begins equally many batches.
    """

    def __init__(self) -> None:
        """Make a communicator for its messages, and start the thread."""
        self._comm = split(0)
        if self._comm:
            nodes(self._comm)  # here, where all ranks are
        self._todo: SimpleQueue[tuple[Mapping[str, Any], Future[dict[str, Any]]]] = SimpleQueue()
        self._begun: list[Future[dict[str, Any]]] = []
        threading.Thread(target=self._work, daemon=True).start()  # ends with the process

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Start to gather a batch, which must not change until `take` has returned."""
        self._begun.append(Future())
        self._todo.put((batch, self._begun[-1]))

    def take(self) -> list[dict[str, Any]]:
        """Wait for all batches begun since the last call; return their `rank0_accum_batches`, in order.

        Raises:
            ValueError: if `rank0_accum_batches` raised it.
        """
        begun, self._begun = self._begun, []
        return [batch.result() for batch in begun]

    def _work(self) -> None:
        while True:
            batch, future = self._todo.get()
            try:
                future.set_result(rank0_accum_batches(batch, self._comm))
            except BaseException as error:
                future.set_exception(error)
            del batch, future  # else they stay in memory until the next one comes
