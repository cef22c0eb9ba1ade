"""Steps per second on more ranks than were run: the model, with what a study of speedup measured.

A step is split in two by a process that collects with one lane and with all of them; what an exchange
of ranks costs is measured between ranks on this machine. Links between nodes are what the user says.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rank0rl.run import provenance
from rank0rl.scaling import model
from rank0rl.scaling.advice import Row
from rank0rl.scaling.model import BATCH, GROWS, LANES, Costs, Iteration, Machines

_HERE = Path(__file__).parent
_LIMIT_S = 300
_EXCHANGED = 16  # arrays of _link's exchange


class CannotMeasureError(Exception):
    """What a prediction needs cannot be measured here; the message has why."""


@dataclass(frozen=True)
class Predicted:
    """A number of ranks, as the model has it."""

    nprocs: int
    nodes: int
    experiment: str
    """One of `LANES`, `BATCH`, `GROWS`: what of the measured run it keeps."""
    costs: Costs
    parts: Iteration
    speedup: float
    """Over the first row that was measured."""
    helps: dict[str, float]
    """As `model.helps` gives it."""

    @property
    def steps_per_s(self) -> float:
        """Of all ranks."""
        return self.costs.steps / self.parts.seconds

    @property
    def bound(self) -> str:
        """What takes the most of an iteration."""
        return model.bound(self.parts, self.costs)


@dataclass(frozen=True)
class Prediction:
    """All of them, and what they follow from."""

    costs: Costs
    machines: Machines
    rows: list[Predicted]
    """Of the numbers of ranks that were asked for."""
    curve: list[Predicted]
    """Of 1, 2, 4 ... ranks, up to the most."""
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
        counts: numbers of ranks.
        rows: of the study, the first one being what all follows from.
        settings: of its runs.
        run: folder of one of them.
        machines: nodes, cores and link; all else is measured here.
        path: where the environment's module may be found.

    Raises:
        CannotMeasureError: if the environment, or ranks, cannot be started by themselves.
    """
    machines = measured(machines, rows, max(counts))
    return of(counts, costs_of(rows[0], settings, _cost(run, path)), machines, rows)


def of(counts: Sequence[int], costs: Costs, machines: Machines, rows: Sequence[Row]) -> Prediction:
    """The same, of known costs. The curve has as many ranks as were measured on one node, as they were."""
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
    """Of each experiment that so many ranks can make."""
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    found = []
    for name in _experiments(nprocs, costs):
        these = costs if name == LANES else model.grown(costs, nprocs, name)
        parts = model.iteration(nprocs, these, machines)
        speedup = these.steps / parts.seconds / first
        helps = model.helps(nprocs, these, machines)
        found.append(Predicted(nprocs, machines.nodes, name, these, parts, speedup, helps))
    return found


def _experiments(nprocs: int, costs: Costs) -> list[str]:
    if nprocs <= costs.num_envs:
        return [LANES]
    return [BATCH, GROWS] if nprocs <= costs.steps else [GROWS]  # a lane makes a step at the least


def costs_of(row: Row, settings: Mapping[str, Any], found: Mapping[str, Any]) -> Costs:
    """What an iteration costs, from a row that was measured and what `_cost` found.

    With one lane a step of all of them takes act + lane, with B of them act + B lane. What was
    measured with all lanes in training is kept: these figures divide it.
    """
    steps = round(row.steps_per_s * row.seconds)
    (one, (_, cpu)), (lanes, (wall, all_cpu)) = sorted(
        (int(lanes), times) for lanes, times in found["per_step"].items()
    )
    lane = max(0.0, (all_cpu - cpu) / (lanes - one))
    act = max(0.0, cpu - lane)
    wait = max(0.0, wall - act - lanes * lane) / lanes
    epochs, minibatch = settings.get("epochs", 0), settings.get("minibatch_size", 0)
    costs = Costs(
        num_envs=settings["num_envs"],
        steps=steps,
        act_s=act,
        lane_s=lane,
        wait_s=wait,
        update_s=row.phases["update"] * row.learners,
        record_s=_alone(row),
        row_bytes=found["row_bytes"],
        arrays=found["arrays"],
        weights_bytes=found["weights_bytes"],
        gradient_steps=epochs * math.ceil(steps / minibatch) if epochs and minibatch else 1,
        minibatch=minibatch,
        longest=max(row.shares) if "episodes_per_batch" in settings and row.nprocs > 1 else 0.0,
        rank0_envs=settings.get("rank0_envs"),
        overlap=bool(settings.get("overlap")),
        parts=settings.get("gather_parts", 1),
        together=row.update == "allreduce",
    )
    here = Machines(0.0, 0.0, 1.0)
    times = row.slowest_s / model.iteration(row.nprocs, costs, here).collect
    return replace(costs, act_s=act * times, lane_s=lane * times, wait_s=wait * times)


