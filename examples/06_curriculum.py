r"""A curriculum: the corridor of 02_environment.py begins farther from its goal as the agent succeeds.

    python examples/06_curriculum.py
    python train.py examples.02_environment:corridor --curriculum examples.06_curriculum:farther \
        --info success --total-steps 200000

Without the curriculum, all episodes begin 30 steps from the goal, and PPO never gets there.
"""

from typing import Any

import rank0rl


def farther(progress: float, record: dict[str, Any]) -> dict[str, int]:
    """Begin 2 steps from the goal, and 2 steps farther whenever 8 of 10 episodes reach it.

    Rank 0 calls this after every iteration. What it returns becomes reset(options=...) of the next
    episodes.

    Args:
        progress: share of the run that is over, 0 to 1.
        record: the last row of progress.csv, with what this function returned last as "settings";
            empty at first.
    """
    distance: int = record["settings"]["distance"] if record else 2
    if record.get("success_mean", 0.0) > 0.8:
        distance = min(distance + 2, 30)
    return {"distance": distance}


if __name__ == "__main__":
    run = rank0rl.train(
        "02_environment:corridor",
        curriculum=farther,
        info=["success"],
        nprocs=2,
        num_envs=8,
        total_steps=50_000,
    )
    for column in ("distance", "success_mean"):
        print(f"{column}: {list(run.progress[column])[-1]:g}")
