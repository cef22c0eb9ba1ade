"""What a run's phases imply for more ranks: ceilings, and what to change to come beyond them.

An iteration on n ranks is what all ranks share, collecting and processing, and what rank 0 does while
the others sleep. The ceiling is Amdahl's, with the largest share that a rank can have to do: lanes and
whole episodes cannot be cut in two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rank0rl.timing import PHASES

SHARED = ("collect", "process")  # phases that all ranks have a part in


@dataclass(frozen=True)
class Row:
    """A number of ranks, as it was measured: medians over the repeats."""

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
    """What so many processes make that only call `env.step`, over all of them."""
    return_mean: float
    memory_mb: float
    """Peak of all ranks together."""
    largest_share: float
    """Of an iteration's steps, the most that one rank has to make, at the least."""
    oversubscribed: bool = False
    """Whether there are more ranks than cores."""
    columns: dict[str, float] = field(default_factory=dict)
    """What `compare` adds: "speedup", "efficiency", "ceiling", "expected"."""

    def share(self, *phases: str) -> float:
        """Share of the time in these phases."""
        return sum(self.phases[phase] for phase in phases) / self.seconds


def largest_share(nprocs: int, lanes: Sequence[int], longest_episode: float | None = None) -> float:
    """The largest share of an iteration that one rank must have, in (0, 1].

    Args:
        nprocs: number of ranks.
        lanes: of each rank.
        longest_episode: in whole-episode batches, the share of the longest one of a batch's steps:
            ranks share them out as they get on, and somebody has to make that one.
    """
    if longest_episode is not None:
        return max(1 / nprocs, min(1.0, longest_episode))
    return max(lanes) / sum(lanes)


def compare(rows: Sequence[Row], overlap: bool) -> None:
    """Fill in the columns of all rows, the first one being what the others are compared with.

    Speedup is the ratio of steps per second; efficiency, speedup per rank. The ceiling follows from
    the first row's phases and the shares. What is expected here takes in besides that processes
    slow each other down: by as much as bare stepping tells.

    Args:
        rows: in order of nprocs.
        overlap: whether rank 0 updates while the other ranks collect.
    """
    first = rows[0]
    shared = sum(first.phases[phase] for phase in SHARED)
    alone = first.seconds - shared
    for row in rows:
        part = row.largest_share / first.largest_share
        slower = max(part, first.bare_steps_per_s / row.bare_steps_per_s)
        total = {
            name: max(alone, (alone + shared) * p)
            if overlap and row is not first
            else alone + shared * p
            for name, p in (("ceiling", part), ("expected", slower))
        }
        speedup = row.steps_per_s / first.steps_per_s
        row.columns.update(
            speedup=speedup,
            efficiency=speedup * first.nprocs / row.nprocs,
            **{name: first.seconds / seconds for name, seconds in total.items()},
        )


def advice(rows: Sequence[Row], overlap: bool, episodes: bool) -> list[str]:
    """What bounds the speedup, and what would raise it, a sentence each, the largest first.

    Args:
        rows: as `compare` left them.
        overlap: whether rank 0 updates while the other ranks collect.
        episodes: whether batches are whole episodes.
    """
    within = [row for row in rows if not row.oversubscribed] or rows[:1]
    row = within[-1]
    found: list[tuple[float, str]] = []
    if row.nprocs > 1:
        even = 1 / row.nprocs
        uneven = row.largest_share - even
        if uneven > 0.1 * even:
            what = (
                "one episode is longer than an equal share: more --episodes-per-batch"
                if episodes
                else "lanes do not divide evenly: a --num-envs that is a multiple of nprocs"
            )
            found.append((row.share(*SHARED) * uneven / row.largest_share, what))
        idle = (row.slowest_s - row.fastest_s) / row.seconds
        if (
            idle > 0.1
            and row.fastest_s < 0.8 * row.slowest_s
            and uneven <= 0.1 * even
            and not overlap
        ):
            found.append(
                (
                    idle,
                    f"imbalance: the slowest rank works {row.slowest_s / row.fastest_s:.1f} times as "
                    f"long as the fastest, which waits; its environments step slower, or its core "
                    f"is not its own: "
                    + (
                        "fewer ranks"
                        if episodes
                        else "batches of whole episodes (--episodes-per-batch), which ranks share "
                        "as they get on, or fewer ranks"
                    ),
                )
            )
    update, moving = row.share("update"), row.share("gather", "hash", "broadcast")
    if update > 0.15:
        found.append(
            (
                update,
                f"rank 0's update takes {update:.0%} of the time on {_ranks(row)}: fewer epochs or "
                f"larger minibatches in it, more steps per batch"
                + ("" if overlap else ", or --overlap, which collects meanwhile"),
            )
        )
    if moving > 0.1:
        found.append(
            (
                moving,
                f"moving data takes {moving:.0%} of the time: fewer ranks, or smaller observations",
            )
        )
    beyond = [other for other in rows if other.oversubscribed]
    if beyond and max(rows, key=lambda each: each.steps_per_s) not in beyond:
        found.append((0.0, f"more ranks than cores do not pay here: {_ranks(row)} are the most"))
    if not found:
        found.append((0.0, "nothing stands out: more ranks, where there are more cores"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def unaccounted(row: Row) -> float:
    """Share of the wall time that is in no phase."""
    return 1 - row.share(*PHASES)


def _ranks(row: Row) -> str:
    return f"{row.nprocs} rank{'s' * (row.nprocs > 1)}"
