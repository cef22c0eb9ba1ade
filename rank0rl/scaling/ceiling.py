"""Ceilings of a speedup: Amdahl's law, with the largest fraction of the steps that one rank has to make.

An iteration on n ranks consists of what all ranks share (collecting and processing), and of what rank 0
does while the others sleep or, with overlap, collect. Envs and whole episodes cannot be cut in two, so
the largest fraction may be more than 1 / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rank0rl.scaling.rows import SHARED, Row, Work


def compare(rows: Sequence[Row], work: Work) -> None:
    """Fill in the columns of all rows. The other rows are compared with the first one.

    Speedup is the ratio of steps per second; efficiency is speedup per rank. The ceiling follows from
    the first row's phases and from the fractions of the steps. The expected speedup also accounts for
    processes that slow each other down, as measured with bare `env.step`.

    Args:
        rows: measured rows, in order of nprocs.
        work: how the runs spread their work.
    """
    first = rows[0]
    shared = first.slowest_s / max(first.step_fractions)
    alone = first.seconds * (1 - first.fraction(*SHARED, "wait"))
    total = _seconds(first, alone, shared, work)
    for row in rows:
        speedup = row.steps_per_s / first.steps_per_s
        row.columns.update(
            speedup=speedup,
            efficiency=speedup * first.nprocs / row.nprocs,
            ceiling=total / _seconds(row, alone, shared, work),
            expected=total / _seconds(row, alone, shared * slowdown(first, row), work),
        )


def slowdown(first: Row, row: Row) -> float:
    """Return how many times as long a bare `env.step` takes in the row's processes as in the first's.

    At least 1, and 1 if it was not measured.
    """
    pace = row.bare_steps_per_s / first.bare_steps_per_s * first.nprocs / row.nprocs
    return 1.0 if math.isnan(pace) else max(1.0, 1 / pace)


def _seconds(row: Row, alone: float, shared: float, work: Work) -> float:
    """Return the seconds of an iteration on the row's ranks.

    Args:
        row: the number of ranks, and their fractions of the steps.
        alone: seconds that rank 0 works alone.
        shared: seconds that one rank would need for what all ranks share.
        work: how the run spreads it.
    """
    mine, others = row.step_fractions
    if not work.overlap or row.nprocs == 1:
        return alone + shared * max(mine, others)
    if work.episodes and not work.rank0_envs:  # rank 0 takes only as many as it has time for
        return max((alone + shared) / row.nprocs, shared * others)
    return max(alone + shared * mine, shared * others)
