"""The ranks by node, so that rows and weights cross the link between two nodes once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from rank0rl.mpi.wait import ARRIVE_S, wait
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
