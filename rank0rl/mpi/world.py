"""The ranks of the job, from MPI's beginning to its end, and how they wait for each other: asleep.

MPI is loaded only where there is more than one rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from rank0rl.mpi import job, launch

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.MPI import Intracomm

Comm: TypeAlias = "Intracomm"

ARRIVE_S = 50e-6  # tests before the first sleep, while the other ranks may be long in coming
MOVE_S = 0.2  # the same, once all ranks are known to be there and only bytes are missing
_TESTS = 4  # between two sleeps: one may complete no more than one step of a collective
_MISMATCH_S = 8.0  # longer than the supervisor takes to find out
_SAID_S = 0.2  # a launcher has to pass on what was said: some drop it when they end
_END_TAG = 32_000  # MPI promises tags up to 32,767

_windows: list[MPI.Win] = []


@cache
def world() -> Comm | None:
    """All ranks of the job; None in a single process, where MPI is never loaded.

    Raises:
        WrongLaunch: if MPI sees another number of ranks than the launcher started, as when mpi4py
            belongs to another MPI than mpiexec: n silent trainings of one rank each are no job.
    """
    size = job.world_size()
    if size is None or size == 1:
        return None
    job.meets()
    import mpi4py

    ours = "mpi4py.MPI" not in sys.modules
    if ours:
        mpi4py.rc.finalize = False  # a rank that ends early would wait there: see _leave
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # which says on stderr that it found no network
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of another MPI's launcher: said below
        from mpi4py import MPI

    job.met()
    comm = MPI.COMM_WORLD
    asked = job.asked() or size
    if not comm.size == size == asked:
        raise job.WrongLaunch(
            f"every rank must see the whole job: {asked} ranks were asked for, the launcher "
            f"started {size}, and MPI sees {comm.size}; mpiexec and mpi4py must belong to the same "
            f"MPI (here {MPI.Get_library_version().splitlines()[0]}): pip install mpi4py mpich"
        )
    if job.folder() is None:
        sys.excepthook = _end_job
    atexit.register(_leave, comm, ours)
    return comm


def get_rank(comm: Comm | None = None) -> int:
    """This process's number among the ranks, from 0."""
    comm = comm or world()
    return comm.rank if comm else 0


def get_nworkers(comm: Comm | None = None) -> int:
    """Number of ranks."""
    comm = comm or world()
    return comm.size if comm else 1


def print0(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, nothing on the other ranks."""
    if get_rank() == 0:
        print(*args, **kwargs)


def mpi_version() -> str:
    """Name and version of the MPI library; "none" in a single process."""
    if world() is None:
        return "none"
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].split())


def has_threads() -> bool:
    """Whether several threads of a rank may send and receive."""
    if world() is None:
        return True
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def abort(code: int) -> None:
    """End the whole job at once with this exit code. Any one rank may call it."""
    sys.stdout.flush()
    sys.stderr.flush()
    comm = world()
    if comm is None or job.folder():
        os._exit(code)
    time.sleep(_SAID_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI's own words on an abort say nothing new
    comm.Abort(code)


def split(color: int, comm: Comm | None = None) -> Comm | None:
    """The ranks that come with the same color, as a communicator; None in a single process.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm is None:
        return None
    from mpi4py import MPI

    return MPI.Intracomm(comm.Split(color, comm.rank))


@dataclass(frozen=True)
class Nodes:
    """The ranks of a communicator by node, that is, by who has memory in common."""

    inner: Comm
    """The ranks of this rank's node."""
    outer: Comm | None
    """The first rank of every node; None on the others."""
    starts: list[int]
    """These ranks, ascending."""


def nodes(comm: Comm) -> Nodes | None:
    """The nodes of these ranks; None where to distinguish them has no use.

    That is on one node, with one rank a node, or where ranks of a node are no neighbours.

    Collective: every rank calls this, in the same order. The first call for a communicator is a wait
    that does not sleep; after it nothing is sent. Between nodes, the communicator is to last as long
    as the job: what belongs to it stays.
    """
    from mpi4py import MPI

    found: Any = comm.Get_attr(_nodes_key())
    if found is None:
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
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def wait(comm: Comm, name: str, *requests: MPI.Request, spin_s: float) -> None:
    """Complete requests: test without pause for spin_s, then with sleeps that grow to a millisecond.

    Measured on 2 cores, rank 0 multiplying matrices while 7 ranks wait: 1.6 s this way, 9.8 s with
    blocking calls, which spin.

    Args:
        comm: the ranks that wait for each other.
        name: of the collective, for the report on ranks that wait for what will not come.
        requests: to complete.
        spin_s: seconds before the first sleep.

    Raises:
        TimeoutError: after as many seconds as `mpi_fork` was told, if it was told any.
    """
    pending = list(requests)
    in_order = comm == world()  # ranks need not agree on the order of other communicators' calls
    if in_order:
        _waits().begin(name)
    begin = time.perf_counter()
    if threading.current_thread() is not threading.main_thread():
        spin_s = 0.0  # another thread of this rank has work to do
    while not (done := _test(pending)) and time.perf_counter() - begin < spin_s:
        os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
    pause = 20e-6
    while not (done or any(_test(pending) for _ in range(_TESTS))):
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
        if time.perf_counter() - begin > _timeout_s():
            raise TimeoutError(f"{name}: the other ranks did not come within {_timeout_s():g} s")
    if in_order:
        _waits().end()


def free_at_end(window: MPI.Win) -> None:
    """Unlock and free a window when all ranks have come to the end."""
    _windows.append(window)


def _test(requests: list[MPI.Request]) -> bool:
    """Whether they are complete.

    Where ranks are in different collectives, some MPIs never complete them and others raise, in one
    rank or another. Then the supervisor, which sees all of them, is given the time to say so.
    """
    from mpi4py import MPI

    try:
        return MPI.Request.Testall(requests)
    except MPI.Exception:
        end = time.monotonic() + _MISMATCH_S
        while job.folder() and not job.failed() and time.monotonic() < end:
            time.sleep(0.05)
        raise


@cache
def _waits() -> job.Waits:
    return job.Waits()


@cache
def _timeout_s() -> float:
    return float(os.environ.get(job.TIMEOUT, "inf"))


def _leave(comm: Comm, finalize: bool) -> None:
    """At the end of the script, wait for the ends of the others; unless one has failed.

    MPI's own end waits as well, but for ever where a rank has left its part out.
    """
    from mpi4py import MPI

    if job.failed():
        return
    # Tagged messages, because a barrier could meet another collective of a rank that is not here.
    _waits().begin(job.END)
    others = range(1, comm.size) if comm.rank == 0 else range(1)
    for way in (comm.Irecv, comm.Isend) if comm.rank == 0 else (comm.Isend, comm.Irecv):
        requests = [way(bytearray(1), rank, _END_TAG) for rank in others]
        while not MPI.Request.Testall(requests):
            time.sleep(1e-3)
            if job.failed():
                return
    for window in _windows:
        window.Unlock_all()
        window.Free()
    if finalize:
        MPI.Finalize()
    job.ended()


def _end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without a supervisor, an uncaught exception on one rank ends the job here."""
    launch.report(kind, error, trace)
    abort(1)
