"""Gather batches in a thread, while the rank does something else."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from rank0rl.mpi.comm import split
from rank0rl.mpi.gather import rank0_accum_batches
from rank0rl.mpi.nodes import nodes


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
