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

Array = npt.NDArray[Any]


def describe(env: gym.Env[Any, Any]) -> Spaces:
    """Return the spaces of an environment, as plain data.

    Raises:
        ValueError: for a space that no agent here can use, naming it.
    """
    obs, act = env.observation_space, env.action_space
    if not isinstance(obs, spaces.Box):
        raise ValueError(
            f"observations must be of fixed size, a Box or what can be flattened to one: "
            f"{name_of(env)} has {obs}; wrap it with gymnasium.wrappers.TransformObservation, or leave "
            f"keys of a Dict out with FilterObservation(filter_keys=[...])"
        )
    if not (act.dtype.kind == "f" if isinstance(act, spaces.Box) else _choices(act)):
        raise ValueError(
            f"actions must be floats (a Box), or choices (Discrete, MultiDiscrete, MultiBinary, a Box "
            f"of integers with at most 256 values each), or a Tuple or Dict of only one of these "
            f"kinds: {name_of(env)} has {act}; wrap it with gymnasium.wrappers.TransformAction"
        )
    return Spaces(
        dataclasses.replace(_describe(obs), parts=getattr(env, "rank0rl_parts", {})), _describe(act)
    )


def _describe(space: gym.Space[Any]) -> Space:
    if not isinstance(space, spaces.Box):
        numbers = _choices(space)
        assert numbers is not None
        assert space.shape is not None
        return Space("discrete", space.shape, "int64", choices=tuple(numbers[0].tolist()))
    dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
    return Space(
        "box", space.shape, dtype.name, low=space.low.astype(dtype), high=space.high.astype(dtype)
    )


def parts(space: gym.Space[Any]) -> dict[str, slice]:
    """Return key -> columns of its numbers in the flattened observation; {} if the space is not a Dict."""
    keys = space.spaces if isinstance(space, spaces.Dict) else {}
    sizes = [spaces.flatdim(one) for one in keys.values()]
    ends = accumulate(sizes)
    return {name: slice(b - n, b) for name, n, b in zip(keys, sizes, ends, strict=True)}


def spaces_in_words(env: gym.Env[Any, Any]) -> str:
    """Describe the spaces in words that must be equal for all environments of a run. Bounds of observations may differ."""
    obs = describe(env).obs
    return f"actions {env.action_space} and observations {obs.shape} {obs.dtype}"


def refuse_other_spaces(words: Mapping[int, str]) -> None:
    """Refuse environments that do not all have the same spaces.

    Args:
        words: index of an env -> what `spaces_in_words` returned for it.

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
    """Return the environment's number for the agent's choice 0, or one for each choice; None if all are 0."""
    first = getattr(env.action_space, "start", 0)
    return first if np.any(first) else None


def to_env(act: Any, space: Space, first: Any) -> Any:
    """Convert actions of an agent, (B, *act), for environments: clip floats to the bounds, renumber choices.

    Args:
        act: actions as an agent gives them.
        space: space of the actions.
        first: what `first_choice` returned.
    """
    if space.kind == "discrete":
        return act if first is None else act + first
    assert space.low is not None
    assert space.high is not None
    return np.minimum(np.maximum(act, space.low), space.high)  # half the time of np.clip


def name_of(env: gym.Env[Any, Any]) -> str:
    """Return the id of an environment, or the name of its class if it has no id."""
    return env.spec.id if env.spec else type(env.unwrapped).__name__


# Most values of an integer that is a choice: those of a byte. A policy has an output for each.
_MAX_VALUES = 256


class FlatActions(gym.ActionWrapper[Any, Any, Any]):
    """An environment whose actions are one row of numbers: of choices, or of floats.

    Args:
        env: the environment.
        flat: the space of the rows, as `_flat_space` returns it.
    """

    def __init__(self, env: gym.Env[Any, Any], flat: spaces.Space[Any]) -> None:
        super().__init__(env)
        self.action_space = flat

    def action(self, action: Any) -> Any:
        """Convert a row of numbers to the environment's action. Return a dict or tuple unchanged."""
        if isinstance(action, dict | tuple):
            return action
        return _nested(self.env.action_space, iter(np.ravel(action)))


def flatten_actions(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Convert actions that are a dict, a tuple or integers to a row of numbers, if they can be."""
    space = env.action_space
    is_integer = isinstance(space, spaces.Box) and space.dtype.kind in "iu"
    flat = None
    if is_integer or isinstance(space, spaces.Tuple | spaces.Dict):
        flat = _flat_space(space)
    return env if flat is None else FlatActions(env, flat)


def _flat_space(space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of rows of numbers that stand for the actions of a space, part after part.

    Returns:
        A MultiDiscrete if all parts are choices, a Box if all are floats, None otherwise.
    """
    parts = list(leaves(space))
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


def leaves(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """Yield the spaces of which a space consists, none of them a Tuple or a Dict."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for one in inner:
            yield from leaves(one)
    else:
        yield space


def _choices(space: spaces.Space[Any]) -> tuple[Array, Array] | None:
    """Return the number of values of each choice and the number of its first value; None for other spaces."""
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
        if all(size <= _MAX_VALUES for size in sizes):
            return sizes.astype(np.int64), low.astype(np.int64)
    return None


def _nested(space: spaces.Space[Any], numbers: Iterator[Any]) -> Any:
    """Build an action of a space from the next numbers."""
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(one, numbers) for one in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: _nested(one, numbers) for name, one in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(next(numbers))
    assert space.shape is not None
    size = math.prod(space.shape)
    return np.array([*islice(numbers, size)], space.dtype).reshape(space.shape)
