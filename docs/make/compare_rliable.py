"""Compare the figures of docs/results.md with those of rliable: python docs/make/compare_rliable.py.

rliable is in none of the extras: install it first. Intervals differ in their last digits, because they are drawn.
"""

from __future__ import annotations

import numpy as np
from committed_runs import RIVALS, Runs, mujoco
from results import number, of_column, probability
from rliable import library, metrics

from rank0rl.tools.plot import interquartile_mean

OURS, RIVAL = "PPO, tuned", RIVALS["sb3"]


def main() -> None:
    runs = mujoco()
    print(f"{'interquartile mean':<50}{'rank0rl':<30}rliable")
    for task in runs:
        for column in (OURS, RIVAL):
            final = finals(runs, task, column)
            point, interval = library.get_interval_estimates(
                {column: final[:, None]}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=2000
            )
            theirs = (point[column][0], *interval[column][:, 0])
            cells = [shown(interquartile_mean([final])), shown(theirs)]
            print(f"{task + ', ' + column:<50.48}{cells[0]:<30}{cells[1]}")
    same = [task for task in runs if len(finals(runs, task, OURS)) == 10]
    some: Runs = {task: runs[task] for task in same}
    pair = [
        np.stack([finals(runs, task, column) for task in same], axis=1) for column in (OURS, RIVAL)
    ]
    point, interval = library.get_interval_estimates(
        {"pair": pair},
        lambda x, y: np.array([metrics.probability_of_improvement(x, y)]),
        reps=2000,
    )
    print(f"probability of improvement, {len(same)} tasks with 10 seeds")
    print(f"  rank0rl: {probability(some, OURS, RIVAL)}")
    low, high = interval["pair"][:, 0]
    print(f"  rliable: {point['pair'][0]:.2f} ({low:.2f} to {high:.2f})")


def finals(runs: Runs, task: str, column: str) -> np.ndarray:
    """Return the mean return at the end of each seed, shape (seeds,)."""
    return np.array([run.last for run in of_column(runs[task], column)])


def shown(estimate: tuple[float, ...]) -> str:
    """Return an estimate and its interval as the tables have them."""
    middle, low, high = (number(float(value)) for value in estimate)
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