def _alone(row: Row) -> float:
    """What rank 0 does alone besides the update: with one rank, its gather is a sort."""
    if row.nprocs == 1:
        return max(0.0, row.seconds - row.slowest_s - row.phases["update"])
    return sum(row.phases[phase] for phase in ("hash", "evaluate", "record"))


def measured(machines: Machines, rows: Sequence[Row], most: int) -> Machines:
    """The machines, with what is measured between ranks on this one.

    Args:
        machines: of nodes, cores and link.
        rows: of the study: how processes slow each other down.
        most: ranks to predict.

    Raises:
        CannotMeasureError: if ranks do not start.
    """
    two, cores = _link(2), machines.cores
    # An iteration's own exchange, as a mean over its collectives; ranks of one node.
    of_each = two["least_exchange_s"] - _EXCHANGED * two["message_s"] - model.POLL_S / 2
    machines = replace(
        machines,
        latency_s=max(two["latency_s"], of_each / model.COLLECTIVES),
        message_s=two["message_s"],
        bandwidth=two["bandwidth"],
        slower=_slower(rows),
    )
    if cores is None or machines.ranks(most) <= cores:
        return machines
    here = provenance.cores()
    crowd = _link(2 * max(2, here))
    further = 2 * max(2, here) / here - max(1, 2 / here)
    later = max(0.0, crowd["exchange_s"] - two["exchange_s"]) / further
    return replace(machines, crowd_s=later)


def _slower(rows: Sequence[Row]) -> float:
    """How many times as long bare steps take beside others, on as many ranks as there are cores."""
    row = ([row for row in rows if not row.oversubscribed] or rows[:1])[-1]
    pace = row.bare_steps_per_s / rows[0].bare_steps_per_s * rows[0].nprocs / row.nprocs
    return 1.0 if math.isnan(pace) else max(1.0, 1 / pace)


def _cost(run: Path, path: Path) -> dict[str, Any]:
    return _said(["-m", "rank0rl.scaling._cost", str(run.resolve())], path)


def _link(nprocs: int) -> dict[str, Any]:
    return _said([str(_HERE / "_link.py"), str(nprocs)], Path())


def _said(script: Sequence[str], path: Path) -> dict[str, Any]:
    """What a process of its own prints last, as JSON."""
    command = [sys.executable, *script]
    paths = [str(path.resolve()), str(_HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
                cwd=folder,
                env=env,
            )
        except subprocess.TimeoutExpired:
            raise CannotMeasureError(
                f"nothing to predict from: {shlex.join(script)} did not end within {_LIMIT_S} s"
            ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ends without a word"])[-1]
        raise CannotMeasureError(f"nothing to predict from: {shlex.join(script)} failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _notes(costs: Costs, machines: Machines, most: int) -> list[str]:
    """From which number of ranks on rank 0 bounds it, what the most is, and what was assumed."""
    limits = []
    if machines.nodes > 1 and not costs.together:
        limits.append(
            f"rank 0's link takes in at most {machines.link_bandwidth / costs.row_bytes:,.0f} steps/s "
            f"({8e-9 * machines.link_bandwidth:g} Gbit/s, {costs.row_bytes:.0f} bytes a step)"
        )
    if costs.update_s and not costs.together:
        limits.append(
            f"rank 0's update takes in at most {costs.steps / costs.update_s:,.0f} steps/s"
        )
    return [_crossing(costs, machines, most), *limits, _assumed(machines)]


def _crossing(costs: Costs, machines: Machines, most: int) -> str:
    """From which number of ranks on collecting is not what takes the longest."""

    def experiment(nprocs: int) -> Costs:
        return costs if nprocs <= costs.num_envs else model.grown(costs, nprocs, GROWS)

    nprocs = model.crossing(experiment, most, machines)
    if nprocs is None:
        return f"up to {most:,} ranks, collecting takes longer than what rank 0 does alone"
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    parts = model.iteration(nprocs, experiment(nprocs), machines)
    alone = max(_ALONE, key=lambda name: getattr(parts, name))
    which = f" ({GROWS})" if nprocs > costs.num_envs else ""
    return (
        f"from {nprocs:,} rank{'s' * (nprocs > 1)} on{which}, what rank 0 does alone takes longer than "
        f"collecting; the most of it is {_ALONE[alone]}"
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
            f"; between nodes {1e6 * machines.link_latency_s:g} us and "
            f"{8e-9 * machines.link_bandwidth:g} Gbit/s, as --latency-us and --link-gbit say"
        )
    return (
        f"assumed: every node is this machine, with {cores}, each as fast as here. Measured here: "
        f"{1e6 * machines.latency_s:.0f} us a collective, {1e6 * machines.message_s:.1f} us a "
        f"message, {machines.bandwidth / 1e9:.2f} GB/s into rank 0{between}"
    )
