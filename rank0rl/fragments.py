"""Cut what an env did into a fragment, and refuse numbers in it from which nobody can learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.agent import Fragment
from rank0rl.batch import Batch, take

Array = npt.NDArray[Any]


class End(NamedTuple):
    """The end of an episode in a fragment, or the end of the fragment within an episode."""

    t: int
    """Its last step in the fragment."""
    obs: Array
    """Observation after it, (*obs)."""
    seed: int
    """Seed of the episode."""
    length: int
    """Steps of the episode so far, those in earlier fragments included."""
    memory: Array
    """The agent's memory after it, (m,)."""


def cut(fragment_id: int, rows: Batch, ends: Sequence[End]) -> Fragment:
    """Return the fragment with these rows, (T, ...) each, in which these episodes end.

    Rows of no episode are left out: those of an agent that waits for the end of its game.
    """
    known = ("obs", "act", "rew", "terminated", "truncated")
    steps = [min(end.length, end.t + 1) for end in ends]
    if sum(steps) < len(rows["rew"]):
        each = [np.arange(end.t + 1 - n, end.t + 1) for end, n in zip(ends, steps, strict=True)]
        rows = take(rows, np.concatenate(each))
    return Fragment(
        fragment_id=fragment_id,
        end=np.cumsum(steps) - 1,
        end_obs=np.stack([end.obs for end in ends]),
        end_memory=np.stack([end.memory for end in ends]),
        extras={name: array for name, array in rows.items() if name not in known},
        **{name: rows[name] for name in known},
    )


def first_not_finite(fragment: Fragment, ends: Sequence[End]) -> tuple[str, Any, int, int] | None:
    """Find the first nan or infinity among the rewards and observations of a fragment.

    Returns:
        What it is; the action that led to it, None for a reset; the seed of the episode and the
        number of its step. None if all numbers are finite.
    """
    arrays = (fragment.rew, fragment.obs, fragment.end_obs)
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays):
        return None
    for end, steps in zip(ends, fragment.episodes(), strict=True):
        obs = [*fragment.obs[steps], end.obs]
        rew = [0.0, *fragment.rew[steps]]
        act = [None, *fragment.act[steps]]
        first = end.length - len(obs) + 1
        for step, now in enumerate(zip(obs, rew, act, strict=True), first):
            if not np.isfinite(now[1]):
                return f"the reward is {now[1]}", now[2], end.seed, step
            if not np.isfinite(now[0]).all():
                return f"the observation is {now[0]!r:.100}", now[2], end.seed, step
    return None
