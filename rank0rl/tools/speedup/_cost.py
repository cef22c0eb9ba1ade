"""Measure what collecting costs in a process by itself, with one env and with all, for `speedup --predict`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rank0rl.collector import Collector
from rank0rl.envs import make as envs
from rank0rl.mpi import trees
from rank0rl.mpi.threads import set_threads
from rank0rl.mpi.weights import named_tensors
from rank0rl.rollout import Rollout
from rank0rl.run import plan, trust
from rank0rl.run import settings as config
from rank0rl.run.agents import make_agent
from rank0rl.run.timing import Phases

_AT_LEAST_S = 2.0  # seconds of each measurement


def main() -> None:
    """Measure the run whose folder is the argument; print what was found as JSON."""
    set_threads(1)
    folder = Path(sys.argv[1])
    settings = trust.without_seal(config.load(folder / "config.toml"))  # the study made this run
    options, agent_options = plan.of_settings(settings, str(folder))
    found: dict[str, Any] = {"per_step": {}}
    for num_envs in sorted({1, max(2, options.num_envs)}):
        numbers = range(num_envs)
        rollout = Rollout(
            lambda: envs.make(options.env_id, options.wrappers, **options.env_kwargs),
            numbers,
            options.seed,
            steps=options.steps_per_env,
            episodes=None if options.steps_per_env else numbers.__iter__,
        )
        agent = make_agent(options, agent_options, rollout.spaces)
        collector = Collector(agent, rollout, options, Phases())
        wall, cpu = _measured(collector)
        found["per_step"][num_envs] = num_envs * wall, num_envs * cpu
        rollout.close()
    arrays = [array for _, array in trees.leaves(collector.rolled, trees.dict_items)]
    weights = named_tensors(agent.modules()).values()
    found |= {
        "row_bytes": sum(array.nbytes for array in arrays) / _steps(collector),
        "arrays": len(arrays),
        "weights_bytes": sum(tensor.nbytes for tensor in weights),
    }
    print(json.dumps(found))


def _measured(collector: Collector) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a step, to collect and process a batch.

    Both are the least of many turns, because what disturbs a process only makes it slower.
    """
    collector.roll(1)
    turns: list[tuple[float, float]] = []
    end = time.perf_counter() + _AT_LEAST_S
    while len(turns) < 2 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        collector.roll(2 + len(turns))
        took = time.perf_counter() - wall, time.process_time() - cpu
        turns.append((took[0] / _steps(collector), took[1] / _steps(collector)))
    walls, cpus = zip(*turns, strict=True)
    return min(walls), min(cpus)


def _steps(collector: Collector) -> int:
    """Return the steps of the batch that was collected last."""
    return int(collector.rolled["fragments"]["steps"].sum())


if __name__ == "__main__":
    main()
