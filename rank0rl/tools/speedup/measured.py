"""The measured figures of each number of ranks, the speedup that they allow, and advice.

An iteration on n ranks consists of what all ranks share (collecting and processing), and of what rank 0
does while the others sleep or, with overlap, collect. Envs and whole episodes cannot be cut in two, so
the largest fraction may be more than 1 / n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rank0rl.run.usage import PHASES

_SHARED = ("collect", "process")  # phases that are spread over all ranks


Settings = Mapping[str, Any]
"""The settings of a run that say how it spreads its work: overlap, rank0_envs and episodes_per_batch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one number of ranks: the columns of speedup.csv, in this order, and what they follow from."""

    nprocs: int
    speedup: float = math.nan  # over the first row; `compare` fills in these four
    efficiency: float = math.nan  # speedup per rank
    ceiling: float = math.nan  # speedup that the phases of the first row allow
    expected: float = math.nan  # the ceiling, with processes that slow each other down
    steps_per_s: float
    steps_per_s_min: float
    steps_per_s_max: float
    bare_steps_per_s: float  # of processes that only call `env.step`, summed; nan if unknown
    return_mean: float
    memory_mb: float  # peak of all ranks together
    oversubscribed: bool = False  # True if there are more ranks than cores
    seconds: float  # of one iteration, mean
    slowest_s: float  # of an iteration, in which the slowest rank collects and processes
    fastest_s: float  # the same for the fastest rank
    phases: Mapping[str, float]  # phase -> seconds of an iteration on rank 0
    step_fractions: tuple[float, float]  # of a batch: rank 0's steps, and the most of another rank

    def fraction(self, *phases: str) -> float:
        """Return the fraction of the iteration that these phases take."""
        return sum(self.phases[phase] for phase in phases) / self.seconds

    @property
    def unaccounted(self) -> float:
        """Fraction of the wall time that belongs to no phase."""
        return 1 - self.fraction(*PHASES)

    def slowdown(self, first: Row) -> float:
        """Return how many times as long a bare `env.step` takes in its processes as in the first row's.

        At least 1, and 1 if it was not measured.
        """
        pace = self.bare_steps_per_s / first.bare_steps_per_s * first.nprocs / self.nprocs
        return 1.0 if math.isnan(pace) else max(1.0, 1 / pace)


def ranks(nprocs: float) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{nprocs:,.0f} rank{'' if nprocs == 1 else 's'}"


def within_cores(rows: Sequence[Row]) -> Row:
    """Return the row with the most ranks that do not outnumber the cores; else the first row."""
    return ([row for row in rows if not row.oversubscribed] or rows[:1])[-1]


def compare(rows: Sequence[Row], given: Settings) -> list[Row]:
    """Return the rows, in order of nprocs, with their speedup over the first one, and the expected speedup."""
    first = rows[0]
    shared = first.slowest_s / max(first.step_fractions)
    alone = first.seconds * (1 - first.fraction(*_SHARED, "wait"))
    total = _seconds(first, alone, shared, given)
    return [
        replace(
            row,
            speedup=row.steps_per_s / first.steps_per_s,
            efficiency=row.steps_per_s / first.steps_per_s * first.nprocs / row.nprocs,
            ceiling=total / _seconds(row, alone, shared, given),
            expected=total / _seconds(row, alone, shared * row.slowdown(first), given),
        )
        for row in rows
    ]


def _seconds(row: Row, alone: float, shared: float, given: Settings) -> float:
    """Return the seconds of an iteration on the row's ranks.

    Rank 0 works alone for `alone` seconds; one rank would need `shared` seconds for what all ranks share.
    """
    mine, others = row.step_fractions
    if not given.get("overlap") or row.nprocs == 1:
        return alone + shared * max(mine, others)
    if (
        "episodes_per_batch" in given and "rank0_envs" not in given
    ):  # rank 0 takes only as many as it has time for
        return max((alone + shared) / row.nprocs, shared * others)
    return max(alone + shared * mine, shared * others)


def advice(rows: Sequence[Row], given: Settings) -> list[str]:
    """Return what limits the speedup and what would raise it, one text each, the largest first."""
    row = within_cores(rows)
    found = [*_uneven(row, given), *_alone(row, given), *_disturbed(rows[0], row)]
    beyond = [other for other in rows if other.oversubscribed]
    if beyond and max(rows, key=lambda each: each.steps_per_s) not in beyond:
        text = f"more ranks than cores are not faster here: use at most {ranks(row.nprocs)}"
        found.append((0.0, text))
    if not found:
        found.append((0.0, "nothing stands out: use more ranks if there are more cores"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _disturbed(first: Row, row: Row) -> Iterator[tuple[float, str]]:
    """Yield a warning if the update's time differs, because it is the same work for any number of ranks."""
    times = row.phases["update"] / first.phases["update"] if first.phases["update"] else 1.0
    if not 0.8 < times < 1.25:
        yield (
            1.0,
            f"these figures are not reliable: the update took {times:.2f} times as long on "
            f"{ranks(row.nprocs)} as on {ranks(first.nprocs)}, but it is the same work. Stop other "
            f"programs and raise --repeats",
        )


def _uneven(row: Row, given: Settings) -> Iterator[tuple[float, str]]:
    """Yield where ranks wait for each other: the fraction of the time that it costs, and a remedy."""
    even = 1 / row.nprocs
    most = max(row.step_fractions)
    if most - even > 0.1 * even and "rank0_envs" not in given:
        remedy = "the envs do not divide evenly: set --num-envs to a multiple of --nprocs"
        if "episodes_per_batch" in given:
            remedy = "one episode is longer than a rank's equal share: raise --episodes-per-batch"
        yield row.fraction(*_SHARED) * (most - even) / most, remedy
        return
    idle = (row.slowest_s - row.fastest_s) / row.seconds
    if idle > 0.1 and row.fastest_s < 0.8 * row.slowest_s and not given.get("overlap"):
        remedy = "Use fewer ranks"
        if "episodes_per_batch" not in given:
            remedy = (
                "Use batches of whole episodes (--episodes-per-batch), which ranks take as they become "
                "free, or fewer ranks"
            )
        yield (
            idle,
            f"imbalance: the slowest rank works {row.slowest_s / row.fastest_s:.1f} times as long as the "
            f"fastest, which waits. Its envs are slower, or it does not have a core to itself. {remedy}",
        )


def _alone(row: Row, given: Settings) -> Iterator[tuple[float, str]]:
    """Yield where the other ranks wait for rank 0: the fraction of the time, and a remedy."""
    update, moving = row.fraction("update"), row.fraction("gather", "hash", "broadcast")
    if update > 0.15:
        remedy = (
            "--overlap with fewer --rank0-envs, so that the other ranks collect during the update"
        )
        if given.get("overlap"):
            remedy = "fewer --rank0-envs, so that rank 0 has time for the update"
        yield (
            update,
            f"rank 0's update takes {update:.0%} of the time on {ranks(row.nprocs)}: use fewer epochs, "
            f"larger minibatches, more steps per batch, or {remedy}",
        )
    if moving > 0.1:
        yield (
            moving,
            f"moving data takes {moving:.0%} of the time: use fewer ranks or smaller observations",
        )
