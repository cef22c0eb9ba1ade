"""Numbers that ranks draw, each of them once: how they share work whose length nobody knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rank0rl.mpi.comm import barrier
from rank0rl.mpi.world import Comm, free_at_end, world

if TYPE_CHECKING:
    from mpi4py import MPI


class Counter:
    """The numbers 0 to n - 1, in every round anew, each for the rank that asks first.

    Collective: every rank makes it, and calls `round` equally often with a `barrier` (or whatever
    else makes all ranks wait for each other) in between.

    Args:
        n: how many there are in a round.
        comm: the ranks; all of the job by default.
    """

    def __init__(self, n: int, comm: Comm | None = None) -> None:
        """Make the counters, on rank 0: one for this round, one for the next."""
        self._n, self._rounds = n, 0
        self._comm = comm or world()
        if self._comm:
            from mpi4py import MPI

            barrier(self._comm)  # to make a window is a wait that does not sleep
            self._window = MPI.Win.Allocate(16 * (self._comm.rank == 0), 8, comm=self._comm)
            self._add, self._replace = MPI.SUM, MPI.REPLACE
            free_at_end(self._window)
            self._window.Lock_all()
            for counter in range(2 * (self._comm.rank == 0)):
                self._fetch(counter, self._replace, 0)
            barrier(self._comm)

    def round(self, most: int | None = None) -> Iterator[int]:
        """This rank's numbers of the next round, drawn as they are asked for: `most` at most."""
        if self._comm is None:
            return iter(range(self._n)[:most])
        now = self._rounds % 2
        self._rounds += 1
        if self._comm.rank == 0:
            self._fetch(1 - now, self._replace, 0)
        return itertools.islice(self._drawn(now), most)

    def _drawn(self, counter: int) -> Iterator[int]:
        while (number := self._fetch(counter, self._add, 1)) < self._n:
            yield number

    def _fetch(self, counter: int, op: MPI.Op, operand: int) -> int:
        """Change a counter in one step; what it was before."""
        before = np.empty(1, np.int64)
        self._window.Fetch_and_op(np.array([operand]), before, 0, counter, op)
        self._window.Flush(0)
        return int(before[0])
