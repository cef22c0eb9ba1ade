"""Spaces of environments: their description, flattening, and whether what an environment returns fits them.

A full check takes microseconds. So `EnvBlock` makes it only at every reset, at the first step of every env in
an iteration, and where something that is not a bool ends an episode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, islice
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from rank0rl.agent import Space, Spaces

Array = npt.NDArray[Any]

# Most values of an integer that is a choice: those of a byte. A policy has an output for each.
_MAX_VALUES = 256
_MOST_NUMBERS = 1 << 28  # of an observation, or an action: a GB


class _Hybrid(spaces.Box):
    """Rows of choices, each numbered from 0, and of floats behind them, for actions that have both."""

    def __init__(self, sizes: Array, first: Array, low: Array, high: Array) -> None:
        lows, highs = np.concatenate([0 * sizes, low]), np.concatenate([sizes - 1, high])
        super().__init__(lows.astype(low.dtype), highs.astype(low.dtype), dtype=low.dtype.type)
        self.choices = tuple(sizes.tolist())
        """Number of values of each choice."""
        self.first = first
        """The environment's numbers for choices 0."""


class _Float64(spaces.Box):
    """A space of observations that are kept in float64, and not rounded to float32."""


def keep_float64(env: gym.Env[Any, Any]) -> None:
    """Let observations of an environment be kept in float64.

    Raises:
        ValueError: if they are not of that dtype.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Box) or space.dtype != np.float64:
        raise ValueError(
            f"--obs-dtype float64 keeps all digits of observations that are float64: those of {name_of(env)} "
            f"are {space.dtype}; leave the option out, or let the environment return float64"
        )
    env.observation_space = _Float64(space.low, space.high, dtype=np.float64)


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
            f"of integers with at most 256 values each), or a Tuple or Dict of these: "
            f"{name_of(env)} has {act}; wrap it with gymnasium.wrappers.TransformAction"
        )
    observed = dataclasses.replace(_describe(obs), parts=getattr(env, "rank0rl_parts", {}))
    acted = _describe(act, is_action=True)
    if not observed.size:
        raise ValueError(
            f"observations must have at least one number: {name_of(env)} has {obs}; let it return a constant"
        )
    if not 1 <= acted.size <= _MOST_NUMBERS:
        raise ValueError(
            f"actions must have 1 to {_MOST_NUMBERS:,} numbers, and values of choices: {name_of(env)} has {act}, with "
            f"{acted.size:,}"
        )
    return Spaces(observed, acted, getattr(env.unwrapped, "rank0rl_agents", ()))


def _describe(space: gym.Space[Any], is_action: bool = False) -> Space:
    if not isinstance(space, spaces.Box):
        numbers = _choices(space)
        assert numbers is not None
        assert space.shape is not None
        sizes, first = numbers[0].tolist(), numbers[1].reshape(space.shape)
        renumbered = first if first.any() else None
        return Space("discrete", space.shape, "int64", choices=tuple(sizes), first=renumbered)
    rounds = space.dtype == np.float64 and not isinstance(space, _Float64)
    dtype = np.dtype(np.float32) if rounds else space.dtype
    choices = space.choices if isinstance(space, _Hybrid) else ()
    with np.errstate(over="ignore"):  # what is beyond float32 is no bound
        low, high = space.low.astype(dtype), space.high.astype(dtype)
    if rounds and is_action:
        # A bound that was rounded outwards is not within the environment's own.
        up, down = np.nextafter(low, np.float32(np.inf)), np.nextafter(high, np.float32(-np.inf))
        up = np.where((low < space.low) & np.isfinite(low), up, low)
        down = np.where((high > space.high) & np.isfinite(high), down, high)
        low, high = np.where(up <= down, up, low), np.where(up <= down, down, high)
    numbered: Array | None = None
    if isinstance(space, _Hybrid) and space.first.any():
        numbered = np.concatenate([space.first, np.zeros(low.size - len(choices), np.int64)])
    kind = "hybrid" if choices else "box"
    return Space(kind, space.shape, dtype.name, choices, low, high, numbered)


def _parts(space: gym.Space[Any]) -> dict[str, slice]:
    """Return key -> columns of its numbers in the flattened observation; {} if the space is not a Dict."""
    keys = space.spaces if isinstance(space, spaces.Dict) else {}
    sizes = [spaces.flatdim(one) for one in keys.values()]
    ends = accumulate(sizes)
    return {name: slice(b - n, b) for name, n, b in zip(keys, sizes, ends, strict=True)}


def spaces_in_words(env: gym.Env[Any, Any]) -> str:
    """Describe the spaces in words that must be equal for all environments of a run. Bounds of observations may differ."""
    obs = describe(env).obs
    sizes = {key: columns.stop - columns.start for key, columns in obs.parts.items()}
    keys = f" with numbers of keys {sizes}" if sizes else ""
    return f"actions {env.action_space} and observations {obs.shape} {obs.dtype}{keys}"


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


def to_env(act: Any, space: Space) -> Any:
    """Convert actions of an agent, (B, *act), for environments: clip floats to the bounds, renumber choices.

    Args:
        act: actions as an agent gives them.
        space: space of the actions.
    """
    if space.kind == "discrete":
        return act if space.first is None else act + space.first
    assert space.low is not None
    assert space.high is not None
    return np.minimum(np.maximum(act, space.low), space.high)  # half the time of np.clip


def name_of(env: Any) -> str:
    """Return the id of an environment, or the name of its class if it has no id."""
    return str(env.spec.id) if env.spec else type(env.unwrapped).__name__


def flatten(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Wrap an environment so that its observations and actions are rows of numbers, if they can be.

    Choices become one-hot in observations. Actions that are a dict, a tuple or integers become choices,
    floats, or choices and floats behind them.
    """
    act = env.action_space
    is_integer = isinstance(act, spaces.Box) and act.dtype.kind in "iu"
    if is_integer or isinstance(act, spaces.Tuple | spaces.Dict):
        flat_act = _flat_space(act)
        env = env if flat_act is None else _FlatActions(env, flat_act)
    obs = env.observation_space
    numbers = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    parts = [*_leaves(obs)]
    if isinstance(obs, spaces.Box) or not parts or not all(isinstance(p, numbers) for p in parts):
        return env
    if (size := spaces.flatdim(obs)) > _MOST_NUMBERS:
        raise ValueError(
            f"an observation must be at most {_MOST_NUMBERS:,} numbers: {name_of(env)} has {obs}, which is {size:,}, "
            f"because choices become one-hot; wrap it with gymnasium.wrappers.TransformObservation"
        )
    flat: Any = gym.wrappers.FlattenObservation(env)
    flat.rank0rl_parts = _parts(obs)
    return flat


