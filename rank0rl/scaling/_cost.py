"""Measure what collecting costs in a process by itself, with one env and with all, for `speedup --predict`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rank0rl import envs
from rank0rl.collector import Collector
from rank0rl.mpi import trees
from rank0rl.mpi.threads import set_threads
from rank0rl.mpi.weights import named_tensors
from rank0rl.rollout import Rollout
from rank0rl.run import config, plan, trust
from rank0rl.run.agents import make_agent
from rank0rl.run.timing import Phases

_AT_LEAST_S = 2.0  # seconds of each measurement
_STEPS = 100  # steps of each env, for runs whose batches have no fixed number


def main() -> None:
    """Measure the run whose folder is the argument; print what was found as JSON."""
    set_threads(1)
    folder = Path(sys.argv[1])
    settings = trust.without_seal(config.load(folder / "config.toml"))  # the study made this run
    options, agent_options = plan.read([], settings, str(folder))
    found: dict[str, Any] = {"per_step": {}}
    for num_envs in sorted({1, max(2, options.num_envs)}):
        rollout = Rollout(
            lambda: envs.make(options.env_id, options.wrappers, **options.env_kwargs),
            range(num_envs),
            options.seed,
            steps=options.steps_per_env or _STEPS,
        )
        agent = make_agent(options, agent_options, rollout.spaces)
        collector = Collector(agent, rollout, options, Phases())
        wall, cpu = _measured(collector)
        steps = int(collector.rolled["fragments"]["steps"].sum()) // num_envs
        found["per_step"][num_envs] = wall / steps, cpu / steps
        rollout.close()
    arrays = [array for _, array in trees.leaves(collector.rolled, trees.dict_items)]
    weights = named_tensors(agent.modules()).values()
    found |= {
        "row_bytes": sum(array.nbytes for array in arrays) / (num_envs * steps),
        "arrays": len(arrays),
        "weights_bytes": sum(tensor.nbytes for tensor in weights),
    }
    print(json.dumps(found))


def _measured(collector: Collector) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds to collect and process a batch.

    Both are the least of many turns, because what disturbs a process only makes it slower.
    """
    collector.roll(1)
    turns: list[tuple[float, float]] = []
    end = time.perf_counter() + _AT_LEAST_S
    while len(turns) < 2 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        collector.roll(2 + len(turns))
        turns.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*turns, strict=True)
    return min(walls), min(cpus)


if __name__ == "__main__":
    main()
