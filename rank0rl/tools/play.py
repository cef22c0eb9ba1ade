"""python -m rank0rl play RUN: show the policy of a run's last checkpoint in a window, or film it.

The episodes are those of `evaluate` with the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl.batch import Batch
from rank0rl.evaluation import Deterministic, whole_episodes
from rank0rl.launch import usage_error
from rank0rl.mpi.threads import set_threads
from rank0rl.options import OptionError, check, option
from rank0rl.policy import Policy, load
from rank0rl.run.shares import make_shown
from rank0rl.tools import evaluate
from rank0rl.tools.video import film, has_display


@dataclass(frozen=True)
class Options(evaluate.Options):
    """Show a run's policy in a window, or film it, with the noise of training."""

    episodes: int = option(1, "[1, inf)")
    """Number of episodes, or of games, in which every agent has an episode."""
    video: Path | None = None
    """MP4 file to write; no display is needed. None: open a window."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl play")
    set_threads(1)
    try:
        check(given)
        policy = load(given.run, given.trust)
    except ValueError as error:
        return usage_error(str(error))
    try:
        ended = _play(given, policy)
    except OptionError as error:
        return usage_error(str(error))
    for i, (ret, length) in enumerate(zip(ended["return"], ended["length"], strict=True)):
        print(f"episode {i}: return {ret:.6g}, length {length}")
    return 0


def _play(given: Options, policy: Policy) -> Batch:
    """Show whole episodes; return "return" and "length" of each, shape (episodes,)."""
    if given.video is None and not has_display():
        raise OptionError(
            "a window needs a display, and $DISPLAY and $WAYLAND_DISPLAY are not set: write a file "
            "with --video out.mp4"
        )
    agent, options = policy.agent, policy.options
    agent = Deterministic.of(agent, given.deterministic)
    seed = options.seed if given.seed is None else given.seed
    if given.video is not None:
        return film(agent, options, given.video, seed, given.episodes)
    return whole_episodes(
        agent,
        lambda index: make_shown(options, index, render_mode="human"),
        given.episodes,
        seed,
        num_envs=1,
    )
