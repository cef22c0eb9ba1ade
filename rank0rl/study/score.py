"""The number by which a search compares runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rank0rl.run import folder as run_data


def score(folder: Path, objective: str) -> float:
    """Return what a run came to.

    Args:
        folder: the run's folder.
        objective: "final" for the mean return of its last 100 episodes; "mean" for the mean of its
            learning curve over all of its steps, where a run that ended early keeps its last return.
    """
    run = run_data.read_run(folder)
    ret, steps = run.column("return_mean"), run.column("steps")
    there = np.isfinite(ret)
    if not there.any():
        return -np.inf
    ret, steps = ret[there], steps[there]
    if objective == "final":
        return float(ret[-1])
    by_steps = "num_episodes" not in run.settings
    end = max(float(run.settings["total_steps"]) if by_steps else 0.0, steps[-1])
    ret, steps = np.append(ret, ret[-1]), np.append(steps, end)
    return float(np.trapezoid(ret, steps) / max(1.0, end - steps[0]))
