"""This rank, and the basic collectives: barrier, small objects, arrays in place, a shared counter.

Rules for all collectives: every wait sleeps (see wait.py), except the first one of a communicator, in
which the ranks find out who is on their node. Ranks agree on a layout before data moves (see
agreement.py), and a disagreement raises the same error on every rank. Arrays travel as opaque bytes:
every dtype and shape works, and nothing is pickled. For errors on one rank alone, see world.py.
"""

from __future__ import annotations

import itertools
import pickle
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.arrays import as_value, fill, is_tensor
from rank0rl.mpi.wait import ARRIVE_S, MOVE_S, wait
from rank0rl.mpi.world import (
    Comm,
    abort,
    agreed,
    alone,
    among,
    attempt,
    collective,
    free_at_end,
    get_nworkers,
    get_rank,
    has_threads,
    mpi_version,
    print0,
    split,
    stop,
    world,
)

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Comm",
    "abort",
    "allgather_obj",
    "among",
    "barrier",
    "bcast",
    "bcast_",
    "bcast_obj",
    "get_nworkers",
    "get_rank",
    "has_threads",
    "hosts",
    "mpi_version",
    "nworkers",
    "print0",
    "rank",
    "reduce_",
    "split",
    "stop",
    "world",
]

Array = npt.NDArray[Any]
ROW = 64  # bytes in a row of a pickled object: 128 GiB can travel in the 2^31 - 1 rows that MPI counts

rank: int
nworkers: int

_CHUNK = 1 << 30  # bytes of one message: MPI counts are 32-bit integers


def __getattr__(name: str) -> int:
    """Return `rank` or `nworkers`: this process's rank and the number of ranks; 0 and 1 without MPI."""
    if name == "rank":
        return get_rank()
    if name == "nworkers":
        return get_nworkers()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def hosts() -> tuple[str, ...]:
    """Return the name of every rank's host, in rank order.

    Collective: every rank calls this, in the same order. Only the first call sends anything.
    """
    comm, mine = world(), platform.node()
    return tuple(allgather_obj(mine, "hosts", comm)) if comm else (mine,)


@collective
def barrier(comm: Comm | None = None) -> None:
    """Wait until every rank is here.

    Collective: every rank calls this, in the same order.
    """
    comm = among(comm)
    if comm:
        wait(comm, "barrier", comm.Ibarrier(), spin_s=ARRIVE_S)


@collective
def bcast_obj(value: Any, comm: Comm | None = None) -> Any:
    """Return a small object of rank 0, such as settings or a message, on every rank.

    It is pickled. Send arrays with `bcast` or `bcast_`.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if it cannot be pickled.
        RuntimeError: on the ranks that cannot unpickle it.
    """
    comm = among(comm)
    if comm is None:
        return value
    raw = _packed(value).reshape(-1) if comm.rank == 0 else np.empty(0, np.uint8)
    size = np.array([raw.size])
    wait(comm, "bcast_obj", comm.Ibcast(size), spin_s=ARRIVE_S)
    raw = raw if comm.rank == 0 else np.empty(size[0], np.uint8)
    for start in range(0, raw.size, _CHUNK):
        wait(comm, "bcast_obj", comm.Ibcast(raw[start : start + _CHUNK]), spin_s=MOVE_S)
    return _unpacked(raw, "bcast_obj", 0)


@collective
def allgather_obj(value: Any, what: str, comm: Comm | None = None) -> list[Any]:
    """Return a small object of every rank, in rank order, on every rank.

    It is pickled. Send arrays with `gather.all_accum_batches`.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if one of them cannot be pickled.
        RuntimeError: on the ranks that cannot unpickle one.
    """
    comm = among(comm)
    if comm is None:
        return [value]
    mine = _packed(value)
    counts = np.empty((comm.size, 1), np.int64)
    wait(comm, what, comm.Iallgather(np.array([len(mine)]), counts), spin_s=ARRIVE_S)
    rows = np.empty((counts.sum(), ROW), np.uint8)
    ends = np.cumsum(counts)
    row = row_type(rows)
    sent, received = [mine, len(mine), row], [rows, (counts[:, 0], ends - counts[:, 0]), row]
    wait(comm, what, comm.Iallgatherv(sent, received), spin_s=MOVE_S)
    row.Free()
    return [_unpacked(each, what, r) for r, each in enumerate(np.split(rows, ends[:-1]))]


