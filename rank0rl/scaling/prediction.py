"""Predictions of steps per second on more ranks than were run, from the cost model and a speedup study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rank0rl.scaling import calibration, cost_model, what_if
from rank0rl.scaling.cost_model import Costs, Iteration, Machines
from rank0rl.scaling.rows import Row
from rank0rl.scaling.what_if import LARGER_BATCH, SAME, SAME_BATCH


@dataclass(frozen=True)
class Predicted:
    """Predicted figures of one number of ranks."""

    nprocs: int
    nodes: int
    experiment: str
    """`SAME`, `SAME_BATCH` or `LARGER_BATCH`: what it keeps of the measured experiment."""
    costs: Costs
    iteration: Iteration
    speedup: float
    """Speedup over the first measured row."""
    helps: dict[str, float]
    """Changes that would raise the steps per second, as `what_if.helps` gives them."""

    @property
    def steps_per_s(self) -> float:
        """Steps per second of all ranks."""
        return self.costs.steps / self.iteration.seconds


@dataclass(frozen=True)
class Prediction:
    """All predicted rows, and what they follow from."""

    costs: Costs
    machines: Machines
    rows: list[Predicted]
    """Rows of the numbers of ranks that the user asked for."""
    curve: list[Predicted]
    """Rows of 1, 2, 4 ... ranks, up to the largest number."""
    notes: list[str]


def predict(
    counts: Sequence[int],
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    run: Path,
    machines: Machines,
    path: Path,
) -> Prediction:
    """Measure what is missing, and predict.

    Args:
        counts: numbers of ranks to predict.
        rows: rows of the study. All costs follow from the first one.
        settings: settings of its runs.
        run: folder of one of its runs.
        machines: nodes, cores and link. All else is measured here.
        path: folder in which the environment's module may be found.

    Raises:
        CannotMeasureError: if the environment, or ranks, cannot be started by themselves.
    """
    machines = calibration.measure_machines(machines, rows, max(counts))
    costs = calibration.measure_costs(rows[0], settings, run, path)
    return from_costs(counts, costs, machines, rows)


def from_costs(
    counts: Sequence[int], costs: Costs, machines: Machines, rows: Sequence[Row]
) -> Prediction:
    """Predict from known costs. The curve's measured numbers of ranks are on one node, as they were run."""
    most, first = max(counts), rows[0].steps_per_s
    here = replace(machines, nodes=1)
    one_node = max(row.nprocs for row in rows)
    curve = [2**i for i in range(math.ceil(math.log2(most)) + 1)]
    return Prediction(
        costs,
        machines,
        [each for n in sorted(set(counts)) for each in _each(n, costs, machines, first)],
        [
            each
            for n in sorted({*curve, *counts, min(costs.num_envs, most)})
            if n <= most
            for each in _each(n, costs, here if n <= one_node else machines, first)
        ],
        _notes(costs, machines, most),
    )


def _each(nprocs: int, costs: Costs, machines: Machines, first: float) -> list[Predicted]:
    """Return a row for each experiment that so many ranks can make."""
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    found = []
    for name in _experiments(nprocs, costs):
        these = costs if name == SAME else what_if.grown(costs, nprocs, name)
        took = cost_model.iteration(nprocs, these, machines)
        speedup = these.steps / took.seconds / first
        helps = what_if.helps(nprocs, these, machines)
        found.append(Predicted(nprocs, machines.nodes, name, these, took, speedup, helps))
    return found


def _experiments(nprocs: int, costs: Costs) -> list[str]:
    if nprocs <= costs.num_envs:
        return [SAME]
    if nprocs <= costs.steps:  # every env makes at least one step
        return [SAME_BATCH, LARGER_BATCH]
    return [LARGER_BATCH]


def _notes(costs: Costs, machines: Machines, most: int) -> list[str]:
    """Return sentences on where rank 0 becomes the limit, on the limits, and on what is assumed."""
    limits = []
    if machines.nodes > 1:
        limits.append(
            f"rank 0's link can receive at most {machines.link_bandwidth / costs.row_bytes:,.0f} steps/s "
            f"({8e-9 * machines.link_bandwidth:g} Gbit/s, {costs.row_bytes:.0f} bytes a step)"
        )
    if costs.update_s:
        limits.append(
            f"rank 0's update can process at most {costs.steps / costs.update_s:,.0f} steps/s"
        )
    return [_crossing(costs, machines, most), *limits, _assumed(machines)]


def _crossing(costs: Costs, machines: Machines, most: int) -> str:
    """Return a sentence on the number of ranks from which collecting no longer takes the longest."""

    def experiment(nprocs: int) -> Costs:
        return costs if nprocs <= costs.num_envs else what_if.grown(costs, nprocs, LARGER_BATCH)

    nprocs = what_if.crossing(experiment, most, machines)
    if nprocs is None:
        return f"up to {most:,} ranks, collecting takes longer than what rank 0 does alone"
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    took = cost_model.iteration(nprocs, experiment(nprocs), machines)
    alone = max(_ALONE, key=lambda name: getattr(took, name))
    which = f" ({LARGER_BATCH})" if nprocs > costs.num_envs else ""
    return (
        f"from {nprocs:,} rank{'s' * (nprocs > 1)} on{which}, what rank 0 does alone takes longer than "
        f"collecting; most of it is {_ALONE[alone]}"
    )


_ALONE = {
    "update": "its update",
    "gather": "the bandwidth into it",
    "messages": "the number of messages to it",
    "record": "its hash and record",
}


def _assumed(machines: Machines) -> str:
    cores = "a core for each of its ranks" if machines.cores is None else f"{machines.cores} cores"
    between = ""
    if machines.nodes > 1:
        between = (
            f". Given by --latency-us and --link-gbit: {1e6 * machines.link_latency_s:g} us and "
            f"{8e-9 * machines.link_bandwidth:g} Gbit/s between nodes"
        )
    return (
        f"assumed: every node is this machine, with {cores}, each as fast as here. Measured here: "
        f"{1e6 * machines.latency_s:.0f} us a collective, {1e6 * machines.message_s:.1f} us a "
        f"message, {machines.bandwidth / 1e9:.2f} GB/s into rank 0{between}"
    )
