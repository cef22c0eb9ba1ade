"""Advice from a study's rows: what limits the speedup, and which options would raise it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rank0rl.run.timing import PHASES
from rank0rl.tools.speedup.measure import SHARED, Row, Work, within_cores


def advice(rows: Sequence[Row], work: Work) -> list[str]:
    """Return what limits the speedup and what would raise it, one text each, the largest first.

    Args:
        rows: measured rows, with the columns of `ceiling.compare`.
        work: how the runs spread their work.
    """
    row = within_cores(rows)
    found = [*_shared_badly(row, work), *_alone(row, work), *_disturbed(rows[0], row)]
    beyond = [other for other in rows if other.oversubscribed]
    if beyond and max(rows, key=lambda each: each.steps_per_s) not in beyond:
        found.append((0.0, f"more ranks than cores are not faster here: use at most {_ranks(row)}"))
    if not found:
        found.append((0.0, "nothing stands out: use more ranks if there are more cores"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def unaccounted(row: Row) -> float:
    """Return the fraction of the wall time that belongs to no phase."""
    return 1 - row.fraction(*PHASES)


def _disturbed(first: Row, row: Row) -> Iterator[tuple[float, str]]:
    """Yield a warning if the update's time differs, because it is the same work for any number of ranks."""
    times = row.phases["update"] / first.phases["update"] if first.phases["update"] else 1.0
    if not 0.8 < times < 1.25:
        yield (
            1.0,
            f"these figures are not reliable: the update took {times:.2f} times as long on "
            f"{_ranks(row)} as on {_ranks(first)}, but it is the same work. Stop other programs and "
            f"raise --repeats",
        )


def _shared_badly(row: Row, work: Work) -> Iterator[tuple[float, str]]:
    """Yield where ranks wait for each other: the fraction of the time that it costs, and a remedy."""
    even = 1 / row.nprocs
    uneven = max(row.step_fractions) - even
    if uneven > 0.1 * even and not work.rank0_envs:
        cost = row.fraction(*SHARED) * uneven / max(row.step_fractions)
        if work.episodes:
            yield (
                cost,
                "one episode is longer than a rank's equal share: raise --episodes-per-batch",
            )
        else:
            yield (
                cost,
                "the envs do not divide evenly: set --num-envs to a multiple of --nprocs",
            )
        return
    idle = (row.slowest_s - row.fastest_s) / row.seconds
    if idle > 0.1 and row.fastest_s < 0.8 * row.slowest_s and not work.overlap:
        remedy = "Use fewer ranks"
        if not work.episodes:
            remedy = (
                "Use batches of whole episodes (--episodes-per-batch), which ranks take as they "
                "become free, or fewer ranks"
            )
        yield (
            idle,
            f"imbalance: the slowest rank works {row.slowest_s / row.fastest_s:.1f} times as long as the "
            f"fastest, which waits. Its envs are slower, or it does not have a core to itself. {remedy}",
        )


def _alone(row: Row, work: Work) -> Iterator[tuple[float, str]]:
    """Yield where the other ranks wait for rank 0: the fraction of the time, and a remedy."""
    update, moving = row.fraction("update"), row.fraction("gather", "hash", "broadcast")
    if update > 0.15:
        other = (
            "--overlap with fewer --rank0-envs, so that the other ranks collect during the update"
        )
        if work.overlap:
            other = "fewer --rank0-envs, so that rank 0 has time for the update"
        yield (
            update,
            f"rank 0's update takes {update:.0%} of the time on {_ranks(row)}: use fewer epochs, larger "
            f"minibatches, more steps per batch, or {other}",
        )
    if moving > 0.1:
        yield (
            moving,
            f"moving data takes {moving:.0%} of the time: use fewer ranks or smaller observations",
        )


def _ranks(row: Row) -> str:
    return f"{row.nprocs} rank{'s' * (row.nprocs > 1)}"
