"""The ranks, and arrays between them.

Three rules hold for everything here. Every wait sleeps, so that rank 0 has all cores for its update; but for the
first one of a communicator, in which ranks find out who is on their node.
Ranks agree on the layout before data moves, and a disagreement raises the same error on every rank.
An array travels as rows of opaque bytes, so that every dtype and shape works and nothing is pickled.
"""

# ruff: noqa: PLC0414 - what world.py has for everybody is given on under this name

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.hashes import hash64
from rank0rl.mpi.world import ARRIVE_S, MOVE_S, wait
from rank0rl.mpi.world import Comm as Comm
from rank0rl.mpi.world import abort as abort
from rank0rl.mpi.world import get_nworkers as get_nworkers
from rank0rl.mpi.world import get_rank as get_rank
from rank0rl.mpi.world import has_threads as has_threads
from rank0rl.mpi.world import mpi_version as mpi_version
from rank0rl.mpi.world import nodes as nodes
from rank0rl.mpi.world import print0 as print0
from rank0rl.mpi.world import split as split
from rank0rl.mpi.world import world as world

Array = npt.NDArray[Any]

rank: int
nworkers: int

_NUMBERS = 32  # that travel with the layout's hash, in one message
_CHUNK = 1 << 30  # bytes of one message: MPI counts are 32-bit integers


def __getattr__(name: str) -> int:
    """`rank` and `nworkers`: of this process in the job, 0 and 1 in a single process. Read lazily."""
    if name == "rank":
        return get_rank()
    if name == "nworkers":
        return get_nworkers()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def hosts() -> tuple[str, ...]:
    """The name of every rank's host, in rank order.

    Collective: every rank calls this, in the same order; after the first time nothing is sent.
    """
    comm, mine = world(), platform.node()
    return tuple(allgather_obj(mine, "hosts", comm)) if comm else (mine,)


def barrier(comm: Comm | None = None) -> None:
    """Wait, asleep, until every rank is here.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm:
        wait(comm, "barrier", comm.Ibarrier(), spin_s=ARRIVE_S)


def bcast_obj(value: Any, comm: Comm | None = None) -> Any:
    """A small object of rank 0 (settings, a message), on every rank. Arrays go through `bcast_`.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm is None:
        return value
    data = bytearray(pickle.dumps(value) if comm.rank == 0 else b"")
    size = np.array([len(data)])
    wait(comm, "share", comm.Ibcast(size), spin_s=ARRIVE_S)
    data = data or bytearray(size[0])
    wait(comm, "share", comm.Ibcast(data), spin_s=MOVE_S)
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
    shape, dtype, problem = bcast_obj(told, comm)
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
    by_node = nodes(comm) if root == 0 else None
    for start in range(0, raw.size, _CHUNK):
        for level in (by_node.outer, by_node.inner) if by_node else (comm,):
            if level:
                chunk = raw[start : start + _CHUNK]
                wait(level, "bcast", level.Ibcast(chunk, root), spin_s=MOVE_S)


def check_layout(
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
    head = [hash64(what), hash64(sorted(layout.items())), len(problem), count]
    padding = [-1] * (_NUMBERS - len(numbers))  # to one length, whatever the layouts are
    mine = np.array([*head, *numbers[:_NUMBERS], *padding], np.int64)
    everyone = np.empty((comm.size, mine.size), np.int64)
    wait(comm, what, comm.Iallgather(mine, everyone), spin_s=ARRIVE_S)
    heads = everyone[:, :4].tolist()
    calls, layouts, problems, counts = zip(*heads, strict=True)
    came = {layout for layout, n in zip(layouts, counts, strict=True) if n >= 0}
    if len(set(calls)) == 1 and len(came) <= 1 and not any(problems):
        count = max(0, *counts)
        if count <= _NUMBERS:
            return everyone[:, 4 : 4 + count]
        rest = np.array(numbers[_NUMBERS:] or [-1] * (count - _NUMBERS), np.int64)
        more = np.empty((comm.size, rest.size), np.int64)
        wait(comm, what, comm.Iallgather(rest, more), spin_s=MOVE_S)
        return np.concatenate([everyone[:, 4:], more], axis=1)
    parts = allgather_obj((what, dict(layout), problem), what, comm)
    raise ValueError(f"{what}: {_disagreement(parts, same, or_nothing)}")


def allgather_obj(value: Any, what: str, comm: Comm | None = None) -> list[Any]:
    """A small object of every rank, on every rank. Arrays go through `gather`.

    Collective: every rank calls this, in the same order.
    """
    comm = comm or world()
    if comm is None:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    wait(comm, what, comm.Iallgather(np.array([data.size]), sizes), spin_s=ARRIVE_S)
    everyone = np.empty(sizes.sum(), np.uint8)
    wait(comm, what, comm.Iallgatherv(data, [everyone, sizes]), spin_s=MOVE_S)
    return [pickle.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(sizes)[:-1])]


def gather(
    arrays: Sequence[Array], counts: Array, what: str, comm: Comm, to_all: bool = False
) -> list[Array]:
    """Rows of all ranks, in rank order, on rank 0; no rows on the other ranks.

    Between nodes, a node's rows travel together, from its first rank.

    Collective: every rank calls this, in the same order, after `check_layout`.

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
    by_node = None if to_all else nodes(comm)
    receives = to_all or comm.rank == 0
    outs = [_rows(a, n if receives else 0) for a, n in zip(arrays, counts.sum(axis=0), strict=True)]
    if by_node is None:
        _gather_into(outs, arrays, counts, what, comm, to_all)
        return outs
    starts, inner = by_node.starts, by_node.inner
    mine = counts[comm.rank - inner.rank :][: inner.size]
    sums = mine.sum(axis=0)
    if comm.rank == 0:
        near = [out[:n] for out, n in zip(outs, sums, strict=True)]
    else:
        near = [_rows(a, n * (inner.rank == 0)) for a, n in zip(arrays, sums, strict=True)]
    _gather_into(near, arrays, mine, what, inner)
    if by_node.outer:
        _gather_into(outs, near, np.add.reduceat(counts, starts), what, by_node.outer)
    return outs


def _rows(like: Array, n: int) -> Array:
    return np.empty((n, *like.shape[1:]), like.dtype)


def _gather_into(
    outs: Sequence[Array],
    arrays: Sequence[Array],
    counts: Array,
    what: str,
    comm: Comm,
    to_all: bool = False,
) -> None:
    """Move rows to where they belong; rank 0's may be there already."""
    from mpi4py import MPI

    requests, rows, kept = [], [], []
    for i, (array, out) in enumerate(zip(arrays, outs, strict=True)):
        # Units of rows, because byte counts would overflow MPI's integers.
        row = MPI.BYTE.Create_contiguous(array.dtype.itemsize * int(np.prod(array.shape[1:])))
        rows.append(row.Commit())
        displacements = np.concatenate([[0], np.cumsum(counts[:, i])[:-1]])
        receive = [out, (counts[:, i], displacements), row]
        part = np.ascontiguousarray(array)
        kept.append(part)  # until it is sent
        if to_all:
            requests.append(comm.Iallgatherv([part, len(part), row], receive))
        elif comm.rank:
            requests.append(comm.Igatherv([part, len(part), row], None))
        else:
            there = array.base is out
            send = MPI.IN_PLACE if there else [part, len(part), row]
            requests.append(comm.Igatherv(send, receive))
    wait(comm, what, *requests, spin_s=MOVE_S)
    for row in rows:
        row.Free()


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
    wait(comm, what, *requests, spin_s=MOVE_S)


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
