"""What a run's phases imply for more ranks: ceilings, and what to change to come beyond them.

An iteration on n ranks is what all ranks share, collecting and processing, and what rank 0 does while
the others sleep (or, with overlap, collect). The ceiling is Amdahl's, with the share that a rank has to
do at the least: lanes and whole episodes cannot be cut in two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rank0rl.run.timing import PHASES

SHARED = ("collect", "process")  # phases that all ranks have a part in


@dataclass(frozen=True)
class Work:
    """How a run spreads its work."""

    overlap: bool = False
    """Whether rank 0 updates while the other ranks collect."""
    rank0_envs: bool = False
    """Whether rank 0's share was asked for."""
    episodes: bool = False
    """Whether batches are whole episodes, which ranks share as they get on."""


@dataclass(frozen=True)
class Row:
    """A number of ranks, as it was measured."""

    nprocs: int
    steps_per_s: float
    steps_per_s_min: float
    steps_per_s_max: float
    seconds: float
    """Of one iteration."""
    phases: Mapping[str, float]
    """Of those, on rank 0, by phase."""
    slowest_s: float
    """Seconds of an iteration that the slowest rank collected and processed."""
    fastest_s: float
    """The same of the fastest."""
    bare_steps_per_s: float
    """What so many processes make that only call `env.step`, over all of them; nan if unknown."""
    return_mean: float
    memory_mb: float
    """Peak of all ranks together."""
    shares: tuple[float, float]
    """Of an iteration's steps: rank 0's, and the most that another rank has to make."""
    update: str = "rank0"
    """How it updates: "rank0", or "allreduce" on every rank."""
    oversubscribed: bool = False
    """Whether there are more ranks than cores."""
    columns: dict[str, float] = field(default_factory=dict)
    """What `compare` adds: "speedup", "efficiency", "ceiling", "expected"."""

    @property
    def learners(self) -> int:
        """How many ranks share an update."""
        return self.nprocs if self.update == "allreduce" else 1

    def share(self, *phases: str) -> float:
        """Share of the time in these phases."""
        return sum(self.phases[phase] for phase in phases) / self.seconds


def shares(
    nprocs: int, lanes: Sequence[int], longest_episode: float | None = None
) -> tuple[float, float]:
    """Of an iteration's steps, the share of rank 0, and the largest of another rank.

    Args:
        nprocs: number of ranks.
        lanes: of each rank.
        longest_episode: in whole-episode batches, the share of the longest one of a batch's steps:
            ranks share them out as they get on, and somebody has to make that one.
    """
    if longest_episode is not None:
        least = max(1 / nprocs, min(1.0, longest_episode))
        return least, least
    return lanes[0] / sum(lanes), max(lanes[1:], default=0) / sum(lanes)


def compare(rows: Sequence[Row], work: Work) -> None:
    """Fill in the columns of all rows, the first one being what the others are compared with.

    Speedup is the ratio of steps per second; efficiency, speedup per rank. The ceiling follows from
    the first row's phases and the shares. What is expected here takes in besides that processes
    slow each other down: by as much as bare stepping tells.

    Args:
        rows: in order of nprocs.
        work: how it is spread.
    """
    first = rows[0]
    shared = first.slowest_s / max(first.shares)
    alone = first.seconds * (1 - first.share(*SHARED, "wait"))
    update = first.phases["update"] * first.learners
    total = _seconds(first, alone, shared, work)
    for row in rows:
        # Of the steps that each of n processes makes alone, what they make beside each other.
        pace = row.bare_steps_per_s / first.bare_steps_per_s * first.nprocs / row.nprocs
        slower = 1.0 if math.isnan(pace) else max(1.0, 1 / pace)
        speedup = row.steps_per_s / first.steps_per_s
        spared = update / first.learners - update / row.learners
        row.columns.update(
            speedup=speedup,
            efficiency=speedup * first.nprocs / row.nprocs,
            ceiling=total / _seconds(row, alone - spared, shared, work),
            expected=total / _seconds(row, alone - spared, shared * slower, work),
        )


def _seconds(row: Row, alone: float, shared: float, work: Work) -> float:
    """Of an iteration: of work that rank 0 does alone, and of work that is shared, on one rank."""
    mine, others = row.shares
    if not work.overlap or row.nprocs == 1:
        return alone + shared * max(mine, others)
    if work.episodes and not work.rank0_envs:  # rank 0 takes as few as it has time for
        return max((alone + shared) / row.nprocs, shared * others)
    return max(alone + shared * mine, shared * others)


