"""Spaces of environments: their description, and actions as one row of numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

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


Array = npt.NDArray[Any]

MAX_VALUES = 256
"""Most values of an integer that is a choice: those of a byte. A policy has an output for each."""


class FlatActions(gym.ActionWrapper[Any, Any, Any]):
    """An environment whose actions are one row of numbers: of choices, or of floats.

    Args:
        env: the environment.
        flat: the space of the rows, as `flat_space` returns it.
    """

    def __init__(self, env: gym.Env[Any, Any], flat: spaces.Space[Any]) -> None:
        """Wrap the environment."""
        super().__init__(env)
        self.action_space = flat

    def action(self, action: Any) -> Any:
        """Return a row of numbers as the environment's action; such an action, as it is."""
        if isinstance(action, dict | tuple):
            return action
        return _nested(self.env.action_space, iter(np.ravel(action)))


def flatten_actions(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return an environment whose actions are one row of numbers, if they are none and can be."""
    space = env.action_space
    is_integer = isinstance(space, spaces.Box) and space.dtype.kind in "iu"
    flat = None
    if is_integer or isinstance(space, spaces.Tuple | spaces.Dict):
        flat = flat_space(space)
    return env if flat is None else FlatActions(env, flat)


def flat_space(space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of the rows of numbers that stand for a space's actions, part after part.

    Returns:
        A MultiDiscrete if all parts are choices, a Box if all are floats, None for others.
    """
    parts = [*_parts(space)]
    choices = [found for part in parts if (found := _choices(part))]
    floats = [part for part in parts if isinstance(part, spaces.Box) and part.dtype.kind == "f"]
    if parts and len(choices) == len(parts):
        sizes, first = (np.concatenate(numbers) for numbers in zip(*choices, strict=True))
        return spaces.MultiDiscrete(sizes, start=first)
    if parts and len(floats) == len(parts):
        low = np.concatenate([part.low.ravel() for part in floats])
        high = np.concatenate([part.high.ravel() for part in floats])
        return spaces.Box(low, high, dtype=low.dtype.type)
    return None


def _parts(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """Yield the spaces of which a space consists, none of them a Tuple or a Dict."""
    if isinstance(space, spaces.Tuple):
        inner = space.spaces
    elif isinstance(space, spaces.Dict):
        inner = tuple(space.spaces.values())
    else:
        yield space
        return
    for one in inner:
        yield from _parts(one)


def _choices(space: spaces.Space[Any]) -> tuple[Array, Array] | None:
    """Return the number of values of each choice, and what the first value is called; None for others."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.n]), np.array([space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel(), space.start.ravel()
    if isinstance(space, spaces.MultiBinary):
        n = math.prod(space.shape)
        return np.full(n, 2), np.zeros(n, np.int64)
    if isinstance(space, spaces.Box) and space.dtype.kind in "iu":
        low, high = space.low.ravel().astype(object), space.high.ravel().astype(object)
        sizes = high - low + 1  # Python's integers: those of numpy overflow
        if all(size <= MAX_VALUES for size in sizes):
            return sizes.astype(np.int64), low.astype(np.int64)
    return None


def _nested(space: spaces.Space[Any], numbers: Iterator[Any]) -> Any:
    """Return an action of a space, made of the next numbers."""
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(one, numbers) for one in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: _nested(one, numbers) for name, one in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(next(numbers))
    assert space.shape is not None
    size = math.prod(space.shape)
    return np.array([*islice(numbers, size)], space.dtype).reshape(space.shape)
