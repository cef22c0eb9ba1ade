"""The state of an environment in the middle of an episode: what its method `get_state` returns and `set_state` takes.

With both, a resumed run goes on in the middle of an episode. Without, it repeats the episode.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from gymnasium.wrappers import (
    OrderEnforcing,
    PassiveEnvChecker,
    TimeLimit,
    TransformAction,
    TransformObservation,
    TransformReward,
)

Array = npt.NDArray[Any]
State = dict[str, Array]

_OWN = "state/"  # begins the names of what the environment itself returns
_STATELESS = (
    *(OrderEnforcing, PassiveEnvChecker, TransformAction, TransformObservation, TransformReward),
)


class Stateful:
    """Something around an environment, which has a state if the environment has."""

    def has_state(self) -> bool:
        """Return True if `take_state` and `give_state` work."""
        raise NotImplementedError

    def take_state(self) -> State:
        """Return the state, name -> array."""
        raise NotImplementedError

    def give_state(self, taken: State) -> None:
        """Go on from a state, after a reset."""
        raise NotImplementedError


def has_state(env: Any) -> bool:
    """Return True if an environment has a state, and no wrapper around it has another that nobody knows."""
    return env.has_state() if isinstance(env, Stateful) else _with_methods(env)[0] is not None


def take_state(env: Any) -> State:
    """Return the state of an environment that has one: what it returns itself, its random numbers, its time limit.

    Raises:
        TypeError: if `get_state` returns something else than a dict of arrays.
    """
    if isinstance(env, Stateful):
        return env.take_state()
    inner, limits = _with_methods(env)
    own = inner.get_state()
    if not isinstance(own, Mapping) or not all(_can_be_kept(*item) for item in own.items()):
        raise TypeError(
            f"get_state must return a dict of name -> array of numbers: got {own!r:.200}; numbers become arrays "
            f"by np.array; if this method means something else, hide it: env.get_state = None"
        )
    state = {_OWN + name: np.array(value, order="C") for name, value in own.items()}
    state["elapsed"] = np.array([limit._elapsed_steps for limit in limits], np.int64)
    if random := getattr(inner.unwrapped, "_np_random", None):
        text = json.dumps(random.bit_generator.state, default=np.ndarray.tolist)
        state["random"] = np.frombuffer(text.encode(), np.uint8)
    return state


def give_state(env: Any, state: State) -> None:
    """Let an environment go on from what `take_state` has returned."""
    if isinstance(env, Stateful):
        env.give_state(state)
        return
    inner, limits = _with_methods(env)
    # A copy, which it may compute in. First, because it may reset the environment, or draw.
    own = {name.removeprefix(_OWN): x.copy() for name, x in state.items() if name.startswith(_OWN)}
    inner.set_state(own)
    for limit, elapsed in zip(limits, state["elapsed"], strict=True):
        limit._elapsed_steps = int(elapsed)  # type: ignore[assignment]
    if "random" in state:
        inner.unwrapped.np_random.bit_generator.state = json.loads(state["random"].tobytes())


def packed(state: State) -> Array:
    """Return a state as bytes."""
    return np.frombuffer(safetensors.numpy.save(state), np.uint8)


def unpacked(data: Array) -> State:
    """Return the state that has become these bytes.

    Raises:
        ValueError: if they are none.
    """
    try:
        return safetensors.numpy.load(data.tobytes())
    except safetensors.SafetensorError as error:
        raise ValueError(f"the checkpoint holds no state of an environment: {error}") from None


def _with_methods(env: Any) -> tuple[Any, list[TimeLimit[Any, Any]]]:
    """Return the environment that has both methods, None without one; and the time limits around it."""
    limits: list[TimeLimit[Any, Any]] = []
    inner = None
    while True:
        # A wrapper may pass on what it does not have: then these methods know nothing of its own state.
        of: Any = inspect.getattr_static if isinstance(env, gym.Wrapper) else getattr
        if inner is None and all(
            callable(of(env, f"{verb}_state", None)) for verb in ("get", "set")
        ):
            inner = env
        if isinstance(env, TimeLimit):
            limits.append(env)
        if not isinstance(env, gym.Wrapper):
            break
        if inner is None and not (isinstance(env, TimeLimit) or _is_stateless(env)):
            return None, []
        env = env.env
    return (None, []) if isinstance(env, Stateful) else (inner, limits)


def _is_stateless(wrapper: gym.Wrapper[Any, Any, Any, Any]) -> bool:
    """Return True for a wrapper of Gymnasium or rank0rl that only converts rewards, actions or observations."""
    libraries = ("gymnasium", "rank0rl")
    return isinstance(wrapper, _STATELESS) and type(wrapper).__module__.startswith(libraries)


def _can_be_kept(name: Any, value: Any) -> bool:
    if not isinstance(name, str) or not isinstance(value, np.ndarray):
        return False
    return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
