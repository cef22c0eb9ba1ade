"""The ranks, and arrays between them. The only file that imports mpi4py, and only where there is more than one rank.

Three rules hold for everything here. Every wait sleeps, so that rank 0 has all cores for its update.
Ranks agree on the layout before data moves, and a disagreement raises the same error on every rank.
An array travels as rows of opaque bytes, so that every dtype and shape works and nothing is pickled.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import pickle
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rank0rl import job, launch

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.MPI import Intracomm

Comm: TypeAlias = "Intracomm"
Array = npt.NDArray[Any]

rank: int
nworkers: int

_ARRIVE_S = 50e-6  # tests before the first sleep, while the other ranks may be long in coming
_MOVE_S = 0.2  # the same, once all ranks are known to be there and only bytes are missing
_TESTS = 4  # between two sleeps: one may complete no more than one step of a collective
_MISMATCH_S = 8.0  # longer than the supervisor takes to find out
_END_TAG = 32_000  # MPI promises tags up to 32,767
_NUMBERS = 32  # that travel with the layout's hash, in one message
_CHUNK = 1 << 30  # bytes of one message: MPI counts are 32-bit integers

_windows: list[MPI.Win] = []  # to free in the end


def __getattr__(name: str) -> int:
    """`rank` and `nworkers`: of this process in the job, 0 and 1 in a single process. Read lazily."""
    if name == "rank":
        return get_rank()
    if name == "nworkers":
        return get_nworkers()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


@cache
def hosts() -> tuple[str, ...]:
    """The name of every rank's host, in rank order.

    Collective: every rank calls this, in the same order; after the first time nothing is sent.
    """
    comm, mine = world(), platform.node()
    return tuple(everyones(mine, "hosts", comm)) if comm else (mine,)


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


def abort(code: int) -> None:
    """End the whole job at once with this exit code. Any one rank may call it."""
    sys.stdout.flush()
    sys.stderr.flush()
    comm = world()
    if comm is None or job.folder():
        os._exit(code)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI's own words on an abort say nothing new
    comm.Abort(code)


def barrier(comm: Comm | None = None) -> None:
    """Wait, asleep, until every rank is here.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm:
        _wait(comm, "barrier", comm.Ibarrier(), spin_s=_ARRIVE_S)


