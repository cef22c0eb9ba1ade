"""Ranks agree on names, dtypes and shapes before data moves; a disagreement is the same error on every rank."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.comm import Comm, allgather_obj, among
from rank0rl.mpi.wait import ARRIVE_S, MOVE_S, wait
from rank0rl.mpi.world import agreed, collective, raised_alone

Array = npt.NDArray[Any]

SMALL = 256  # bytes that fit into the same message as the hashes
_HEAD = struct.Struct("<qqqq")  # hashes of the call and the layout; lengths of problem and payload
_SIZE = _HEAD.size + SMALL  # of one rank's message, whatever the layout is
_PADDING = bytes(SMALL)


def check_layout(
    layout: Mapping[str, Any],
    what: str,
    problem: str = "",
    same: str = "names, dtypes and trailing shapes",
    comm: Comm | None = None,
    numbers: Sequence[int] = (),
    or_nothing: bool = False,
) -> Array:
    """Raise ValueError unless every rank has the same layout; return the numbers of all ranks.

    Collective: every rank calls this, in the same order.

    Args:
        layout: name -> description of what is there, such as "float32 (17,)": hashable, with a `str`
            that is the same in every process.
        what: name of the collective, for the message.
        problem: what is wrong on this rank; "" if nothing is.
        same: what a layout describes, for the message.
        comm: the ranks; all of the job by default.
        numbers: numbers that the ranks tell each other, equally many on every rank with this layout.
        or_nothing: True if a rank may pass an empty layout instead.

    Returns:
        Numbers of all ranks, (ranks, numbers), int64; -1 for ranks that passed an empty layout.

    Raises:
        ValueError: the same on every rank, naming the rank and the key.
    """
    sent = np.array(numbers, np.int64).tobytes()
    each = exchange(layout, what, sent, problem, same, comm, or_nothing)
    count = max(map(len, each)) // 8
    nothing = np.full(count, -1).tobytes()
    told = b"".join(part or nothing for part in each)
    return np.frombuffer(told, np.int64).reshape(len(each), count)


@collective
def exchange(
    layout: Mapping[str, Any],
    what: str,
    payload: bytes,
    problem: str = "",
    same: str = "names, dtypes and trailing shapes",
    comm: Comm | None = None,
    or_nothing: bool = False,
) -> Sequence[bytes]:
    """Do what `check_layout` does with bytes in place of numbers: return the payloads of all ranks.

    Every rank with this layout passes equally many. Up to `SMALL` of them travel in the same message as
    the layout's hash. The payload of a rank that passed an empty layout is b"".

    Collective: every rank calls this, in the same order.
    """
    comm = among(comm)
    if comm is None:
        if problem:
            raise agreed(ValueError(f"{what}: {problem}"))
        return (payload,)
    errors = raised_alone()
    size = -1 if or_nothing and not layout else len(payload)
    head = _head(what, len(errors), tuple(layout.items()), len(problem), size)
    messages = bytearray(comm.size * _SIZE)
    mine = head + payload[:SMALL] + _PADDING[len(payload) :]
    wait(comm, what, comm.Iallgather(mine, messages), spin_s=ARRIVE_S)
    each = [messages[start : start + _SIZE] for start in range(0, len(messages), _SIZE)]
    if size <= SMALL and not problem and all(part.startswith(head) for part in each):
        end = _HEAD.size + max(size, 0)
        return [bytes(part[_HEAD.size : end]) for part in each]  # in step: the rest takes longer
    calls, layouts, problems, sizes = zip(*map(_HEAD.unpack_from, each), strict=True)
    distinct = {layout for layout, n in zip(layouts, sizes, strict=True) if n >= 0}
    if len(set(calls)) > 1 or len(distinct) > 1 or any(problems):
        answer = _Answer(what, {k: str(v) for k, v in layout.items()}, problem, errors)
        answers = allgather_obj(answer, what, comm)
        raise agreed(ValueError(f"{what}: {_disagreement(answers, same, or_nothing)}"))
    longer = max(0, max(sizes) - SMALL)
    if longer:
        rests = bytearray(comm.size * longer)
        rest = payload[SMALL:] or bytes(longer)
        wait(comm, what, comm.Iallgather(rest, rests), spin_s=MOVE_S)
        each = [part + rests[r * longer : (r + 1) * longer] for r, part in enumerate(each)]
    ends = [_HEAD.size + max(0, n) for n in sizes]
    return [bytes(part[_HEAD.size : end]) for part, end in zip(each, ends, strict=True)]


@lru_cache(maxsize=128)
def _head(
    what: str, errors: int, items: tuple[tuple[str, Any], ...], problem: int, size: int
) -> bytes:
    """Return the head of a message, the same on all ranks in step. The order of the names does not matter."""
    described = sorted((name, str(value)) for name, value in items)
    return _HEAD.pack(_hash64((what, errors)), _hash64(described), problem, size)


def _hash64(value: Any) -> int:
    """Return a hash of a value's repr that fits into a signed 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest()) - (1 << 63)


class _Answer(NamedTuple):
    """The layout of one rank, and its errors alone, told to the others after a disagreement."""

    what: str
    layout: dict[str, str]
    problem: str
    errors: list[str]


def _disagreement(answers: list[_Answer], same: str, or_nothing: bool) -> str:
    """Return a sentence that names the first rank that is wrong or differs from the first one."""
    counts = [len(answer.errors) for answer in answers]
    if len(set(counts)) > 1:
        r = counts.index(max(counts))
        return (
            f"an error on rank {r} alone came before, so that the ranks are no longer in step: "
            f"{answers[r].errors[-1]}; let such an error end the job"
        )
    for r, answer in enumerate(answers):
        if answer.what != answers[0].what:
            return (
                f"all ranks must call the same collective, in the same order: rank 0 is in "
                f"{answers[0].what!r} and rank {r} in {answer.what!r}"
            )
    for r, answer in enumerate(answers):
        if answer.problem:
            return f"rank {r}: {answer.problem}"
    layouts = [(r, a.layout) for r, a in enumerate(answers) if a.layout or not or_nothing]
    r0, first = layouts[0]
    for r, layout in layouts:
        for name in sorted(first.keys() | layout.keys()):
            if first.get(name) != layout.get(name):
                return (
                    f"all ranks must pass the same {same}: {name!r} is "
                    f"{first.get(name, 'missing')} on rank {r0} and "
                    f"{layout.get(name, 'missing')} on rank {r}"
                )
    raise AssertionError("called where the ranks agree")
