"""python -m rank0rl evaluate RUN: the policy of a run's last checkpoint, on episodes of its own.

Whole episodes with seeds that training does not use; nothing in the run's folder is changed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl import envs
from rank0rl.agent import Agent, check_ranges
from rank0rl.batch import Batch
from rank0rl.evaluation import quiet, whole_episodes
from rank0rl.mpi.threads import set_threads
from rank0rl.run import checkpoint, plan
from rank0rl.run.config import RunOptions
from rank0rl.run.state import State
from rank0rl.session import make_agent


@dataclass(frozen=True)
class Options:
    """Mean return of a run's policy over some episodes, with the noise that it trained with."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, or one of its checkpoints, such as checkpoints/best.pt; nothing in it is changed."""
    episodes: int = 100
    """How many."""
    seed: int | None = None
    """Of the episodes: others than those of training. None: the run's, so that these are the episodes of its own evaluations."""
    deterministic: bool = False
    """Take the mean of normal actions. Choices are drawn as ever."""


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl evaluate")
    set_threads(1)
    try:
        check_ranges(given, episodes="[1, inf)", seed="[0, inf)")
        ended = evaluate(given.run, given.episodes, given.seed, given.deterministic)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ret, length = ended["return"], ended["length"]
    print(
        f"{len(ret)} episodes: return {ret.mean():.6g} (standard deviation {ret.std():.4g}, from "
        f"{ret.min():.6g} to {ret.max():.6g}), length {length.mean():.4g}"
    )
    return 0


def evaluate(
    run: Path, episodes: int, seed: int | None = None, deterministic: bool = False
) -> Batch:
    """Whole episodes of a run's environment with the policy of its last checkpoint.

    Args:
        run: its folder, or one of its checkpoints.
        episodes: how many.
        seed: of them; by default the run's.
        deterministic: act without noise, where it is normal.

    Returns:
        "return" and "length" of each, (episodes,).

    Raises:
        ValueError: if there is no such run, or its checkpoint is damaged.
    """
    agent, options = last_agent(run)
    return whole_episodes(
        quiet(agent) if deterministic else agent,
        lambda: envs.make(options.env_id, options.wrappers, **options.env_kwargs),
        episodes,
        options.seed if seed is None else seed,
    )


def last_agent(run: Path) -> tuple[Agent, RunOptions]:
    """The agent of a run's last checkpoint, and the run's options.

    Raises:
        ValueError: if there is no such run, or its checkpoint is damaged.
    """
    saved = checkpoint.read(checkpoint.latest(run))
    options, agent_options = plan.read([], saved["settings"], str(run))
    env = envs.make(options.env_id, options.wrappers, **options.env_kwargs)
    agent = make_agent(options, agent_options, envs.describe(env))
    env.close()
    State(agent, options, saved["settings"]).load(saved)
    return agent, options
