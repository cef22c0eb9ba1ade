"""python -m rank0rl play RUN: watch the policy of a run's last checkpoint, or film it.

The episodes are those of evaluate with the same seed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from rank0rl import envs
from rank0rl.agent import check_ranges
from rank0rl.batch import Batch
from rank0rl.evaluation import quiet, whole_episodes
from rank0rl.mpi.threads import set_threads
from rank0rl.tools import evaluate
from rank0rl.tools.video import film, has_display


@dataclass(frozen=True)
class Options(evaluate.Options):
    """Watch a run's policy in a window, or film it, with the noise that it trained with."""

    episodes: int = 1
    """How many."""
    video: Path | None = None
    """An mp4 to write, without a display. None: a window."""


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl play")
    set_threads(1)
    try:
        check_ranges(given, episodes="[1, inf)", seed="[0, inf)")
        ended = play(given.run, given.episodes, given.seed, given.deterministic, given.video)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for i, (ret, length) in enumerate(zip(ended["return"], ended["length"], strict=True)):
        print(f"episode {i}: return {ret:.6g}, length {length}")
    return 0


def play(
    run: Path,
    episodes: int = 1,
    seed: int | None = None,
    deterministic: bool = False,
    video: Path | None = None,
) -> Batch:
    """Show whole episodes of a run's environment with the policy of its last checkpoint.

    Args:
        run: its folder, or one of its checkpoints.
        episodes: how many.
        seed: of them; by default the run's.
        deterministic: act without noise, where it is normal.
        video: an mp4 to write, in place of a window.

    Returns:
        "return" and "length" of each, (episodes,).

    Raises:
        ValueError: if there is no such run, no display for a window, or what `film` raises.
    """
    if video is None and not has_display():
        raise ValueError(
            "there is no display here ($DISPLAY and $WAYLAND_DISPLAY are not set): give --video "
            "out.mp4"
        )
    agent, options = evaluate.last_agent(run)
    agent = quiet(agent) if deterministic else agent
    seed = options.seed if seed is None else seed
    if video is not None:
        return film(agent, options, video, seed, episodes)
    kwargs = {**options.env_kwargs, "render_mode": "human"}
    return whole_episodes(
        agent,
        lambda: envs.make(options.env_id, options.wrappers, **kwargs),
        episodes,
        seed,
        lanes=1,
    )
