"""python -m rank0rl evaluate RUN: the returns of a run's policy over whole episodes.

The episodes have seeds that training does not use. Nothing in the run's folder is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl.launch import usage_error
from rank0rl.options import check, option
from rank0rl.policy import load
from rank0rl.run.record import known_mean


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
    """Number of episodes, or of games, in which every agent has an episode."""
    seed: int | None = option(None, "[0, inf)")
    """Seed of the episodes, >= 0. None: the run's seed, which gives the episodes of the run's own evaluations. Training never sees any of these episodes."""
    deterministic: bool = False
    """Choose the most probable actions, and draw none at random."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl evaluate")
    try:
        check(given)
        policy = load(given.run, given.trust)
    except ValueError as error:
        return usage_error(str(error))
    ended = policy.evaluate(given.episodes, given.seed, given.deterministic)
    ret, length = ended["return"], ended["length"]
    drawn = policy.agent.noise[1] and not given.deterministic
    actions = "actions drawn at random" if drawn else "the most probable actions"
    print(
        f"{len(ret)} episodes with {actions}: return {ret.mean():.6g} (standard deviation {ret.std():.4g}, from "
        f"{ret.min():.6g} to {ret.max():.6g}), length {length.mean():.4g}"
    )
    for name in (name for name in ended if name not in ("return", "length")):
        print(f"{name} {known_mean(ended[name]):.6g}")
    return 0