def is_flattened(env: gym.Env[Any, Any]) -> bool:
    """Return True if `flatten` has flattened the observations."""
    return isinstance(env, gym.wrappers.FlattenObservation)


def nested_actions(env: gym.Env[Any, Any]) -> Callable[[Any], Any] | None:
    """Return the function that converts rows to the environment's actions, if `flatten` has flattened these."""
    inner = env.env if isinstance(env, gym.wrappers.FlattenObservation) else env
    return inner.action if isinstance(inner, _FlatActions) else None


class _FlatActions(gym.wrappers.TransformAction[Any, Any, Any]):
    """An environment whose actions are rows of a space that `_flat_space` has returned."""

    def __init__(self, env: gym.Env[Any, Any], flat: spaces.Space[Any]) -> None:
        super().__init__(env, self._nested, flat)

    def _nested(self, action: Any) -> Any:
        """Convert a row of numbers to the environment's action. Return a dict or tuple unchanged."""
        if isinstance(action, dict | tuple):
            return action
        row, flat = np.ravel(action), self.action_space
        if not isinstance(flat, _Hybrid):
            numbers = iter(row)
            return _nested(self.env.action_space, numbers, numbers)
        n = len(flat.choices)
        choices = row[:n].astype(np.int64) + flat.first
        return _nested(self.env.action_space, iter(choices), iter(row[n:]))


