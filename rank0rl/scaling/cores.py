"""Ranks that outnumber the cores of their node: how much longer their work takes."""

from __future__ import annotations


def crowded(busy_s: float, idle_s: float, ranks: int, cores: int) -> float:
    """Return the mean seconds of a turn of ranks that compute, then wait, over and over, on shared cores.

    This is the machine repairman's problem with processor sharing: k ranks that want a core get
    min(k, cores) of them, and p(k) / p(k-1) = (ranks - k + 1) busy / (idle min(k, cores)). Only means
    count, not how times are distributed.

    Args:
        busy_s: CPU seconds of a turn.
        idle_s: the other seconds of a turn.
        ranks: number of ranks on the node.
        cores: number of cores of the node.

    Source: Baskett, Chandy, Muntz and Palacios 1975, "Open, closed, and mixed networks of queues
        with different classes of customers", J. ACM 22(2), stations of types 2 and 3.
    """
    if ranks <= cores or busy_s <= 0:
        return busy_s + idle_s
    if idle_s <= 0:
        return busy_s * ranks / cores
    weight = whole = 1.0
    used = 0.0
    for k in range(1, ranks + 1):
        weight *= (ranks - k + 1) * busy_s / (idle_s * min(k, cores))
        whole += weight
        used += weight * min(k, cores)
        if whole > 1e100:  # only ratios count
            weight, whole, used = weight / whole, 1.0, used / whole
    return ranks * busy_s * whole / used
