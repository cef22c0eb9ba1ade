"""Check what a run does with its environments, before it begins: on rank 0, with one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from rank0rl.agent import Spaces
from rank0rl.envs import make as envs
from rank0rl.envs import spaces as env_spaces
from rank0rl.envs.games import agents_of
from rank0rl.envs.wrappers import ResetMethod
from rank0rl.options import flag
from rank0rl.run.agents import load_function
from rank0rl.run.curriculum import Curriculum
from rank0rl.run.options import RunOptions


def check_environment(options: RunOptions) -> tuple[Spaces, int]:
    """Make an environment as a run makes its own, and close it.

    Returns:
        Its spaces; and the number of agents, if it is a game, else 1.

    Raises:
        ValueError: if there can be no such environment, curriculum or arguments by index.
    """
    kwargs = options.env_kwargs
    if options.env_kwargs_of:
        own = load_function(options.env_kwargs_of)(0)
        if not isinstance(own, Mapping):
            raise ValueError(f"{options.env_kwargs_of}(0) must return a dict: got {own!r:.100}")
        kwargs = {**kwargs, **own}
    env = envs.make(options.env_id, options.wrappers, **kwargs)
    if options.curriculum:
        _check_curriculum(options, env)
    spaces = env_spaces.describe(env)
    envs.refuse_running_statistics(env)
    env.close()
    return spaces, len(agents_of(env))


def check_games(options: RunOptions, nworkers: int) -> None:
    """Check that whole games fit into a run, and whole numbers of them into a rank.

    Raises:
        ValueError: if they do not, or an option knows no games.
    """
    agents = options.agents
    if agents == 1:
        return
    for name in ("num_envs", "rank0_envs", "episodes_per_batch"):
        if (value := getattr(options, name) or 0) % agents:
            less = value // agents * agents
            nearest = [f"{flag(name)} {n}" for n in (less, less + agents) if n]
            raise ValueError(
                f"{name} must be a multiple of {agents}, because each of the {agents} agents of a game "
                f"of {options.env_id} counts: got {value}; set {' or '.join(nearest)}"
            )
    for name in ("num_envs", "episodes_per_batch"):
        games = (getattr(options, name) or options.num_envs) // agents
        if games < nworkers:
            raise ValueError(
                f"every rank needs a whole game: got {games} games of {agents} agents, and nprocs="
                f"{nworkers}; set {flag(name)} {nworkers * agents} or --nprocs {games}"
            )
    for name in ("env_processes", "env_retries", "on_env_error"):
        if (value := getattr(options, name)) not in (False, 0, "stop"):
            raise ValueError(
                f"{name} is for environments that are stepped by themselves, and {options.env_id} is a "
                f"game of {agents} agents: got {value}; leave {flag(name)} out"
            )


def _check_curriculum(options: RunOptions, env: Any) -> None:
    """Choose the first settings, and reset an environment with them."""
    curriculum = Curriculum(load_function(str(options.curriculum)))
    try:
        curriculum.advance(0.0, {})
    except Exception as error:  # whatever the user's function raises
        raise ValueError(
            f"--curriculum {options.curriculum}, called with progress 0.0 and an empty record: "
            f"{type(error).__name__}: {error}"
        ) from error
    if options.curriculum_method:
        env = ResetMethod(partial(lambda same: same, env), options.curriculum_method)
    settings = json.loads(curriculum.text)
    try:
        env.reset(seed=0, options=settings)
    except Exception as error:  # whatever the environment raises
        raise ValueError(
            f"{options.env_id} cannot be reset with options={settings}: {type(error).__name__}: "
            f"{error}; it must take what --curriculum returns"
        ) from error
