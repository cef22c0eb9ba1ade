"""Find and make environments, and describe their spaces. Gymnasium is spoken to here."""

from __future__ import annotations

import ast
import difflib
import importlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rank0rl.agent import Space, Spaces


def resolve(env_id: str) -> str:
    """The full id of an environment.

    Args:
        env_id: a name without version ("Walker2d": the newest registered one), a full id
            ("Walker2d-v4"), "module:EnvId-v0" with a module that registers it, or
            "module:function" with one that makes it.

    Raises:
        ValueError: if there is none of this id, naming the nearest ones.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"environment {env_id!r}: cannot import {module!r} ({error})"
            ) from None
    prefix = f"{module}:" if module else ""  # every rank has to import it
    if name in gym.registry:
        return prefix + name
    versions = [spec for spec in gym.registry.values() if base(spec.id) == name]
    if versions:
        return prefix + max(versions, key=lambda spec: spec.version or 0).id
    if _factory(env_id):
        return env_id
    known = sorted({*gym.registry, *(base(env_id) for env_id in gym.registry)})
    lower = {k.lower(): k for k in known}
    close = [lower[k] for k in difflib.get_close_matches(name.lower(), lower, n=3)]
    raise ValueError(
        f"no environment {env_id!r} is registered"
        + (f"; did you mean {' or '.join(close)}?" if close else "")
        + " An environment of your own is named as module:EnvId-v0 or module:function"
    )


def base(env_id: str) -> str:
    """The id without module and version: "my_module:Walker2d-v5" -> "Walker2d"."""
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])


def make(env_id: str, wrappers: Sequence[str] = (), **kwargs: Any) -> gym.Env[Any, Any]:
    """An environment with its time limit and without the checks that cost time every step.

    Observations that are a dict, a tuple or choices are flattened: choices become one-hot.

    Args:
        env_id: as `resolve` gives it.
        wrappers: the innermost first, as `wrap` takes them.
        kwargs: of the environment.

    Raises:
        ValueError: if it cannot be made, with Gymnasium's reason.
    """
    factory = _factory(env_id)
    try:
        env = factory(**kwargs) if factory else gym.make(env_id, disable_env_checker=True, **kwargs)
    except Exception as error:  # whatever the environment's constructor raises
        raise ValueError(
            f"cannot make environment {env_id!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(env, gym.Env):
        raise ValueError(f"{env_id} must give a gymnasium.Env: got {env!r:.100}")
    for wrapper in wrappers:
        env = wrap(env, wrapper)
    space = env.observation_space
    flatten = not isinstance(space, gym.spaces.Box) and _flattens(space)
    return gym.wrappers.FlattenObservation(env) if flatten else env


def wrap(env: gym.Env[Any, Any], wrapper: str) -> gym.Env[Any, Any]:
    """An environment in a wrapper.

    Args:
        env: to be wrapped.
        wrapper: name of one of `gymnasium.wrappers`, or "module:Class"; with arguments, if it has
            any, such as "FrameStackObservation(stack_size=4)".

    Raises:
        ValueError: if there is none of this name, or it does not take these arguments or this
            environment.
    """
    where, _, arguments = wrapper.partition("(")
    module, _, name = where.strip().rpartition(":")
    try:
        cls = getattr(importlib.import_module(module or "gymnasium.wrappers"), name)
        call = ast.parse(f"f({arguments or ')'}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise TypeError("arguments must have names")
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        return cls(env, **kwargs)  # type: ignore[no-any-return]
    except Exception as error:  # whatever the wrapper's constructor raises
        raise ValueError(
            f"cannot wrap {name_of(env)} in {wrapper!r}: {type(error).__name__}: {error}; expected the "
            f"name of one of gymnasium.wrappers, or module:Class, with keyword arguments in brackets"
        ) from error


class Watched(gym.Wrapper[Any, Any, Any, Any]):
    """Calls a function with the environment after every reset and every step.

    Args:
        env: to be watched.
        look: the function.
    """

    def __init__(self, env: gym.Env[Any, Any], look: Callable[[gym.Env[Any, Any]], None]) -> None:
        """Nothing is called yet."""
        super().__init__(env)
        self._look = look

    def reset(self, **kwargs: Any) -> Any:
        """As the environment does."""
        result = self.env.reset(**kwargs)
        self._look(self.env)
        return result

    def step(self, action: Any) -> Any:
        """As the environment does."""
        result = self.env.step(action)
        self._look(self.env)
        return result


def is_flattened(env: gym.Env[Any, Any]) -> bool:
    """Whether `make` has flattened the observations."""
    return isinstance(env, gym.wrappers.FlattenObservation)


def _flattens(space: gym.Space[Any]) -> bool:
    """Whether all of a space is numbers and choices."""
    if isinstance(space, gym.spaces.Dict):
        return all(map(_flattens, space.spaces.values()))
    if isinstance(space, gym.spaces.Tuple):
        return all(map(_flattens, space.spaces))
    numbers = gym.spaces.Box | gym.spaces.Discrete
    return isinstance(space, numbers | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary)


def _factory(env_id: str) -> Any:
    """The function that "module:function" names, None for an id."""
    module, _, name = env_id.rpartition(":")
    made = getattr(importlib.import_module(module), name, None) if module else None
    return made if callable(made) else None


def describe(env: gym.Env[Any, Any]) -> Spaces:
    """The spaces of an environment, as plain data.

    Raises:
        ValueError: for a space that no agent here can use, naming it.
    """
    obs, act = env.observation_space, env.action_space
    if not isinstance(obs, gym.spaces.Box):
        raise ValueError(
            f"observations must be of fixed size, a Box or what can be flattened to one: "
            f"{name_of(env)} has {obs}; wrap it with gymnasium.wrappers.TransformObservation"
        )
    choices = gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary
    if not (
        isinstance(act, choices) or (isinstance(act, gym.spaces.Box) and act.dtype.kind == "f")
    ):
        raise ValueError(
            f"actions must be a Box of floats, Discrete, MultiDiscrete or MultiBinary: {name_of(env)} "
            f"has {act}; wrap it with gymnasium.wrappers.TransformAction"
        )
    return Spaces(_describe(obs), _describe(act))


def running_statistics(env: gym.Env[Any, Any]) -> list[str]:
    """The wrappers of an environment that normalize with statistics of what it has shown so far.

    What such an environment shows depends on all that it was used for, so no episode repeats.
    """
    found = []
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.NormalizeObservation | gym.wrappers.NormalizeReward):
            found.append(type(env).__name__)
        env = env.env
    return found


def refuse_running_statistics(env: gym.Env[Any, Any]) -> None:
    """Refuse what makes a run depend on the number of ranks.

    Raises:
        ValueError: naming the wrappers.
    """
    found = running_statistics(env)
    if found:
        raise ValueError(
            f"{name_of(env)} is wrapped in {' and '.join(found)}, whose running statistics would be "
            f"another on every rank: leave the wrapper out; the agents here normalize observations "
            f"and scale values themselves, with statistics of all ranks"
        )


def first_choice(env: gym.Env[Any, Any]) -> Any:
    """What a discrete action space calls its choice 0: a number, or one for each of its choices."""
    return getattr(env.action_space, "start", 0)


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
    """The id of an environment, or its class if it was not made by one."""
    return env.spec.id if env.spec else type(env.unwrapped).__name__
