"""The columns of a run's record that are made of episodes, evaluations and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rank0rl.batch import Batch
from rank0rl.envs.retry import FAILURES
from rank0rl.run.state import Progress
from rank0rl.run.timing import PHASES

NOT_OF_THE_CURVE = frozenset(
    {
        *("seconds", "steps_per_s", "slowest_s", "fastest_s", "memory_mb"),
        *(f"{phase}_s" for phase in PHASES),
        *FAILURES,
    }
)
"""Columns that two runs with the same curve may differ in."""


def of_episodes(progress: Progress, ended: Batch) -> dict[str, float]:
    """Return the figures of the last episodes, and the longest episode of this iteration."""
    return {
        **_spread("return", progress.returns),
        "length_mean": mean(progress.lengths),
        "longest": float(max(ended["length"], default=np.nan)),
    }


def of_infos(progress: Progress) -> dict[str, float]:
    """Return the means of what --info names over the last episodes; nan where none of them had it."""
    return {f"{name}_mean": known_mean(values) for name, values in progress.infos.items()}


def _spread(name: str, values: Any) -> dict[str, float]:
    """Return mean, standard deviation and extremes; nan where there are no values."""
    some = values if len(values) else [float("nan")]
    return {
        f"{name}_mean": mean(values),
        **{f"{name}_{of.__name__}": float(of(some)) for of in (np.std, np.min, np.max)},
    }


def of_evaluation(evaluated: Batch | None, infos: Sequence[str]) -> dict[str, float | str]:
    """Return the columns of an evaluation, empty in an iteration without one.

    Args:
        evaluated: its episodes.
        infos: labels of their figures.
    """
    if evaluated is None:
        columns = ("return", "return_std", "length", *infos)
        return {f"eval_{name}": "" for name in columns}
    return {
        "eval_return": mean(evaluated["return"]),
        "eval_return_std": float(np.std(evaluated["return"])),
        "eval_length": mean(evaluated["length"]),
        **{f"eval_{name}": known_mean(evaluated[name]) for name in infos},
    }


def of_failures(told: Mapping[str, Any], columns: Sequence[str]) -> dict[str, float]:
    """Return the failures of environments; nothing in a run that began without an option to survive them."""
    if FAILURES[0] not in (columns or told):
        return {}
    return {name: float(told[name].sum()) if name in told else 0.0 for name in FAILURES}


def of_ranks(told: Mapping[str, Any]) -> dict[str, float]:
    """Return how unequally the ranks work, and the memory of all of them."""
    return {
        "slowest_s": float(told["took_s"].max()),
        "fastest_s": float(told["took_s"].min()),
        "memory_mb": float(told["peak_mb"].sum()),
    }


def mean(values: Any) -> float:
    """Return the mean, nan if there are no values."""
    return float(np.mean(values)) if len(values) else float("nan")


def known_mean(values: Any) -> float:
    """Return the mean of the values that are not nan; nan if there are none."""
    return mean([value for value in values if not np.isnan(value)])
