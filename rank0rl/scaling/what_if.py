"""Changes of an experiment that has a cost model: more envs, larger batches, overlap, and what they would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rank0rl.scaling.cost_model import Costs, Machines, iteration, rate

SAME = "same experiment"
SAME_BATCH = "same batch, one env a rank"
LARGER_BATCH = "batch grows with ranks"


def grown(costs: Costs, num_envs: int, experiment: str) -> Costs:
    """Return the costs with more envs: the batch stays (`SAME_BATCH`) or grows with them (`LARGER_BATCH`)."""
    times = num_envs / costs.num_envs if experiment == LARGER_BATCH else 1.0
    return replace(_larger(costs, times), num_envs=num_envs)


def crossing(experiment: Callable[[int], Costs], most: int, machines: Machines) -> int | None:
    """Return the least number of ranks that collect faster than rank 0 does what it does alone.

    Args:
        experiment: number of ranks -> its costs.
        most: largest number of ranks to look at.
        machines: nodes and network. There are never more nodes than ranks.

    Returns:
        The number of ranks; None if there is none up to `most`.
    """
    for nprocs in range(1, most + 1):
        nodes = replace(machines, nodes=min(machines.nodes, nprocs))
        took = iteration(nprocs, experiment(nprocs), nodes)
        if took.rank0_alone > took.collect:
            return nprocs
    return None


def helps(nprocs: int, costs: Costs, machines: Machines) -> dict[str, float]:
    """Return the changes that would raise the steps per second, the best first: change -> factor, if 1.05 or more.

    A batch four times as large takes an update four times as long: it gains only on what is fixed.
    Overlap comes with the number of envs for rank 0 that makes the most of it.
    """
    changes: list[tuple[str, Costs]] = [
        ("batches of 4 times the steps", _larger(costs, 4.0)),
        ("--gather-parts 4", replace(costs, parts=4)),
    ]
    if nprocs > 1:
        name = "other --rank0-envs" if costs.overlap else "overlap"
        changes += [(name, each) for each in _overlapped(nprocs, costs)]
    now = rate(nprocs, costs, machines)
    gains: dict[str, float] = {}
    for name, changed in changes:
        gains[name] = max(gains.get(name, 0.0), rate(nprocs, changed, machines) / now)
    most = sorted(gains, key=lambda name: -gains[name])
    return {name: gains[name] for name in most if gains[name] >= 1.05}


def _overlapped(nprocs: int, costs: Costs) -> list[Costs]:
    """Return costs with overlap: an equal number of envs for rank 0, none, and as many as it has time for."""
    env = costs.steps / costs.num_envs * (costs.env_s + costs.wait_s)
    less = costs.update_s * (nprocs - 1) / env if env else 0.0
    fair = max(0, int((costs.num_envs - less) / nprocs))
    return [replace(costs, overlap=True, rank0_envs=envs) for envs in (None, 0, fair)]


def _larger(costs: Costs, times: float) -> Costs:
    return replace(
        costs,
        steps=costs.steps * times,
        update_s=costs.update_s * times,
        record_s=costs.record_s * times,
        longest=costs.longest / times,
    )
