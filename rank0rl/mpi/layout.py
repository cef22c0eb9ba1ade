"""Ranks agree before data moves: `check_layout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.comm import Comm, allgather_obj, world
from rank0rl.mpi.errors import agreed, collective, raised_alone
from rank0rl.mpi.hashes import hash64
from rank0rl.mpi.wait import ARRIVE_S, MOVE_S, wait

Array = npt.NDArray[Any]

_NUMBERS = 32  # numbers that fit into the same message as the hashes


@collective
def check_layout(
    layout: Mapping[str, str],
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
        layout: name -> description of what is there, such as "float32 (17,)".
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
    comm = comm or world()
    if comm is None:
        if problem:
            raise agreed(ValueError(f"{what}: {problem}"))
        return np.array([numbers], np.int64)
    count = -1 if or_nothing and not layout else len(numbers)
    errors = raised_alone()
    head = [hash64((what, len(errors))), hash64(sorted(layout.items())), len(problem), count]
    padding = [-1] * (_NUMBERS - len(numbers))  # one length, whatever the layouts are
    mine = np.array([*head, *numbers[:_NUMBERS], *padding], np.int64)
    messages = np.empty((comm.size, mine.size), np.int64)
    wait(comm, what, comm.Iallgather(mine, messages), spin_s=ARRIVE_S)
    calls, layouts, problems, counts = zip(*messages[:, :4].tolist(), strict=True)
    distinct = {layout for layout, n in zip(layouts, counts, strict=True) if n >= 0}
    if len(set(calls)) > 1 or len(distinct) > 1 or any(problems):
        answer = _Answer(what, dict(layout), problem, errors)
        answers = allgather_obj(answer, what, comm)
        raise agreed(ValueError(f"{what}: {_disagreement(answers, same, or_nothing)}"))
    count = max(0, *counts)
    if count <= _NUMBERS:
        return messages[:, 4 : 4 + count]
    rest = np.array(numbers[_NUMBERS:] or [-1] * (count - _NUMBERS), np.int64)
    more = np.empty((comm.size, rest.size), np.int64)
    wait(comm, what, comm.Iallgather(rest, more), spin_s=MOVE_S)
    return np.concatenate([messages[:, 4:], more], axis=1)


class _Answer(NamedTuple):
    """Answer of one rank, which tells the others after a disagreement."""

    what: str
    layout: dict[str, str]
    problem: str
    errors: list[str]
    """Errors that it has raised alone."""


def _disagreement(answers: list[_Answer], same: str, or_nothing: bool) -> str:
    """Return a sentence that names the first rank that is wrong or differs from the first one.

    Args:
        answers: answers of every rank.
        same: what a layout describes.
        or_nothing: True if empty layouts are allowed.
    """
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