@collective
def bcast(array: Any, comm: Comm | None = None) -> Any:
    """Return a copy of rank 0's array or tensor on every rank, and overwrite those like it on the others.

    Collective: every rank calls this, in the same order.

    Args:
        array: on rank 0, an array of any dtype except object, a tensor, or a list of numbers. It stays
            as it is. On the other ranks, an array or a tensor of that shape and dtype is overwritten in
            place, unless it is read-only. Anything else that they pass is ignored.
        comm: the ranks; all of the job by default.

    Returns:
        A tensor where this rank has passed a tensor of that shape and dtype, else an array.

    Raises:
        ValueError: the same on every rank, if rank 0 passes anything else.
    """
    comm = among(comm)
    mine, problem = attempt(lambda: as_value(array), as_value(0))
    out = np.empty(0)
    if get_rank(comm) == 0:
        out, problem = attempt(lambda: np.array(_as_array(array), order="C"), out)
        refused = out.dtype.hasobject or isinstance(array, str | bytes)
        problem = f"got {_described(array, out)}" if refused else problem
    sent = mine.dtype if is_tensor(array) else str(out.dtype)
    shape, dtype, sent, problem = bcast_obj((out.shape, out.dtype, sent, problem), comm)
    if problem:
        raise agreed(
            ValueError(
                f"bcast: rank 0 must pass an array of a dtype other than object: {problem}; make it "
                f"one, or send it with bcast_obj"
            )
        )
    out = out if get_rank(comm) == 0 else np.empty(shape, dtype)
    bcast_(out, comm)
    if (mine.array.shape, mine.dtype) != (out.shape, sent):
        return out
    if get_rank(comm):
        attempt(lambda: fill(array, out), None)  # unless it is read-only
    return mine.restore(out) if is_tensor(array) else out


def _as_array(x: Any) -> Any:
    return as_value(x).array if is_tensor(x) or isinstance(x, np.ma.MaskedArray) else x


def _described(x: Any, array: Array) -> str:
    return f"dtype {array.dtype}" if isinstance(x, np.ndarray) else type(x).__name__


@collective
def bcast_(array: Array, comm: Comm | None = None, root: int = 0) -> None:
    """Overwrite a C-contiguous array, in place, with the root's array of the same shape and dtype.

    Collective: every rank calls this, in the same order, with the same root.
    """
    comm = among(comm)
    if comm is None:
        return
    raw = array.reshape(-1).view(np.uint8)
    by_node = nodes(comm) if root == 0 else None
    for start in range(0, raw.size, _CHUNK):
        for level in (by_node.outer, by_node.inner) if by_node else (comm,):
            if level:
                chunk = raw[start : start + _CHUNK]
                wait(level, "bcast_", level.Ibcast(chunk, root), spin_s=MOVE_S)


@collective
def reduce_(arrays: Sequence[Array], op: str, what: str, comm: Comm | None = None) -> None:
    """Overwrite C-contiguous arrays with their "sum", "prod", "max" or "min" over ranks, by element.

    The dtypes are those that MPI can compute with: integers, float32, float64, long double, and
    complex numbers of these. Every rank gets the same bits. Their rounding depends on the number of ranks.

    Collective: every rank calls this, in the same order, with arrays of the same sizes and dtypes.
    """
    comm = among(comm)
    if comm is None:
        return
    from mpi4py import MPI

    operation = getattr(MPI, op.upper())
    requests = []
    for array in arrays:
        step = _CHUNK // array.itemsize
        for start in range(0, array.size, step):
            chunk = array.reshape(-1)[start : start + step]
            requests.append(comm.Iallreduce(MPI.IN_PLACE, chunk, operation))
    wait(comm, what, *requests, spin_s=MOVE_S)


class _Unsendable(NamedTuple):
    """Sent in place of an object that cannot be pickled."""

    why: str


def _packed(value: Any) -> Array:
    rows, problem = attempt(lambda: pickled(value), np.empty(0))
    return pickled(_Unsendable(problem)) if problem else rows


def _unpacked(rows: Array, what: str, rank: int) -> Any:
    value = unpickled(rows, f"{what}: the object of rank {rank}")
    if isinstance(value, _Unsendable):
        raise agreed(ValueError(f"{what}: the object of rank {rank} {value.why}"))
    return value


def row_type(array: Array) -> MPI.Datatype:
    """Return MPI's type of a whole row of an array: counts of bytes would overflow MPI's integers."""
    from mpi4py import MPI

    return MPI.BYTE.Create_contiguous(array.dtype.itemsize * int(np.prod(array.shape[1:]))).Commit()