def share(value: Any, comm: Comm | None = None) -> Any:
    """A small object of rank 0 (settings, a message), on every rank. Arrays go through `bcast_`.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm is None:
        return value
    data = bytearray(pickle.dumps(value) if comm.rank == 0 else b"")
    size = np.array([len(data)])
    _wait(comm, "share", comm.Ibcast(size), spin_s=_ARRIVE_S)
    data = data or bytearray(size[0])
    _wait(comm, "share", comm.Ibcast(data), spin_s=_MOVE_S)
    return pickle.loads(data)


def bcast(array: Any, comm: Comm | None = None) -> Array:
    """A copy of an array of rank 0, on every rank; what the other ranks pass is ignored.

    Collective: every rank calls this, in the same order.

    Args:
        array: on rank 0, of any dtype but object, or what makes one, such as a list of numbers.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, if rank 0 has something else.
    """
    comm = comm or world()
    out: Array = np.empty(0)
    told: Any = None
    if get_rank(comm) == 0:
        try:
            out = np.array(array, order="C")
            problem = "" if not out.dtype.hasobject else f"got {type(array).__name__}"
        except (TypeError, ValueError, RuntimeError) as error:
            problem = str(error)
        told = out.shape, out.dtype, problem
    shape, dtype, problem = share(told, comm)
    if problem:
        raise ValueError(
            f"bcast: rank 0 must have an array of a dtype other than object: {problem}; make it one"
        )
    out = out if get_rank(comm) == 0 else np.empty(shape, dtype)
    bcast_(out, comm)
    return out


def bcast_(array: Array, comm: Comm | None = None, root: int = 0) -> None:
    """Overwrite a C-contiguous array, in place, with the root's of the same shape and dtype.

    Collective: every rank calls this, in the same order, with the same root.
    """
    comm = comm or world()
    if comm is None:
        return
    raw = array.reshape(-1).view(np.uint8)
    for start in range(0, raw.size, _CHUNK):
        _wait(comm, "bcast", comm.Ibcast(raw[start : start + _CHUNK], root), spin_s=_MOVE_S)


def agree(
    layout: Mapping[str, str],
    what: str,
    problem: str = "",
    same: str = "names, dtypes and trailing shapes",
    comm: Comm | None = None,
    numbers: Sequence[int] = (),
    or_nothing: bool = False,
) -> Array:
    """Go on only if every rank comes with the same layout.

    Collective: every rank calls this, in the same order.

    Args:
        layout: name -> description of what is there, such as "float32 (17,)".
        what: what disagrees, for the message.
        problem: what is wrong with this rank's part, if anything is.
        same: what a layout stands for, for the message.
        comm: the ranks; all of the job by default.
        numbers: what else the ranks want to know of each other, as many on every rank that comes
            with this layout.
        or_nothing: whether a rank may come with an empty layout instead.

    Returns:
        The numbers of all ranks, (ranks, numbers), int64; -1 for ranks that came with nothing.

    Raises:
        ValueError: the same on every rank, naming the rank and the key.
    """
    comm = comm or world()
    if comm is None:
        if problem:
            raise ValueError(f"{what}: {problem}")
        return np.array([numbers], np.int64)
    count = -1 if or_nothing and not layout else len(numbers)
    head = [_hash(what), _hash(sorted(layout.items())), len(problem), count]
    padding = [-1] * (_NUMBERS - len(numbers))  # to one length, whatever the layouts are
    mine = np.array([*head, *numbers[:_NUMBERS], *padding], np.int64)
    everyone = np.empty((comm.size, mine.size), np.int64)
    _wait(comm, what, comm.Iallgather(mine, everyone), spin_s=_ARRIVE_S)
    heads = everyone[:, :4].tolist()
    calls, layouts, problems, counts = zip(*heads, strict=True)
    came = {layout for layout, n in zip(layouts, counts, strict=True) if n >= 0}
    if len(set(calls)) == 1 and len(came) <= 1 and not any(problems):
        count = max(0, *counts)
        if count <= _NUMBERS:
            return everyone[:, 4 : 4 + count]
        rest = np.array(numbers[_NUMBERS:] or [-1] * (count - _NUMBERS), np.int64)
        more = np.empty((comm.size, rest.size), np.int64)
        _wait(comm, what, comm.Iallgather(rest, more), spin_s=_MOVE_S)
        return np.concatenate([everyone[:, 4:], more], axis=1)
    parts = everyones((what, dict(layout), problem), what, comm)
    raise ValueError(f"{what}: {_disagreement(parts, same, or_nothing)}")


def everyones(value: Any, what: str, comm: Comm | None = None) -> list[Any]:
    """A small object of every rank, on every rank. Arrays go through `gather`.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm is None:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    _wait(comm, what, comm.Iallgather(np.array([data.size]), sizes), spin_s=_ARRIVE_S)
    everyone = np.empty(sizes.sum(), np.uint8)
    _wait(comm, what, comm.Iallgatherv(data, [everyone, sizes]), spin_s=_MOVE_S)
    return [pickle.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(sizes)[:-1])]


def gather(
    arrays: Sequence[Array], counts: Array, what: str, comm: Comm, to_all: bool = False
) -> list[Array]:
    """Rows of all ranks, in rank order, on rank 0; no rows on the other ranks.

    Collective: every rank calls this, in the same order, after `agree`.

    Args:
        arrays: of one or more axes; all but the first, and the dtype, are the same on every rank.
        counts: rows of each rank and array, (ranks, arrays).
        what: the name of the collective.
        comm: the ranks.
        to_all: whether every rank gets the rows.

    Raises:
        ValueError: the same on every rank, if there are more rows than MPI can count.
    """
    if counts.size and counts.sum(axis=0).max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"{what}: MPI counts up to {np.iinfo(np.int32).max} rows in one array: got "
            f"{counts.sum(axis=0).max()}; make them rows of more numbers each"
        )
    parts = [_Gather(a, counts[:, i], comm, to_all) for i, a in enumerate(arrays)]
    _wait(comm, what, *[part.request for part in parts], spin_s=_MOVE_S)
    for part in parts:
        part.row.Free()
    return [part.out for part in parts]


