"""Learning curves of several seeds at common points, and the interquartile mean over environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rank0rl.run.folder import Array

_POINTS = 500  # points of a curve: more than the width of an axis in pixels
_RESAMPLES = 2000  # bootstrap samples of an interval


@dataclass(frozen=True)
class Curves:
    """The curves of all seeds of one agent in one environment, up to where every seed has come."""

    x: Array
    """Steps or hours, shape (P,)."""
    ret: Array
    """Mean returns at these points, shape (seeds, P)."""


Groups = Mapping[tuple[str, str], Curves]
"""Curves by environment and agent."""


def on_grid(curves: Sequence[tuple[Array, Array]], to_longest: bool = False) -> Curves:
    """Interpolate curves at common points, spread evenly over the range that all curves cover.

    Args:
        curves: for each seed, steps or hours in increasing order and the returns at these points,
            shape (n,) each; n can differ between seeds.
        to_longest: go on to the end of the longest curve; the others keep their last return.

    Raises:
        ValueError: if no range is covered by all curves.
    """
    ends = [x[-1] for x, _ in curves]
    low, high = max(x[0] for x, _ in curves), max(ends) if to_longest else min(ends)
    if low > high:
        raise ValueError(
            f"the seeds of one agent must overlap: one curve begins at {low:,.6g}, another ends at "
            f"{high:,.6g}; leave one out, or wait until the shorter run has come further"
        )
    x = np.linspace(low, high, _POINTS)
    return Curves(x, np.stack([np.interp(x, *curve) for curve in curves]))


def interquartile_means(groups: Groups) -> dict[str, tuple[float, float, float]]:
    """Compute each agent's interquartile mean of normalized scores, with a 95 % interval.

    The score of one seed in one environment is (final - start) / (best - start). "final" is the
    return at the end of its curve, "start" is the mean return at the beginning of all curves, and
    "best" is the highest mean of "final" over the agents. The interquartile mean is the mean of the
    middle half of all scores. Its interval comes from a bootstrap that draws seeds within each
    environment.

    An environment counts if every agent has two or more seeds there and the best agent has
    improved.

    Returns:
        Agent -> (mean, low end, high end); {} if fewer than two environments count.

    Source: Agarwal et al. 2021, arXiv:2108.13264, sections 4.1 and 4.3.
    """
    agents = sorted({agent for _, agent in groups})
    scores: dict[str, list[Array]] = {agent: [] for agent in agents}
    for env_id in sorted({env_id for env_id, _ in groups}):
        rets = {agent: groups[env_id, agent].ret for agent in agents if (env_id, agent) in groups}
        start = np.concatenate([ret[:, 0] for ret in rets.values()]).mean()
        gain = max(ret[:, -1].mean() for ret in rets.values()) - start
        if len(rets) == len(agents) and min(map(len, rets.values())) > 1 and gain > 0:
            for agent, ret in rets.items():
                scores[agent].append((ret[:, -1] - start) / gain)
    if len(scores[agents[0]]) < 2:
        return {}
    return {agent: interquartile_mean(of_agent) for agent, of_agent in scores.items()}


def interquartile_mean(scores: Sequence[Array]) -> tuple[float, float, float]:
    """Compute the interquartile mean of scores, and its 95 % interval: (mean, low end, high end).

    Args:
        scores: for each environment, the scores of its seeds, shape (seeds,).
    """
    rng = np.random.default_rng(0)
    drawn = [s[rng.integers(len(s), size=(_RESAMPLES, len(s)))] for s in scores]
    low, high = np.percentile(_middle_mean(np.concatenate(drawn, axis=1)), [2.5, 97.5])
    return float(_middle_mean(np.concatenate(scores))), float(low), float(high)


def _middle_mean(scores: Array) -> Any:
    """Average the last axis without the lowest and the highest quarter, each rounded down."""
    cut = scores.shape[-1] // 4
    return np.sort(scores)[..., cut : scores.shape[-1] - cut].mean(-1)