def pickled(value: Any) -> Array:
    """Return an object, pickled, as bytes of shape (rows, ROW).

    Raises:
        ValueError: if it cannot be pickled.
    """
    try:
        raw = pickle.dumps(value)
    except Exception as error:  # an object's own pickling may raise anything
        raise ValueError(f"cannot be sent: {error}") from None
    rows = np.zeros((-(-len(raw) // ROW), ROW), np.uint8)
    rows.reshape(-1)[: len(raw)] = np.frombuffer(raw, np.uint8)
    return rows


def unpickled(rows: Array, name: str) -> Any:
    """Return the object that `pickled` has packed; its name is for the error message.

    Raises:
        RuntimeError: on this rank alone, if it cannot be unpickled.
    """
    try:
        return pickle.loads(rows.data)
    except Exception as error:  # so may its unpickling
        raise alone(
            RuntimeError(
                f"{name} came, but cannot be unpickled here: {type(error).__name__}: {error}; send "
                f"arrays, numbers and text, or objects whose class this rank can import"
            )
        ) from error


class Nodes(NamedTuple):
    """The ranks of a communicator by node. Ranks of a node share memory."""

    inner: Comm
    """Ranks of this rank's node."""
    outer: Comm | None
    """First rank of every node; None on the other ranks."""
    starts: list[int]
    """Numbers of these first ranks, ascending."""


def nodes(comm: Comm) -> Nodes | None:
    """Return the nodes of these ranks; None if there is one, each has one rank, or their ranks are not consecutive.

    Collective: every rank calls this, in the same order. The first call for a communicator is a wait
    that does not sleep; later calls send nothing. With several nodes the communicator should last
    as long as the job, because the communicators made for it are not freed.
    """
    from mpi4py import MPI

    found: Any = comm.Get_attr(_nodes_key())
    if found is None:
        # What follows neither sleeps nor can be reported, so let all ranks be here.
        wait(comm, "the first broadcast or gather", comm.Ibarrier(), spin_s=ARRIVE_S)
        inner: Any = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        first = np.array([comm.rank])
        inner.Bcast(first)
        firsts = np.empty(comm.size, first.dtype)
        comm.Allgather(first, firsts)
        starts = sorted(set(firsts.tolist()))
        outer: Any = comm.Split(0 if inner.rank == 0 else MPI.UNDEFINED, comm.rank)
        useful = 1 < len(starts) < comm.size and (np.diff(firsts) >= 0).all()
        there = outer if outer != MPI.COMM_NULL else None
        found = [Nodes(inner, there, starts) if useful else None]  # in a list: None is no attribute
        for level in (inner, there):
            if level and not useful:
                level.Free()
        comm.Set_attr(_nodes_key(), found)
    return cast(Nodes | None, found[0])


@cache
def _nodes_key() -> int:
    """Return the key under which a communicator keeps its nodes, as a list of one."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


class Counter:
    """Gives out the numbers 0 to n - 1 in every round, each one to the rank that asks first.

    Collective: every rank makes one, and calls `round` equally often, with a `barrier` (or anything
    else that makes all ranks wait for each other) between two rounds.
    """

    def __init__(self, n: int) -> None:
        self._n, self._rounds = n, 0
        self._comm = among(None)
        if self._comm:
            from mpi4py import MPI

            barrier(self._comm)  # making a window is a wait that does not sleep
            self._window = MPI.Win.Allocate(16 * (self._comm.rank == 0), 8, comm=self._comm)
            self._add, self._replace = MPI.SUM, MPI.REPLACE
            free_at_end(self._window)
            self._window.Lock_all()
            for counter in range(2 * (self._comm.rank == 0)):  # for this round, and for the next
                self._fetch(counter, self._replace, 0)
            barrier(self._comm)

    def round(self, most: int | None = None) -> Iterator[int]:
        """Return an iterator that draws this rank's numbers of the next round, `most` at most."""
        if self._comm is None:
            return iter(range(self._n)[:most])
        now = self._rounds % 2
        self._rounds += 1
        if self._comm.rank == 0:
            self._fetch(1 - now, self._replace, 0)
        return itertools.islice(self._draw(now), most)

    def _draw(self, counter: int) -> Iterator[int]:
        while (number := self._fetch(counter, self._add, 1)) < self._n:
            yield number

    def _fetch(self, counter: int, op: MPI.Op, operand: int) -> int:
        """Change a counter in one atomic step; return its value before."""
        before = np.empty(1, np.int64)
        self._window.Fetch_and_op(np.array([operand]), before, 0, counter, op)
        self._window.Flush(0)
        return int(before[0])
