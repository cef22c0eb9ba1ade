"""Numbers that may change in the course of a run: 0.01, linear:0.01:0 or cosine:0.01:0.001."""

from __future__ import annotations

import math
from typing import TypeAlias

Scheduled: TypeAlias = float | str
"""A constant; or a schedule, "linear:START:END" or "cosine:START:END", over the whole run."""


def at(number: Scheduled, progress: float) -> float:
    """Return a number as it is now.

    Args:
        number: a constant or a schedule.
        progress: share of the run that is over, in [0, 1).

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5 (cosine).
    """
    if not isinstance(number, str):
        return number
    shape, start, end = parse(number)
    done = progress if shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return start * (1 - done) + end * done


def changing(progress: float, **numbers: Scheduled) -> dict[str, float]:
    """Return those of these numbers that change, as they are now, for an agent's record."""
    return {name: at(x, progress) for name, x in numbers.items() if isinstance(x, str)}


def parse(schedule: str) -> tuple[str, float, float]:
    """Return the shape of a schedule, its first and its last number.

    Raises:
        ValueError: if it is none.
    """
    shape, *ends = schedule.split(":")
    try:
        start, end = map(float, ends)
        if shape in ("linear", "cosine"):
            return shape, start, end
    except ValueError:  # not two numbers
        pass
    raise ValueError(
        f"expected a number, linear:START:END or cosine:START:END, such as linear:3e-4:0: got "
        f"{schedule!r}"
    )
