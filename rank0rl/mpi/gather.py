"""Batches of all ranks put together: dicts of arrays, of numbers, of lists, and of such dicts."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.mpi import comm as ranks
from rank0rl.mpi import trees
from rank0rl.mpi.comm import Comm

Array = npt.NDArray[Any]


def rank0_accum_batches(batch: Mapping[str, Any], comm: Comm | None = None) -> dict[str, Any]:
    """The batches of all ranks, concatenated in rank order, on rank 0.

    Arrays travel as they are, whatever their dtype and shape. Lists are pickled, which costs time
    and memory: pass large data as arrays.

    Collective: every rank calls this, in the same order.

    Args:
        batch: name -> array of one or more axes, rows first; number; list; or another such dict.
            Names are text. Any dtype but object; the number of rows may differ between ranks and between names,
            and may be zero. A rank that knows no names, because it has collected nothing, comes
            with {}.
        comm: the ranks; all of the job by default.

    Returns:
        On rank 0, name -> the rows, or the items, of rank 0, then of rank 1, and so on; numbers
        become an array of one per rank. On the other ranks the same names with no rows or items,
        so that nobody goes on with a part by mistake.

    Raises:
        ValueError: the same on every rank, if the ranks disagree on names, dtypes or trailing
            shapes, or if one of them has something else.
    """
    return _accumulate(batch, "rank0_accum_batches", comm, to_all=False)


def all_accum_batches(batch: Mapping[str, Any], comm: Comm | None = None) -> dict[str, Any]:
    """As `rank0_accum_batches`, but every rank gets the rows of all ranks.

    Collective: every rank calls this, in the same order.
    """
    return _accumulate(batch, "all_accum_batches", comm, to_all=True)


class Early:
    """`rank0_accum_batches` in a thread, while a rank does something else, such as stepping environments.

    Collective: every rank makes it, once for the job, and begins equally many batches.
    """

    def __init__(self) -> None:
        """Give its messages a communicator of their own, and begin the thread."""
        self._comm = ranks.split(0)
        if self._comm:
            ranks.nodes(self._comm)  # here, where all ranks are
        self._todo: SimpleQueue[tuple[Mapping[str, Any], Future[dict[str, Any]]]] = SimpleQueue()
        self._begun: list[Future[dict[str, Any]]] = []
        threading.Thread(target=self._work, daemon=True).start()  # ends with the process

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Send a batch, which must not change until it is taken."""
        self._begun.append(Future())
        self._todo.put((batch, self._begun[-1]))

    def take(self) -> list[dict[str, Any]]:
        """What `rank0_accum_batches` returned for all that was begun, in order, once all of it is there.

        Raises:
            ValueError: as it does.
        """
        begun, self._begun = self._begun, []
        return [batch.result() for batch in begun]

    def _work(self) -> None:
        while True:
            batch, future = self._todo.get()
            try:
                future.set_result(rank0_accum_batches(batch, self._comm))
            except ValueError as error:  # the same on every rank
                future.set_exception(error)
            except BaseException as error:  # on this rank alone: the others are in another message
                future.set_exception(error)
                return
            del batch, future  # else they stay until the next one comes


class _Kind(NamedTuple):
    """What stands under a name, whatever its rows are."""

    name: str
    """"rows", "number" or "list"."""
    dtype: Any
    row: tuple[int, ...]

    def __str__(self) -> str:
        if self.name == "list":
            return "a list"
        dtype = self.dtype if self.dtype.names else self.dtype.str
        return f"one number, {dtype}" if self.name == "number" else f"{dtype} {self.row}"


_LIST = _Kind("list", np.dtype(np.uint8), ())


def _accumulate(
    batch: Mapping[str, Any], what: str, comm: Comm | None, to_all: bool
) -> dict[str, Any]:
    comm = comm or ranks.world()
    kinds, arrays, problem = _opened(batch)
    names = sorted(kinds)
    rows = [len(arrays[name]) for name in names]
    layout = {_told(name): str(kind) for name, kind in kinds.items()}
    counts = ranks.check_layout(layout, what, problem, comm=comm, numbers=rows, or_nothing=True)
    if comm:
        nothing = (counts < 0).any(axis=1)
        if nothing.any():
            counts = np.maximum(counts, 0)
            known = ranks.allgather_obj(kinds, what, comm)[nothing.argmin()]
            if not kinds:
                kinds, names = known, sorted(known)
                arrays = {name: np.empty((0, *k.row), k.dtype) for name, k in kinds.items()}
        parts = [arrays[name] for name in names]
        gathered = ranks.gather(parts, counts, what, comm, to_all)
        arrays = dict(zip(names, gathered, strict=True))
    out: dict[str, Any] = {}
    for path, kind in kinds.items():
        whole: Any = arrays[path]
        if kind.name == "list":
            whole = _items(whole, counts[:, names.index(path)])
        inner = out
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = whole
    return out


def _opened(
    batch: Mapping[str, Any],
) -> tuple[dict[tuple[str, ...], _Kind], dict[tuple[str, ...], Array], str]:
    """Path -> what is there, path -> its rows; and what is wrong with the batch, if anything is."""
    kinds: dict[tuple[str, ...], _Kind] = {}
    arrays: dict[tuple[str, ...], Array] = {}
    problem = ""
    for path, value in trees.leaves(batch, trees.dict_items):
        wrong = [key for key in path if not isinstance(key, str)]
        if wrong:
            problem = problem or f"names must be text: got {wrong[0]!r}"
            continue
        if isinstance(value, np.ma.MaskedArray):
            array, kind = np.empty(0, object), _LIST
        elif isinstance(value, np.ndarray) and value.ndim:
            array, kind = value, _Kind("rows", value.dtype, value.shape[1:])
        elif isinstance(value, list):
            try:
                array, kind = np.frombuffer(pickle.dumps(value), np.uint8), _LIST
            except Exception as error:  # whatever an object's own pickling raises
                problem = problem or f"the list {_told(path)!r} cannot be sent: {error}"
                continue
        elif isinstance(value, bool | int | float | complex | np.generic):
            array = np.array([value])
            kind = _Kind("number", array.dtype, ())
        elif isinstance(value, np.ndarray):
            array, kind = value.reshape(1), _Kind("number", value.dtype, ())
        else:
            array, kind = np.empty(0, object), _LIST
        if array.dtype.hasobject:
            plain = type(value) is np.ndarray
            got = f"{value.dtype}, shape {value.shape}" if plain else type(value).__name__
            problem = problem or (
                f"{_told(path)!r} must be a numpy array with rows along its first axis and a "
                f"dtype other than object, a number, a list, or a dict of these: got {got}; make it "
                f"one"
            )
            continue
        kinds[path], arrays[path] = kind, array
    return kinds, arrays, problem


def _told(path: tuple[str, ...]) -> str:
    """A path for messages, such that no two are alike: a name, or ('obs', 'image')."""
    return path[0] if len(path) == 1 else str(path)


def _items(pickled: Array, sizes: Array) -> list[Any]:
    """The items of all lists, one after the other; none where no bytes have come."""
    if not pickled.size:
        return []
    parts = np.split(pickled, np.cumsum(sizes)[:-1])
    return [item for part in parts if part.size for item in pickle.loads(part.data)]