def advice(rows: Sequence[Row], work: Work) -> list[str]:
    """What bounds the speedup, and what would raise it, a sentence each, the largest first.

    Args:
        rows: as `compare` left them.
        work: how it is spread.
    """
    by_rank0 = [row for row in rows if row.update == "rank0"]
    rows, others = by_rank0 or rows, [row for row in rows if row not in by_rank0 and by_rank0]
    row = ([row for row in rows if not row.oversubscribed] or rows[:1])[-1]
    found = [*_shared_badly(row, work), *_alone(row, work)]
    found += _disturbed(rows[0], row) if by_rank0 else []
    found += _compared(row, others)
    beyond = [other for other in rows if other.oversubscribed]
    if beyond and max(rows, key=lambda each: each.steps_per_s) not in beyond:
        found.append((0.0, f"more ranks than cores do not pay here: {_ranks(row)} are the most"))
    if not found:
        found.append((0.0, "nothing stands out: more ranks, where there are more cores"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _disturbed(first: Row, row: Row) -> list[tuple[float, str]]:
    """Whether something else ran on the machine: rank 0's update is the same work for any number of ranks."""
    times = row.phases["update"] / first.phases["update"] if first.phases["update"] else 1.0
    if 0.8 < times < 1.25:
        return []
    return [
        (
            1.0,
            f"these figures say little: the update took {times:.2f} times as long on {_ranks(row)} as on "
            f"{_ranks(first)}, and is the same work; let nothing else run, and repeat more often",
        )
    ]


def _compared(row: Row, others: Sequence[Row]) -> list[tuple[float, str]]:
    """What the other way to update makes of the same number of ranks, if it was measured."""
    return [
        (
            0.5,
            f"--update allreduce makes {other.steps_per_s / row.steps_per_s:.2f} times the steps per "
            f"second of rank 0's update on {_ranks(row)}; its curve, and so its return, is another one",
        )
        for other in others
        if other.nprocs == row.nprocs
    ]


def _shared_badly(row: Row, work: Work) -> list[tuple[float, str]]:
    """Where ranks wait for each other: the share of the time that it costs, and what to do."""
    even = 1 / row.nprocs
    uneven = max(row.shares) - even
    if uneven > 0.1 * even and not work.rank0_envs:
        cost = row.share(*SHARED) * uneven / max(row.shares)
        if work.episodes:
            return [(cost, "one episode is longer than an equal share: more --episodes-per-batch")]
        return [(cost, "lanes do not divide evenly: a --num-envs that is a multiple of --nprocs")]
    idle = (row.slowest_s - row.fastest_s) / row.seconds
    if idle > 0.1 and row.fastest_s < 0.8 * row.slowest_s and not work.overlap:
        remedy = "fewer ranks"
        if not work.episodes:
            remedy = (
                "batches of whole episodes (--episodes-per-batch), which ranks share as they get "
                "on, or fewer ranks"
            )
        what = (
            f"imbalance: the slowest rank works {row.slowest_s / row.fastest_s:.1f} times as long as "
            f"the fastest, which waits; its environments step slower, or its core is not its own: "
        )
        return [(idle, what + remedy)]
    return []


def _alone(row: Row, work: Work) -> list[tuple[float, str]]:
    """Where the other ranks wait for rank 0."""
    found = []
    update, moving = row.share("update"), row.share("gather", "hash", "broadcast")
    if update > 0.15 and row.update == "rank0":
        other = "--overlap with fewer --rank0-envs, which collects meanwhile"
        other = "fewer --rank0-envs, so that rank 0 has the time" if work.overlap else other
        found.append(
            (
                update,
                f"rank 0's update takes {update:.0%} of the time on {_ranks(row)}: fewer epochs or "
                f"larger minibatches in it, more steps per batch, or {other}",
            )
        )
    if moving > 0.1:
        found.append(
            (
                moving,
                f"moving data takes {moving:.0%} of the time: fewer ranks, or smaller observations",
            )
        )
    return found


def unaccounted(row: Row) -> float:
    """Share of the wall time that is in no phase."""
    return 1 - row.share(*PHASES)


def _ranks(row: Row) -> str:
    together = " that update together" if row.update == "allreduce" else ""
    return f"{row.nprocs} rank{'s' * (row.nprocs > 1)}{together}"