def reduce_(arrays: Sequence[Array], op: str, what: str, comm: Comm | None = None) -> None:
    """Overwrite C-contiguous arrays, in place, with one of all ranks', element by element.

    Every rank gets the same bits. How they are rounded depends on the number of ranks.

    Collective: every rank calls this, in the same order, with arrays of the same lengths and dtypes.

    Args:
        arrays: of dtypes that MPI can compute with: integers, float32, float64, long double, and
            complex numbers of these.
        op: "sum", "prod", "max" or "min".
        what: the name of the collective.
        comm: the ranks; all of the job by default.
    """
    comm = comm or world()
    if comm is None:
        return
    from mpi4py import MPI

    operation = getattr(MPI, op.upper())
    requests = [
        comm.Iallreduce(MPI.IN_PLACE, array.reshape(-1)[start : start + step], operation)
        for array in arrays
        for step in [_CHUNK // array.itemsize]
        for start in range(0, array.size, step)
    ]
    _wait(comm, what, *requests, spin_s=_MOVE_S)


def split(color: int, comm: Comm | None = None) -> Comm | None:
    """The ranks that come with the same color, as a communicator; None in a single process.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm is None:
        return None
    from mpi4py import MPI

    return MPI.Intracomm(comm.Split(color, comm.rank))


class Tickets:
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
            _windows.append(self._window)
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


class _Gather:
    """One array on its way, in units of rows: byte counts would overflow MPI's integers."""

    def __init__(self, array: Array, counts: Array, comm: Comm, to_all: bool) -> None:
        from mpi4py import MPI

        trailing = array.shape[1:]
        receives = to_all or comm.rank == 0
        self.out = np.empty((int(counts.sum()) if receives else 0, *trailing), array.dtype)
        self.part = np.ascontiguousarray(array)
        row_bytes = array.dtype.itemsize * int(np.prod(trailing))
        self.row = MPI.BYTE.Create_contiguous(row_bytes).Commit()
        displacements = np.concatenate([[0], np.cumsum(counts)[:-1]])
        send = [self.part, len(array), self.row]
        receive = [self.out, (counts, displacements), self.row] if receives else None
        self.request = (
            comm.Iallgatherv(send, receive) if to_all else comm.Igatherv(send, receive, root=0)
        )


def _hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest()) - (1 << 63)


def _disagreement(
    everyone: list[tuple[str, dict[str, str], str]], same: str, or_nothing: bool
) -> str:
    """One sentence that names the first rank that is wrong or differs from the first one."""
    what = everyone[0][0]
    for r, (other, _, _) in enumerate(everyone):
        if other != what:
            return (
                f"all ranks must call the same collective, in the same order: rank 0 is in {what!r} "
                f"and rank {r} in {other!r}"
            )
    for r, (_, _, problem) in enumerate(everyone):
        if problem:
            return f"rank {r}: {problem}"
    came = [(r, part[1]) for r, part in enumerate(everyone) if part[1] or not or_nothing]
    r0, first = came[0]
    for r, layout in came:
        for name in sorted(first.keys() | layout.keys()):
            if first.get(name) != layout.get(name):
                return (
                    f"all ranks must come with the same {same}: {name!r} is "
                    f"{first.get(name, 'missing')} on rank {r0} and "
                    f"{layout.get(name, 'missing')} on rank {r}"
                )
    raise AssertionError("called where the ranks agree")


def _wait(comm: Comm, name: str, *requests: MPI.Request, spin_s: float) -> None:
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
