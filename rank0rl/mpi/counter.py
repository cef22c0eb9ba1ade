"""A counter that ranks share: they draw numbers, to split work whose length is not known in advance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rank0rl.mpi.comm import Comm, among, barrier
from rank0rl.mpi.world import free_at_end

if TYPE_CHECKING:
    from mpi4py import MPI


class Counter:
    """Gives out the numbers 0 to n - 1 in every round, each one to the rank that asks first.

    Collective: every rank makes one, and calls `round` equally often, with a `barrier` (or anything
    else that makes all ranks wait for each other) between two rounds.

    Args:
        n: numbers in a round.
        comm: the ranks; all of the job by default.
    """

    def __init__(self, n: int, comm: Comm | None = None) -> None:
        """Make two counters on rank 0: one for this round, one for the next."""
        self._n, self._rounds = n, 0
        self._comm = among(comm)
        if self._comm:
            from mpi4py import MPI

            barrier(self._comm)  # making a window is a wait that does not sleep
            self._window = MPI.Win.Allocate(16 * (self._comm.rank == 0), 8, comm=self._comm)
            self._add, self._replace = MPI.SUM, MPI.REPLACE
            free_at_end(self._window)
            self._window.Lock_all()
            for counter in range(2 * (self._comm.rank == 0)):
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
