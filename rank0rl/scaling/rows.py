"""Measured rows of a speedup study: one for each number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SHARED = ("collect", "process")
"""Phases that are spread over all ranks."""


@dataclass(frozen=True)
class Work:
    """The ways in which a run spreads its work over ranks."""

    overlap: bool = False
    """True if rank 0 updates while the other ranks collect."""
    rank0_envs: bool = False
    """True if the user chose how many envs rank 0 has."""
    episodes: bool = False
    """True if batches are whole episodes, which ranks take as they become free."""


@dataclass(frozen=True)
class Row:
    """Measured figures of one number of ranks."""

    nprocs: int
    steps_per_s: float
    steps_per_s_min: float
    steps_per_s_max: float
    seconds: float
    """Mean seconds of one iteration."""
    phases: Mapping[str, float]
    """Seconds of an iteration on rank 0, by phase."""
    slowest_s: float
    """Seconds of an iteration in which the slowest rank collects and processes."""
    fastest_s: float
    """The same for the fastest rank."""
    bare_steps_per_s: float
    """Steps per second of as many processes that only call `env.step`, summed; nan if unknown."""
    return_mean: float
    memory_mb: float
    """Peak memory of all ranks together, in MB."""
    step_fractions: tuple[float, float]
    """Fractions of an iteration's steps: rank 0's, and the largest that another rank has to make."""
    oversubscribed: bool = False
    """True if there are more ranks than cores."""
    columns: dict[str, float] = field(default_factory=dict)
    """Columns that `ceiling.compare` adds: "speedup", "efficiency", "ceiling", "expected"."""

    def fraction(self, *phases: str) -> float:
        """Return the fraction of the iteration that these phases take."""
        return sum(self.phases[phase] for phase in phases) / self.seconds


def step_fractions(
    nprocs: int, envs: Sequence[int], longest_episode: float | None = None
) -> tuple[float, float]:
    """Return rank 0's fraction of an iteration's steps, and the largest fraction of another rank.

    Args:
        nprocs: number of ranks.
        envs: number of envs of each rank.
        longest_episode: in whole-episode batches, the longest episode's fraction of the batch's steps.
            Ranks take episodes as they become free, but one rank has to make all of that episode.
    """
    if longest_episode is not None:
        least = max(1 / nprocs, min(1.0, longest_episode))
        return least, least
    return envs[0] / sum(envs), max(envs[1:], default=0) / sum(envs)


def within_cores(rows: Sequence[Row]) -> Row:
    """Return the row with the most ranks that do not outnumber the cores; else the first row."""
    return ([row for row in rows if not row.oversubscribed] or rows[:1])[-1]
