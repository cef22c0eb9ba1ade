"""Predictions of steps per second on more ranks than were run: costs from measurements, rows, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rank0rl.run.machine import available_cores
from rank0rl.tools.speedup import cost_model, probes
from rank0rl.tools.speedup.cost_model import Costs, Iteration, Machines, iteration, rate
from rank0rl.tools.speedup.measured import Row, ranks, slowdown, within_cores

SAME = "same experiment"
SAME_BATCH = "same batch, one env a rank"
LARGER_BATCH = "batch grows with ranks"


@dataclass(frozen=True)
class Predicted:
    """Predicted figures of one number of ranks."""

    nprocs: int
    nodes: int
    experiment: str  # SAME, SAME_BATCH or LARGER_BATCH: what it keeps of the measured experiment
    costs: Costs
    iteration: Iteration
    speedup: float  # over the first measured row
    helps: dict[str, float]  # change -> factor by which it would raise the steps per second

    @property
    def steps_per_s(self) -> float:
        """Steps per second of all ranks."""
        return self.costs.steps / self.iteration.seconds


@dataclass(frozen=True)
class Prediction:
    """All predicted rows, and what they follow from."""

    costs: Costs
    machines: Machines
    rows: list[Predicted]  # of the numbers of ranks that the user asked for
    curve: list[Predicted]  # of 1, 2, 4 ... ranks, and of these
    notes: list[str]


def costs_of(row: Row, settings: Mapping[str, Any], found: Mapping[str, Any]) -> Costs:
    """Return the costs of an iteration.

    A step of one env takes act + env, and a step of B envs takes act + B env. The time that the row
    took with all envs in training is kept: these figures only divide it.

    Args:
        row: the measured row.
        settings: settings of its run.
        found: what `probes.collect_costs` returned for this run.
    """
    (one, (_, cpu)), (envs, (wall, all_cpu)) = sorted(
        (int(envs), times) for envs, times in found["per_step"].items()
    )
    env = max(0.0, (all_cpu - cpu) / (envs - one))
    act = max(0.0, cpu - env)
    wait = max(0.0, wall - act - envs * env) / envs
    if row.nprocs == 1:  # its gather is a sort
        record = max(0.0, row.seconds - row.slowest_s - row.phases["update"])
    else:
        record = sum(row.phases[phase] for phase in ("hash", "evaluate", "record"))
    shared = "episodes_per_batch" in settings and row.nprocs > 1
    costs = Costs(
        num_envs=settings["num_envs"],
        steps=round(row.steps_per_s * row.seconds),
        act_s=act,
        env_s=env,
        wait_s=wait,
        update_s=row.phases["update"],
        record_s=record,
        row_bytes=found["row_bytes"],
        arrays=found["arrays"],
        weights_bytes=found["weights_bytes"],
        longest=max(row.step_fractions) if shared else 0.0,
        rank0_envs=settings.get("rank0_envs"),
        overlap=bool(settings.get("overlap")),
        parts=settings.get("gather_parts", 1),
    )
    times = row.slowest_s / iteration(row.nprocs, costs, Machines()).collect
    return replace(costs, act_s=act * times, env_s=env * times, wait_s=wait * times)


def measure_machines(machines: Machines, rows: Sequence[Row], most: int) -> Machines:
    """Measure what ranks of this machine need for an exchange; return the machines with these figures.

    Args:
        machines: nodes, cores and link, as the user describes them.
        rows: measured rows. They tell how much processes slow each other down.
        most: largest number of ranks to predict.

    Raises:
        FailedError: if ranks do not start.
    """
    two, cores = probes.exchange_costs(2), machines.cores
    # An iteration's own exchange, averaged over its collectives, with ranks of one node.
    sent = two["least_exchange_s"] - probes.EXCHANGED * two["message_s"] - cost_model.POLL_S / 2
    machines = replace(
        machines,
        latency_s=max(two["latency_s"], sent / cost_model.COLLECTIVES),
        message_s=two["message_s"],
        bandwidth=two["bandwidth"],
        slower=slowdown(rows[0], within_cores(rows)),
    )
    if cores is None or machines.ranks(most) <= cores:
        return machines
    here = len(available_cores())
    crowd = probes.exchange_costs(2 * max(2, here))
    further = 2 * max(2, here) / here - max(1, 2 / here)
    return replace(machines, crowd_s=max(0.0, crowd["exchange_s"] - two["exchange_s"]) / further)


def predict(
    counts: Sequence[int], costs: Costs, machines: Machines, rows: Sequence[Row]
) -> Prediction:
    """Predict steps per second.

    Args:
        counts: numbers of ranks.
        costs: costs of the first measured row.
        machines: nodes and network. In the curve, numbers of ranks up to the largest measured one
            are on one node, as they were run.
        rows: measured rows.
    """
    most, first = max(counts), rows[0].steps_per_s
    here = replace(machines, nodes=1)
    one_node = max(row.nprocs for row in rows)
    powers = [2**i for i in range(math.ceil(math.log2(most)) + 1)]
    drawn = {n for n in (*powers, *counts, min(costs.num_envs, most)) if n <= most}
    return Prediction(
        costs,
        machines,
        [each for n in sorted(set(counts)) for each in _each(n, costs, machines, first)],
        [
            each
            for n in sorted(drawn)
            for each in _each(n, costs, here if n <= one_node else machines, first)
        ],
        _notes(costs, machines, most),
    )


def _each(nprocs: int, costs: Costs, machines: Machines, first: float) -> Iterable[Predicted]:
    """Yield a row for each experiment that so many ranks can make."""
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    names = [SAME]
    if nprocs > costs.num_envs:
        # In the same batch, every env makes at least one step.
        names = [SAME_BATCH, LARGER_BATCH] if nprocs <= costs.steps else [LARGER_BATCH]
    for name in names:
        these = costs if name == SAME else _grown(costs, nprocs, name)
        took = iteration(nprocs, these, machines)
        speedup = these.steps / took.seconds / first
        helps = _changes_that_help(nprocs, these, machines)
        yield Predicted(nprocs, machines.nodes, name, these, took, speedup, helps)


def _grown(costs: Costs, num_envs: int, experiment: str) -> Costs:
    """Return the costs with more envs: the batch stays (`SAME_BATCH`) or grows with them (`LARGER_BATCH`)."""
    times = num_envs / costs.num_envs if experiment == LARGER_BATCH else 1.0
    return replace(_larger(costs, times), num_envs=num_envs)


def _larger(costs: Costs, times: float) -> Costs:
    return replace(
        costs,
        steps=costs.steps * times,
        update_s=costs.update_s * times,
        record_s=costs.record_s * times,
        longest=costs.longest / times,
    )


def _changes_that_help(nprocs: int, costs: Costs, machines: Machines) -> dict[str, float]:
    """Return the changes that would raise the steps per second, the best first: change -> factor, if 1.05 or more.

    A batch four times as large takes an update four times as long: it gains only on what is fixed.
    Overlap comes with the number of envs for rank 0 that makes the most of it.
    """
    changes: dict[str, list[Costs]] = {
        "batches of 4 times the steps": [_larger(costs, 4.0)],
        "--gather-parts 4": [replace(costs, parts=4)],
    }
    if nprocs > 1:
        changes["other --rank0-envs" if costs.overlap else "overlap"] = _overlapped(nprocs, costs)
    now = rate(nprocs, costs, machines)
    gains = {
        name: max(rate(nprocs, changed, machines) / now for changed in these)
        for name, these in changes.items()
    }
    best = sorted(gains, key=lambda name: -gains[name])
    return {name: gains[name] for name in best if gains[name] >= 1.05}


def _overlapped(nprocs: int, costs: Costs) -> list[Costs]:
    """Return costs with overlap: an equal number of envs for rank 0, none, and as many as it has time for."""
    env = costs.steps / costs.num_envs * (costs.env_s + costs.wait_s)
    less = costs.update_s * (nprocs - 1) / env if env else 0.0
    fair = max(0, int((costs.num_envs - less) / nprocs))
    return [replace(costs, overlap=True, rank0_envs=envs) for envs in (None, 0, fair)]


def _notes(costs: Costs, machines: Machines, most: int) -> list[str]:
    """Return sentences on where rank 0 becomes the limit, on the limits, and on what is assumed."""
    gbit = f"{8e-9 * machines.link_bandwidth:g} Gbit/s"
    limits, between = [], ""
    if machines.nodes > 1:
        limits.append(
            f"rank 0's link can receive at most {machines.link_bandwidth / costs.row_bytes:,.0f} steps/s "
            f"({gbit}, {costs.row_bytes:.0f} bytes a step)"
        )
        between = (
            f". Given by --latency-us and --link-gbit: {1e6 * machines.link_latency_s:g} us and "
            f"{gbit} between nodes"
        )
    if costs.update_s:
        limits.append(
            f"rank 0's update can process at most {costs.steps / costs.update_s:,.0f} steps/s"
        )
    cores = "a core for each of its ranks" if machines.cores is None else f"{machines.cores} cores"
    assumed = (
        f"assumed: every node is this machine, with {cores}, each as fast as here. Measured here: "
        f"{1e6 * machines.latency_s:.0f} us a collective, {1e6 * machines.message_s:.1f} us a "
        f"message, {machines.bandwidth / 1e9:.2f} GB/s into rank 0{between}"
    )
    return [_limited(costs, machines, most), *limits, assumed]


_ALONE = {
    "update": "its update",
    "gather": "the bandwidth into it",
    "messages": "the number of messages to it",
    "record": "its hash and record",
}


def _limited(costs: Costs, machines: Machines, most: int) -> str:
    """Return a sentence that names the number of ranks from which rank 0 is the limit."""

    def experiment(nprocs: int) -> Costs:
        return costs if nprocs <= costs.num_envs else _grown(costs, nprocs, LARGER_BATCH)

    found = _crossing(experiment, most, machines)
    if found is None:
        return f"up to {most:,} ranks, collecting takes longer than what rank 0 does alone"
    nprocs, took = found
    alone = max(_ALONE, key=lambda name: getattr(took, name))
    which = f" ({LARGER_BATCH})" if nprocs > costs.num_envs else ""
    return (
        f"from {ranks(nprocs)} on{which}, what rank 0 does alone takes longer than collecting; most of "
        f"it is {_ALONE[alone]}"
    )


def _crossing(
    experiment: Callable[[int], Costs], most: int, machines: Machines
) -> tuple[int, Iteration] | None:
    """Return the least number of ranks that collect faster than rank 0 does what it does alone.

    Args:
        experiment: number of ranks -> its costs.
        most: largest number of ranks to look at.
        machines: nodes and network. There are never more nodes than ranks.

    Returns:
        The number of ranks and their iteration; None if there is none up to `most`.
    """
    for nprocs in range(1, most + 1):
        nodes = replace(machines, nodes=min(machines.nodes, nprocs))
        took = iteration(nprocs, experiment(nprocs), nodes)
        if took.rank0_alone > took.collect:
            return nprocs, took
    return None
