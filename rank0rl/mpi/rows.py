"""Rows of arrays from all ranks to rank 0, or to every rank, at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.errors import agreed, collective
from rank0rl.mpi.nodes import nodes
from rank0rl.mpi.wait import MOVE_S, wait
from rank0rl.mpi.world import Comm

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