def _flat_space(space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of rows of numbers that stand for the actions of a space, part after part.

    Returns:
        A MultiDiscrete if all parts are choices, a Box if all are floats, a _Hybrid if all are one of the
        two, None otherwise.
    """
    parts = list(_leaves(space))
    choices = [found for part in parts if (found := _choices(part))]
    floats = [part for part in parts if isinstance(part, spaces.Box) and part.dtype.kind == "f"]
    if not parts or len(choices) + len(floats) < len(parts):
        return None
    if choices:
        sizes, first = (np.concatenate(numbers) for numbers in zip(*choices, strict=True))
    if floats:
        low = np.concatenate([part.low.ravel() for part in floats])
        high = np.concatenate([part.high.ravel() for part in floats])
    if not floats:
        return spaces.MultiDiscrete(sizes, start=first)
    return (
        _Hybrid(sizes, first, low, high) if choices else spaces.Box(low, high, dtype=low.dtype.type)
    )


def _leaves(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """Yield the spaces of which a space consists, none of them a Tuple or a Dict."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for one in inner:
            yield from _leaves(one)
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


def _nested(space: spaces.Space[Any], choices: Iterator[Any], floats: Iterator[Any]) -> Any:
    """Build an action of a space from the next choices and floats."""
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(one, choices, floats) for one in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: _nested(one, choices, floats) for name, one in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(next(choices))
    assert space.shape is not None
    assert space.dtype is not None
    numbers = floats if space.dtype.kind == "f" else choices
    size = math.prod(space.shape)
    return np.array([*islice(numbers, size)], space.dtype).reshape(space.shape)


def check_reset(answer: Any, like: Array) -> None:
    """Raise ValueError unless a reset has returned an observation and an info.

    `like` is an array of the shape and dtype that observations have here.
    """
    if not (has_length(answer, 2) and isinstance(answer[1], Mapping)):
        raise ValueError(
            f"reset must return an observation and an info, which is a dict, as gymnasium.Env "
            f"defines it: got {in_one_line(answer)}"
        ) from None
    _check_value("the observation", answer[0], like.shape, like.dtype)


def check_step(answer: Any, like: Array) -> None:
    """Raise ValueError unless a step has returned an observation, a reward, two flags and an info.

    `like` is an array of the shape and dtype that observations have here.
    """
    if not (has_length(answer, 5) and (answer[4] is None or isinstance(answer[4], Mapping))):
        raise ValueError(
            f"step must return an observation, reward, terminated, truncated and an info, which is a dict, as "
            f"gymnasium.Env defines it: got {in_one_line(answer)}"
        ) from None
    _check_value("the observation", answer[0], like.shape, like.dtype)
    _check_value("the reward", answer[1], (), np.dtype(np.float64))
    _check_value("terminated", answer[2], (), np.dtype(np.bool_))
    _check_value("truncated", answer[3], (), np.dtype(np.bool_))


def mask_of(info: Any, size: int) -> Array:
    """Return the action mask of an info, (size,). The masks of several choices are concatenated.

    Raises:
        ValueError: if the environment gave a mask before and does not now, or one of another size.
    """
    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None:
        raise ValueError(
            f'info["action_mask"] must come with every reset and every step once it has come: this '
            f"info is {in_one_line(info)}"
        )
    mask = _flat_mask(mask)
    if np.size(mask) != size:
        raise ValueError(
            f'info["action_mask"] must have one entry for each of {size} choices: got shape '
            f"{np.shape(mask)}"
        )
    return mask


def _flat_mask(mask: Any) -> Array:
    """Return a mask as a row. Those of several choices are a tuple, of tuples if the choices have several dimensions."""
    return np.concatenate([*map(_flat_mask, mask)]) if isinstance(mask, tuple) else np.ravel(mask)


def refuse_late_mask(info: Any) -> None:
    """Refuse the info of an environment that gave no action mask before, if it has one.

    Raises:
        ValueError: if it has.
    """
    if isinstance(info, Mapping) and "action_mask" in info:
        raise ValueError(
            f'info["action_mask"] must come with every reset and every step, or with none: the first reset '
            f"gave none, and this info is {in_one_line(info)}"
        )


def has_length(answer: Any, length: int) -> bool:
    """Return True if an answer is a tuple or list of this length."""
    return isinstance(answer, tuple | list) and len(answer) == length


def _check_value(what: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ValueError unless a value has this shape and fits into this dtype. Floats may be rounded."""
    try:
        array = np.asarray(value)
        fits = array.dtype.kind == dtype.kind and dtype.kind in "bf"
        if array.shape == shape and (fits or _is_equal(array, dtype)):
            return
    except (TypeError, ValueError, OverflowError):
        pass  # no numbers, or of several shapes
    kind = {"b": "True or False", "f": "real numbers"}.get(dtype.kind, f"numbers of {dtype}")
    raise ValueError(
        f"{what} must be {kind}, of shape {shape}: got {in_one_line(value)}; make the environment return "
        f"what its spaces say"
    ) from None  # one error, and not numpy's before it


def _is_equal(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return True if the numbers stay the same in another dtype, such as int64 numbers in uint8."""
    return array.dtype.kind in "biufO" and bool((array.astype(dtype) == array).all())


def in_one_line(value: Any) -> str:
    """Return a value in one line of text, with its dtype and shape if it is an array."""
    array = f"{value.dtype} {value.shape} " if isinstance(value, np.ndarray) else ""
    return array + " ".join(f"{value!r:.100}".split())
