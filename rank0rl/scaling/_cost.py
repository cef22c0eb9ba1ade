"""What collecting costs in a process by itself, for `speedup --predict`: with one lane and with all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rank0rl import envs
from rank0rl.mpi.threads import set_threads
from rank0rl.mpi.weights import named_tensors
from rank0rl.rollout import Rollout
from rank0rl.run import config, plan
from rank0rl.run.config import RunOptions
from rank0rl.run.timing import Phases
from rank0rl.session import make_agent
from rank0rl.trainer import roll

_AT_LEAST_S = 2.0  # of each measurement
_STEPS = 100  # of each lane, where a batch does not say


def main() -> None:
    """Measure the run of this folder, and print what was found as JSON."""
    set_threads(1)
    folder = Path(sys.argv[1])
    options, agent_options = plan.read([], config.load(folder / "config.toml"), str(folder))
    found: dict[str, Any] = {"per_step": {}}
    for lanes in sorted({1, max(2, options.num_envs)}):
        rollout = Rollout(
            lambda: envs.make(options.env_id, options.wrappers, **options.env_kwargs),
            range(lanes),
            options.seed,
            steps=options.steps_per_env or _STEPS,
        )
        agent = make_agent(options, agent_options, rollout.spaces)
        part, wall, cpu = _measured(agent, rollout, options)
        steps = int(part["fragments"]["steps"].sum()) // lanes
        found["per_step"][lanes] = wall / steps, cpu / steps
        rollout.close()
    arrays = [*_arrays(part)]
    weights = named_tensors(agent.modules()).values()
    found |= {
        "row_bytes": sum(array.nbytes for array in arrays) / (lanes * steps),
        "arrays": len(arrays),
        "weights_bytes": sum(tensor.nbytes for tensor in weights),
    }
    print(json.dumps(found))


def _measured(agent: Any, rollout: Rollout, options: RunOptions) -> tuple[Any, float, float]:
    """A rank's part of a batch, and wall seconds and CPU seconds to collect and process it.

    The least of many turns: what disturbs a process only makes it slower.
    """
    part = roll(agent, rollout, options, Phases(), 1)
    turns: list[tuple[float, float]] = []
    end = time.perf_counter() + _AT_LEAST_S
    while len(turns) < 2 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        part = roll(agent, rollout, options, Phases(), 2 + len(turns))
        turns.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*turns, strict=True)
    return part, min(walls), min(cpus)


def _arrays(part: Mapping[str, Any]) -> Iterator[Any]:
    for value in part.values():
        if isinstance(value, Mapping):
            yield from _arrays(value)
        else:
            yield value


if __name__ == "__main__":
    main()
