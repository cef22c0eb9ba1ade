"""Threads that compute one kernel together, and the barrier at which they meet inside it.

A gradient step is too short for a thread pool: the threads enter a kernel once an epoch, and meet
several times in every step, in less than a microsecond if each has a core. A thread that waits
longer gives its core to whoever wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rank0rl.nets.kernels.compiler import inner

_SPINS = 2000  # before a thread gives its core away: about 20 us
_yield_core = types.ExternalFunction("sched_yield", types.int32())


class Team:
    """A number of threads. The first is the one that calls; the others start with their first task.

    Args:
        threads: number of threads, at least 1.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = ThreadPoolExecutor(max(1, threads - 1), "rank0rl-learner")

    def run(self, function: Callable[..., Any], tasks: int, *args: Any) -> Any:
        """Call a kernel as function(thread, threads, barrier, *args) in each thread.

        Args:
            function: the kernel.
            tasks: number of threads that it can occupy; more are left out.
            args: its other arguments.

        Returns:
            What the first thread's call returned, when all have.

        Raises:
            Exception: what any of the calls raises, when all have ended.
        """
        threads = max(1, min(self.threads, tasks))
        barrier = np.zeros(3, np.int64)

        def call(thread: int) -> Any:
            try:
                return function(thread, threads, barrier, *args)
            except BaseException:
                barrier[2] = 1  # nobody waits for this thread
                raise

        others: list[Future[Any]] = []
        try:
            for thread in range(1, threads):
                others.append(self._others.submit(call, thread))
            return call(0)
        except BaseException:
            barrier[2] = 1
            raise
        finally:
            wait(others)


@intrinsic  # type: ignore[untyped-decorator]
def _atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an element of an array of int64; return what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """Return an element of an array of int64, as the other threads have left it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature, args)
        return builder.load_atomic(pointer, "seq_cst", 8, typ=ir.IntType(64))

    return types.int64(array, types.intp), codegen


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(
        context, builder, signature.args[0], array, [args[1]], wraparound=False
    )


@inner
def meet(threads: int, barrier: npt.NDArray[np.int64]) -> None:
    """Wait until all threads have come here. Inside a kernel only.

    Args:
        threads: number of threads.
        barrier: (3,): how many have come, how often all have, and 1 if one of them will not come.

    Raises:
        RuntimeError: if one of them will not come, because of an error.
    """
    if threads == 1:
        return
    round_ = _atomic_load(barrier, 1)
    if _atomic_add(barrier, 0, 1) == threads - 1:
        barrier[0] = 0
        _atomic_add(barrier, 1, 1)
        return
    spins = 0
    while _atomic_load(barrier, 1) == round_:
        if _atomic_load(barrier, 2):
            raise RuntimeError("another thread of this update has failed")
        spins += 1
        if spins > _SPINS:
            _yield_core()
