"""The spaces of environments, as plain data, and actions as environments take them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import gymnasium as gym
import numpy as np

from rank0rl.agent import Space, Spaces


def describe(env: gym.Env[Any, Any]) -> Spaces:
    """Return the spaces of an environment, as plain data.

    Raises:
        ValueError: for a space that no agent here can use, naming it.
    """
    obs, act = env.observation_space, env.action_space
    if not isinstance(obs, gym.spaces.Box):
        raise ValueError(
            f"observations must be of fixed size, a Box or what can be flattened to one: "
            f"{name_of(env)} has {obs}; wrap it with gymnasium.wrappers.TransformObservation, or leave "
            f"keys of a Dict out with FilterObservation(filter_keys=[...])"
        )
    choices = gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary
    if not (
        isinstance(act, choices) or (isinstance(act, gym.spaces.Box) and act.dtype.kind == "f")
    ):
        raise ValueError(
            f"actions must be floats (a Box), or choices (Discrete, MultiDiscrete, MultiBinary, a Box "
            f"of integers with at most 256 values each), or a Tuple or Dict of only one of these "
            f"kinds: {name_of(env)} has {act}; wrap it with gymnasium.wrappers.TransformAction"
        )
    return Spaces(
        dataclasses.replace(_describe(obs), parts=getattr(env, "rank0rl_parts", {})), _describe(act)
    )


def parts(space: gym.Space[Any]) -> dict[str, slice]:
    """Return the columns of each key of a space, once it is flattened; none if it is no Dict."""
    keys = space.spaces if isinstance(space, gym.spaces.Dict) else {}
    sizes = [gym.spaces.flatdim(one) for one in keys.values()]
    ends = accumulate(sizes)
    return {name: slice(b - n, b) for name, n, b in zip(keys, sizes, ends, strict=True)}


def spaces_in_words(env: gym.Env[Any, Any]) -> str:
    """Return what all environments of a run must have in common. Bounds of observations may differ."""
    obs = describe(env).obs
    return f"actions {env.action_space} and observations {obs.shape} {obs.dtype}"


def refuse_other_spaces(words: Mapping[int, str]) -> None:
    """Refuse environments that do not all have the same spaces.

    Args:
        words: index of an env -> its `spaces_in_words`.

    Raises:
        ValueError: naming the first env that differs.
    """
    first = next(iter(words), None)
    for env, its in words.items():
        if first is not None and its != words[first]:
            raise ValueError(
                f"all environments of a run must have the same spaces: env {first} has "
                f"{words[first]}; env {env} has {its}"
            )


def first_choice(env: gym.Env[Any, Any]) -> Any:
    """Return what a discrete action space calls its value 0: a number, or one for each choice; None for 0."""
    first = getattr(env.action_space, "start", 0)
    return first if np.any(first) else None


def to_env(act: Any, space: Space, first: Any) -> Any:
    """Return actions (B, *act) as environments take them: clipped to their bounds, or with their numbers.

    Args:
        act: actions as an agent gives them.
        space: of the actions.
        first: what `first_choice` returns.
    """
    if space.kind == "discrete":
        return act if first is None else act + first
    assert space.low is not None
    assert space.high is not None
    return np.minimum(np.maximum(act, space.low), space.high)  # half the time of np.clip


def _describe(space: gym.Space[Any]) -> Space:
    if isinstance(space, gym.spaces.Discrete):
        return Space("discrete", (), "int64", choices=(int(space.n),))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return Space(
            "discrete", space.nvec.shape, "int64", choices=tuple(space.nvec.ravel().tolist())
        )
    if isinstance(space, gym.spaces.MultiBinary):
        return Space("discrete", space.shape, "int64", choices=(2,) * math.prod(space.shape))
    assert isinstance(space, gym.spaces.Box)
    dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
    return Space(
        "box", space.shape, dtype.name, low=space.low.astype(dtype), high=space.high.astype(dtype)
    )


def name_of(env: gym.Env[Any, Any]) -> str:
    """Return the id of an environment, or the name of its class if it has no id."""
    return env.spec.id if env.spec else type(env.unwrapped).__name__
