"""Check what a run does with its environments, before it begins: on rank 0, with one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from rank0rl import env_spaces, envs
from rank0rl.agent import Spaces
from rank0rl.env_wrappers import ResetMethod
from rank0rl.run.agents import load_function
from rank0rl.run.curriculum import Curriculum
from rank0rl.run.options import RunOptions


def check_environment(options: RunOptions) -> Spaces:
    """Make an environment as a run makes its own, and close it; return its spaces.

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
    return spaces


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
