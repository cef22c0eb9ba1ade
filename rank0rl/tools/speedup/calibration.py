"""Measurements that the cost model needs: what one step costs in a process by itself, and what ranks exchange.

Each runs in processes of its own (`_cost`, `_link`). Links between nodes are not measured: the user
describes them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rank0rl.run.machine import available_cores
from rank0rl.tools.speedup import cost_model, measure
from rank0rl.tools.speedup.cost_model import Costs, Machines
from rank0rl.tools.speedup.measure import Row, within_cores

_HERE = Path(__file__).parent
_LIMIT_S = 300
_EXCHANGED = 16  # arrays of _link's exchange


class CannotMeasureError(Exception):
    """Failed measurement that a prediction needs. The message says why it failed."""


def measure_costs(row: Row, settings: Mapping[str, Any], run: Path, path: Path) -> Costs:
    """Measure what a step of this run costs, and return the costs of its experiment.

    Args:
        row: measured row that all else follows from.
        settings: settings of the run.
        run: folder of the run.
        path: folder in which the environment's module may be found.

    Raises:
        CannotMeasureError: if the environment cannot be stepped in a process by itself.
    """
    return costs_of(row, settings, _cost(run, path))


def costs_of(row: Row, settings: Mapping[str, Any], found: Mapping[str, Any]) -> Costs:
    """Return the costs of an iteration, from a measured row and from what `_cost` found.

    A step of one env takes act + env, and a step of B envs takes act + B env. The time that the row
    took with all envs in training is kept: these figures only divide it.
    """
    steps = round(row.steps_per_s * row.seconds)
    (one, (_, cpu)), (envs, (wall, all_cpu)) = sorted(
        (int(envs), times) for envs, times in found["per_step"].items()
    )
    env = max(0.0, (all_cpu - cpu) / (envs - one))
    act = max(0.0, cpu - env)
    wait = max(0.0, wall - act - envs * env) / envs
    costs = Costs(
        num_envs=settings["num_envs"],
        steps=steps,
        act_s=act,
        env_s=env,
        wait_s=wait,
        update_s=row.phases["update"],
        record_s=_alone(row),
        row_bytes=found["row_bytes"],
        arrays=found["arrays"],
        weights_bytes=found["weights_bytes"],
        longest=max(row.step_fractions)
        if "episodes_per_batch" in settings and row.nprocs > 1
        else 0.0,
        rank0_envs=settings.get("rank0_envs"),
        overlap=bool(settings.get("overlap")),
        parts=settings.get("gather_parts", 1),
    )
    here = Machines(0.0, 0.0, 1.0)
    times = row.slowest_s / cost_model.iteration(row.nprocs, costs, here).collect
    return replace(costs, act_s=act * times, env_s=env * times, wait_s=wait * times)


def measure_machines(machines: Machines, rows: Sequence[Row], most: int) -> Machines:
    """Measure what ranks of this machine need for an exchange; return the machines with these figures.

    Args:
        machines: nodes, cores and link, as the user describes them.
        rows: measured rows. They tell how much processes slow each other down.
        most: largest number of ranks to predict.

    Raises:
        CannotMeasureError: if ranks do not start.
    """
    two, cores = _link(2), machines.cores
    # An iteration's own exchange, averaged over its collectives, with ranks of one node.
    of_each = two["least_exchange_s"] - _EXCHANGED * two["message_s"] - cost_model.POLL_S / 2
    machines = replace(
        machines,
        latency_s=max(two["latency_s"], of_each / cost_model.COLLECTIVES),
        message_s=two["message_s"],
        bandwidth=two["bandwidth"],
        slower=measure.slowdown(rows[0], within_cores(rows)),
    )
    if cores is None or machines.ranks(most) <= cores:
        return machines
    here = len(available_cores())
    crowd = _link(2 * max(2, here))
    further = 2 * max(2, here) / here - max(1, 2 / here)
    later = max(0.0, crowd["exchange_s"] - two["exchange_s"]) / further
    return replace(machines, crowd_s=later)


def _alone(row: Row) -> float:
    """Return the seconds that rank 0 works alone besides the update. With one rank, its gather is a sort."""
    if row.nprocs == 1:
        return max(0.0, row.seconds - row.slowest_s - row.phases["update"])
    return sum(row.phases[phase] for phase in ("hash", "evaluate", "record"))


def _cost(run: Path, path: Path) -> dict[str, Any]:
    return _printed(["-m", "rank0rl.tools.speedup._cost", str(run.resolve())], path)


def _link(nprocs: int) -> dict[str, Any]:
    return _printed([str(_HERE / "_link.py"), str(nprocs)], Path())


def _printed(script: Sequence[str], path: Path) -> dict[str, Any]:
    """Run a Python script in a process of its own; return the JSON that it prints last."""
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
                f"cannot predict: {shlex.join(script)} did not end within {_LIMIT_S} s"
            ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise CannotMeasureError(f"cannot predict: {shlex.join(script)} failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
