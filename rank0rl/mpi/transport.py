"""Move rows of arrays between ranks at memory speed, over each link between two nodes once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.errors import agreed, alone, collective
from rank0rl.mpi.wait import ARRIVE_S, MOVE_S, wait
from rank0rl.mpi.world import Comm


@dataclass(frozen=True)
class Nodes:
    """The ranks of a communicator by node. Ranks of a node share memory."""

    inner: Comm
    """Ranks of this rank's node."""
    outer: Comm | None
    """First rank of every node; None on the other ranks."""
    starts: list[int]
    """Numbers of these first ranks, ascending."""


def nodes(comm: Comm) -> Nodes | None:
    """Return the nodes of these ranks; None where a distinction brings nothing.

    That is on one node, with one rank per node, or where the ranks of a node are not consecutive.

    Collective: every rank calls this, in the same order. The first call for a communicator is a wait
    that does not sleep; later calls send nothing. With several nodes the communicator should last
    as long as the job, because the communicators made for it are not freed.
    """
    from mpi4py import MPI

    found: Any = comm.Get_attr(key())
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
        comm.Set_attr(key(), found)
    return cast(Nodes | None, found[0])


@cache
def key() -> int:
    """Return the key under which a communicator keeps its nodes, as a list of one."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


Array = npt.NDArray[Any]

MOST_ROWS = int(np.iinfo(np.int32).max)  # MPI's counts and displacements are 32-bit integers


@collective
def gather_rows(
    arrays: Sequence[Array], counts: Array, what: str, comm: Comm, to_all: bool = False
) -> list[Array]:
    """Return the rows of all ranks, in rank order, on rank 0; no rows on the other ranks.

    Between nodes, the rows of a node travel together, from its first rank.

    Collective: every rank calls this, in the same order, after `check_layout`.

    Args:
        arrays: arrays of one or more axes. All axes but the first, and the dtype, are the same on
            every rank.
        counts: rows of each rank and array, (ranks, arrays).
        what: name of the collective.
        comm: the ranks.
        to_all: True to give every rank the rows of all ranks.

    Raises:
        ValueError: the same on every rank, if there are more rows than MPI can count.
    """
    if counts.size and counts.sum(axis=0).max() > MOST_ROWS:
        raise agreed(
            ValueError(
                f"{what}: MPI counts up to {MOST_ROWS} rows in one array: got "
                f"{counts.sum(axis=0).max()}; put more numbers into each row"
            )
        )
    by_node = None if to_all else nodes(comm)
    receives = to_all or comm.rank == 0
    totals = counts.sum(axis=0)
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
        near = [_empty_rows(a, n * (inner.rank == 0)) for a, n in zip(arrays, sums, strict=True)]
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
    for i, (array, out) in enumerate(zip(arrays, outs, strict=True)):
        # A datatype of a whole row, because byte counts would overflow MPI's integers.
        row = MPI.BYTE.Create_contiguous(array.dtype.itemsize * int(np.prod(array.shape[1:])))
        rows.append(row.Commit())
        displacements = np.concatenate([[0], np.cumsum(counts[:, i])[:-1]])
        receive = [out, (counts[:, i], displacements), row]
        mine = np.ascontiguousarray(array)
        sent.append(mine)  # keeps a copy alive until it is sent
        if to_all:
            requests.append(comm.Iallgatherv([mine, len(mine), row], receive))
        elif comm.rank:
            requests.append(comm.Igatherv([mine, len(mine), row], None))
        else:
            there = array.base is out
            send = MPI.IN_PLACE if there else [mine, len(mine), row]
            requests.append(comm.Igatherv(send, receive))
    wait(comm, what, *requests, spin_s=MOVE_S)
    for row in rows:
        row.Free()


ROW = 64  # bytes; MPI counts up to 2^31 - 1 rows, so that 128 GiB of objects can travel


def as_rows(value: Any) -> Array:
    """Return an object, pickled, as bytes of shape (rows, ROW).

    Raises:
        ValueError: if it cannot be pickled.
    """
    file = io.BytesIO()
    try:
        pickle.dump(value, file)
    except Exception as error:  # an object's own pickling may raise anything
        raise ValueError(f"cannot be sent: {error}") from None
    file.write(bytes(-file.tell() % ROW))
    return np.frombuffer(file.getbuffer(), np.uint8).reshape(-1, ROW)


def from_rows(rows: Array, name: str) -> Any:
    """Return the object that `as_rows` has pickled.

    Args:
        rows: its bytes.
        name: name of the object, for the error message.

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
