"""python -m rank0rl evaluate RUN: the returns of a run's policy over whole episodes.

The episodes have seeds that training does not use. Nothing in the run's folder is changed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl import envs, evaluation
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.collector import env_maker
from rank0rl.evaluation import whole_episodes
from rank0rl.mpi.threads import set_threads
from rank0rl.options import check as check_options
from rank0rl.options import option
from rank0rl.run import checkpoint, plan
from rank0rl.run.agents import make_agent
from rank0rl.run.columns import known_mean
from rank0rl.run.options import RunOptions
from rank0rl.run.state import load_weights


@dataclass(frozen=True, kw_only=True)
class RunToLoad:
    """Options of a tool that loads a run's agent."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, or one of its checkpoints, such as checkpoints/best.pt. Nothing in it is changed."""
    trust: bool = False
    """Import all code that the run names. Without it, code that is not part of Gymnasium or rank0rl is only imported for runs of your own."""


@dataclass(frozen=True)
class Options(RunToLoad):
    """Print the mean return of a run's policy over whole episodes, with the noise of training."""

    episodes: int = option(100, "[1, inf)")
    """Number of episodes."""
    seed: int | None = option(None, "[0, inf)")
    """Seed of the episodes, >= 0. None: the run's seed, which gives the episodes of the run's own evaluations. Training never sees any of these episodes."""
    deterministic: bool = False
    """Act with the mean of normally distributed actions. Discrete actions are still drawn at random."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl evaluate")
    set_threads(1)
    try:
        check_options(given)
        ended = evaluate(given.run, given.episodes, given.seed, given.deterministic, given.trust)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ret, length = ended["return"], ended["length"]
    print(
        f"{len(ret)} episodes: return {ret.mean():.6g} (standard deviation {ret.std():.4g}, from "
        f"{ret.min():.6g} to {ret.max():.6g}), length {length.mean():.4g}"
    )
    for name in (name for name in ended if name not in ("return", "length")):
        print(f"{name} {known_mean(ended[name]):.6g}")
    return 0


def evaluate(
    run: Path,
    episodes: int,
    seed: int | None = None,
    deterministic: bool = False,
    trust: bool = False,
) -> Batch:
    """Run whole episodes of a run's environment with the policy of its last checkpoint.

    Args:
        run: the run's folder, or one of its checkpoints.
        episodes: number of episodes.
        seed: seed of the episodes; None means the run's seed.
        deterministic: act with the mean of normally distributed actions.
        trust: import all code that the run names.

    Returns:
        "return", "length" and what --info named, of each episode, shape (episodes,).

    Raises:
        ValueError: as `last_agent`.
    """
    agent, options = last_agent(run, trust)
    return whole_episodes(
        evaluation.deterministic(agent) if deterministic else agent,
        env_maker(options),
        episodes,
        options.seed if seed is None else seed,
        info=options.info,
    )


def last_agent(run: Path, trust: bool = False) -> tuple[Agent, RunOptions]:
    """Load the agent of a run's last checkpoint; return it with the run's options.

    Args:
        run: the run's folder, or one of its checkpoints.
        trust: import all code that the run names.

    Raises:
        ValueError: if there is no such run, its checkpoint is damaged, or it names code that is not
            trusted.
    """
    saved = plan.read_saved(checkpoint.latest(run), trust=trust)
    options, agent_options = plan.read([], saved["settings"], str(run))
    env = env_maker(options)()
    agent = make_agent(options, agent_options, envs.describe(env))
    env.close()
    load_weights(agent, saved)
    return agent, options
