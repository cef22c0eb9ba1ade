"""The one place where ranks wait for each other: asleep, so that rank 0 has all cores."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rank0rl.launch import job
from rank0rl.mpi.world import Comm, leaders, leave_if_told

if TYPE_CHECKING:
    from mpi4py import MPI

ARRIVE_S = 50e-6  # test before the first sleep, when the other ranks may arrive much later
MOVE_S = 0.2  # the same when all ranks are known to be there, and only bytes are missing
_AT_ONCE = 8  # tests of a wait that is over before it has begun, as it is where ranks are in step
_RECORD_S = 20e-6  # wait before it is recorded: what is over sooner is not worth the time
_TESTS = 4  # between two sleeps: one test may complete no more than one step of a collective
_MISMATCH_S = 8.0  # longer than the supervisor takes to find out


def wait(
    comm: Comm, name: str, *requests: MPI.Request, spin_s: float, limit_s: float | None = None
) -> None:
    """Complete requests: test them without a pause for spin_s, then with sleeps that grow to 1 ms.

    Measured on 2 cores, rank 0 multiplying matrices while 7 ranks wait: 1.6 s this way, 9.8 s with
    blocking calls, which spin.

    Args:
        comm: the ranks that wait for each other.
        name: name of the collective, for the report on ranks that cannot go on.
        requests: requests to complete.
        spin_s: seconds before the first sleep.
        limit_s: seconds to wait at most. None: the `collective_timeout` of `mpi_fork`, if there is one.

    Raises:
        TimeoutError: after the limit.
    """
    ranks = leaders()
    recorded = comm is ranks or comm == ranks  # others may be called in any order
    if recorded:
        job.collective_recorder().begin(name)
    try:
        for _ in range(_AT_ONCE):
            if _test(requests):
                break
        else:
            _wait_longer(requests, name, spin_s, recorded, limit_s)
    except RuntimeError:  # mpi4py's error is one
        # If ranks are in different collectives, some MPIs never complete them, and others raise in
        # one rank or another. The supervisor, which sees all ranks, then gets the time to report it.
        if recorded:
            job.collective_recorder().wait()
        end = time.monotonic() + _MISMATCH_S
        while job.my_folder() and not job.failed() and time.monotonic() < end:
            time.sleep(0.05)
        raise
    if recorded:
        job.collective_recorder().end()


def _wait_longer(
    requests: Sequence[MPI.Request],
    name: str,
    spin_s: float,
    recorded: bool,
    limit_s: float | None,
) -> None:
    """Complete requests that were not complete at once."""
    begin, most_s = time.perf_counter(), _timeout_s() if limit_s is None else limit_s
    if threading.current_thread() is not threading.main_thread():
        spin_s = 0.0  # another thread of this rank has work to do
    for until_s in (min(spin_s, _RECORD_S), spin_s):
        while time.perf_counter() - begin < until_s:
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            if _test(requests):
                return
        if recorded:
            job.collective_recorder().wait()
    pause = 20e-6
    while not any(_test(requests) for _ in range(_TESTS)):
        if time.perf_counter() - begin > most_s:
            raise TimeoutError(
                f"{name}: the other ranks did not come within {most_s:g} s; raise the "
                f"collective timeout if they were still working"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
        leave_if_told()


def _test(requests: Sequence[MPI.Request]) -> bool:
    """Return True if all requests are complete."""
    for request in requests:  # noqa: SIM110 - `all` takes twice the time
        if not request.Test():
            return False
    return True


@functools.cache
def _timeout_s() -> float:
    return float(os.environ.get(job.TIMEOUT, "inf"))
