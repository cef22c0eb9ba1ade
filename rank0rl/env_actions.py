"""Actions that are a Tuple, a Dict or a Box of integers, as one row of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

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
