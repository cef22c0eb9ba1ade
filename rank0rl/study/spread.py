"""The number of cores that each run of a study has."""

from __future__ import annotations

from collections.abc import Sequence


def spread(cores: int, left_s: Sequence[float], most: Sequence[int]) -> list[int]:
    """Give each core to the run that would end last with the cores that it has so far.

    Args:
        cores: number of cores, at least one for each run.
        left_s: seconds that each run would take on one core.
        most: most cores that each run can use.

    Returns:
        The number of cores of each run, at least 1.
    """
    each = [1] * len(left_s)
    for _ in range(cores - len(each)):
        may = [i for i in range(len(each)) if each[i] < most[i]]
        if not may:
            break
        each[max(may, key=lambda i: left_s[i] / each[i])] += 1
    return each
