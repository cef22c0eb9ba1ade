"""Find, make and wrap gymnasium environments."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym

from rank0rl.envs.games import AgentEnv, agents_of, first_agent
from rank0rl.envs.place import Place
from rank0rl.envs.shared import SharedEnv
from rank0rl.envs.spaces import flatten, keep_float64, name_of
from rank0rl.envs.wrappers import RawReward

FOLDERS = "RANK0RL_FOLDERS"
"""Variable with folders of modules, for a run that another process starts."""
LARGE = 10_000
"""Number among arguments above which they may ask for much memory or time."""


def resolve(env_id: str) -> str:
    """Return the full id of an environment.

    Args:
        env_id: a name without version ("Walker2d": the newest registered one), a full id
            ("Walker2d-v4"), "module:EnvId-v0" with a module that registers it, or
            "module:function" with a function that makes it.

    Raises:
        ValueError: if there is no such environment, naming the nearest ones.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            import_own(module)
        except (Exception, SystemExit) as error:
            named = f"; name it as {module[:-3]}:{name}" if module.endswith(".py") else ""
            raise ValueError(
                f"environment {env_id!r}: cannot import {module!r}: {why(error)}{named}"
            ) from None
    prefix = f"{module}:" if module else ""  # every rank has to import it
    if name in gym.registry:
        return prefix + name
    versions = [spec for spec in gym.registry.values() if base(spec.id) == name]
    if versions:
        return prefix + max(versions, key=lambda spec: spec.version or 0).id
    if _factory(env_id):
        return env_id
    # Gymnasium registers older versions that nothing can make.
    newest = sorted(gym.registry.values(), key=lambda spec: spec.version or 0)
    lower = {base(spec.id).lower(): spec.id for spec in newest}
    close = [lower[k] for k in difflib.get_close_matches(base(name).lower(), lower, n=3)]
    raise ValueError(
        (f"{module!r} has no function {name!r}, and " if module else "")
        + f"no environment {env_id!r} is registered"
        + (f"; did you mean {' or '.join(close)}?" if close else "")
        + "; name an environment of your own as module:EnvId-v0 or module:function"
    )


def import_own(module: str) -> ModuleType:
    """Import a module that the user has named. From now on modules are found in the working folder too, and in those of `FOLDERS`."""
    for folder in (os.getcwd(), *filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))):
        find_modules_in(folder)
    return importlib.import_module(module)


def find_modules_in(folder: str) -> None:
    """Find modules in a folder of the user's from now on, after all that is installed."""
    if folder not in sys.path:
        sys.path.append(folder)


def base(env_id: str) -> str:
    """Return the id without module and version: "my_module:Walker2d-v5" -> "Walker2d"."""
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])


def is_gymnasiums(env_id: str) -> bool:
    """Return True if making an environment imports nothing but Gymnasium. An unknown id imports nothing."""
    specs = [spec for spec in gym.registry.values() if env_id in (spec.id, base(spec.id))]
    modules = [getattr(spec.entry_point, "__module__", spec.entry_point) for spec in specs]
    return ":" not in env_id and all(str(name).startswith("gymnasium.") for name in modules)


def own_module(env_id: str) -> str:
    """Return the module of one of Gymnasium's own environments; "gymnasium" for all others."""
    spec = gym.registry.get(env_id)
    module = str(spec.entry_point).partition(":")[0] if spec else ""
    return module if module.startswith("gymnasium.") else "gymnasium"


def are_known_wrappers(wrappers: Sequence[str]) -> bool:
    """Return True if wrappers import nothing but Gymnasium and rank0rl, write no files, and ask for little."""
    known = {*gym.wrappers.__all__, f"{RawReward.__module__}:{RawReward.__name__}"}
    known -= {"RecordVideo"}
    if any(wrapper.partition("(")[0].strip() not in known for wrapper in wrappers):
        return False
    size = 1.0  # of what they stack and repeat, together
    for wrapper in wrappers:
        try:
            arguments = _arguments(wrapper)
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            continue  # nothing can be made with wrong arguments
        if not is_modest(arguments):
            return False
        arguments.pop("max_episode_steps", None)
        numbers = [n for n in arguments.values() if isinstance(n, int | float)]
        size *= math.prod(n for n in numbers if 1 < n <= LARGE)
    return size <= LARGE


def is_modest(value: Any, name: str = "") -> bool:
    """Return True if no number in these arguments makes stacks, images or episodes without end."""
    if isinstance(value, Mapping):
        return all(is_modest(each, key) for key, each in value.items())
    if isinstance(value, Sequence | Set) and not isinstance(value, str):
        return all(is_modest(each) for each in value)
    if name == "max_episode_steps" and value is not None:
        return isinstance(value, int) and 1 <= value <= LARGE
    return not isinstance(value, int | float) or abs(value) <= LARGE or math.isinf(value)


def make(
    env_id: str,
    wrappers: Sequence[str] = (),
    place: Place | None = None,
    obs_dtype: str = "float32",
    /,
    **kwargs: Any,
) -> gym.Env[Any, Any]:
    """Make an environment with its time limit and without the checks that cost time every step.

    Observations that are a dict, a tuple or choices are flattened: choices become one-hot. So are
    actions that are a dict, a tuple or integers: to choices or to floats.

    A PettingZoo parallel environment is returned as the environment of its first agent, and a vector
    environment as the first of its environments; `games.agents_of` returns all of them.

    Args:
        env_id: full id, as `resolve` returns it.
        wrappers: names in `gymnasium.wrappers`, or "module:Class", with arguments in brackets if there are
            any; the innermost first.
        place: where it is. It is passed on to a function or a class that has a parameter `place`.
        obs_dtype: "float64" keeps observations as they are; "float32" rounds them.
        kwargs: arguments of the environment.

    Raises:
        ValueError: if it cannot be made, with Gymnasium's reason.
    """
    try:
        place = place or Place()
        alone = functools.partial(_made, env_id, dataclasses.replace(place, call=None), kwargs)
        env = SharedEnv(place.call, alone) if place.call else alone()
    except Exception as error:  # whatever the environment's constructor raises
        raise ValueError(f"cannot make environment {env_id!r}: {_reason(error)}") from None
    agent = first_agent(env, env_id)
    if agent is not None and wrappers:
        raise ValueError(
            f"{env_id} makes environments that step together: wrap them in the function that makes "
            f"them, and leave --wrappers {' '.join(wrappers)} out"
        )
    if agent is None:
        _check_single(env_id, env)
        for wrapper in wrappers:
            env = _wrap(env, wrapper)
        agent = flatten(env)
    for each in agents_of(agent) if obs_dtype == "float64" else []:
        keep_float64(each)
    return agent


def _wrap(env: gym.Env[Any, Any], wrapper: str) -> gym.Env[Any, Any]:
    """Return an environment in a wrapper, such as "FrameStackObservation(stack_size=4)" or "module:Class"."""
    module, _, name = wrapper.partition("(")[0].strip().rpartition(":")
    try:
        cls = getattr(import_own(module) if module else gym.wrappers, name)
        return cls(env, **_arguments(wrapper))
    except Exception as error:  # whatever the wrapper's constructor raises
        raise ValueError(
            f"cannot wrap {name_of(env)} in {wrapper!r:.200}: {type(error).__name__}: {error}; expected a "
            f"name in gymnasium.wrappers, or module:Class, with keyword arguments in brackets"
        ) from error


def _arguments(wrapper: str) -> dict[str, Any]:
    """Return the arguments in a wrapper's brackets, name -> value."""
    call = ast.parse(f"f({wrapper.partition('(')[2] or ')'}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise TypeError("arguments must have names")
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


class _Watched(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that calls a function with the environment after every reset and every step."""

    def __init__(self, env: gym.Env[Any, Any], look: Callable[[gym.Env[Any, Any]], None]) -> None:
        super().__init__(env)
        self._look = look

    def reset(self, **kwargs: Any) -> Any:
        result = self.env.reset(**kwargs)
        self._look(self.env)
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self._look(self.env)
        return result


def watched(env: Any, look: Callable[[gym.Env[Any, Any]], None]) -> Any:
    """Return an environment, or the first agent of a game, that calls a function after resets and steps."""
    if not isinstance(env.unwrapped, AgentEnv):
        return _Watched(env, look)
    env.unwrapped.game.look = functools.partial(look, env)
    return env


def _reason(error: Exception) -> str:
    """Describe what a constructor has raised, with its place in the environment's own code."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    outside = (str(Path(gym.__path__[0], "envs", "registration.py")), __file__)
    return f"{type(error).__name__}: {error}" if last in outside else why(error)


def _check_single(env_id: str, env: Any) -> None:
    """Raise ValueError unless a function has made one environment, of one agent, with its spaces."""
    if isinstance(env, gym.Env):
        for name in ("observation_space", "action_space"):
            if not isinstance(space := getattr(env, name, None), gym.Space):
                raise ValueError(
                    f"{env_id} must have a gymnasium.Space as its {name}: got {space!r:.100}"
                )
        return
    if hasattr(env, "possible_agents"):
        raise ValueError(
            f"{env_id} makes a PettingZoo environment whose agents act in turn: here they act at once; "
            f"name the function parallel_env of its module, or one that returns "
            f"pettingzoo.utils.aec_to_parallel of it, as docs/environments.md says"
        )
    raise ValueError(f"{env_id} must return a gymnasium.Env: got {env!r:.100}")


def _factory(env_id: str) -> Any:
    """Return the function that "module:function" names; None if the name is an id."""
    module, _, name = env_id.rpartition(":")
    made = getattr(import_own(module), name, None) if module else None
    return made if callable(made) else None


def _made(env_id: str, place: Place, kwargs: Mapping[str, Any]) -> Any:
    """Make an environment in this process, as its module does."""
    maker, creator = _maker(env_id)
    return maker(**with_place(creator, place, kwargs))


def with_place(creator: Any, place: Place, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return these arguments of a function or a class, or the one of this name, with its place if it takes one."""
    if isinstance(creator, str):
        creator = gym.envs.registration.load_env_creator(creator)
    try:
        takes_place = "place" in inspect.signature(creator).parameters
    except (TypeError, ValueError):  # it has no signature
        takes_place = False
    return {"place": place, **kwargs} if takes_place else {**kwargs}


def takes_place(env_id: str) -> bool:
    """Return True if the function or class that makes an environment takes its place."""
    return bool(with_place(_maker(env_id)[1], Place(), {}))


def _maker(env_id: str) -> tuple[Callable[..., Any], Any]:
    """Return a function that makes an environment, or a vector environment if there is no single one.

    Returns:
        The function, and the user's function or class, or its name, that it calls with the same arguments.
    """
    if factory := _factory(env_id):
        return factory, factory
    spec = gym.registry.get(env_id.rpartition(":")[2])
    if spec and not spec.entry_point:
        return functools.partial(gym.make_vec, env_id), spec.vector_entry_point
    creator = spec.entry_point if spec else None
    return functools.partial(gym.make, env_id, disable_env_checker=True), creator


_OURS = str(Path(__file__).parents[1])


def why(error: BaseException) -> str:
    """Describe the error that has ended an import, with its place in the imported code."""
    if isinstance(error, SyntaxError):
        return str(error)  # with file and line
    frames = traceback.extract_tb(error.__traceback__)
    places = list(itertools.dropwhile(_is_before, frames))
    if not places:
        return str(error)
    if isinstance(error, SystemExit):
        return f"line {places[0].lineno} of {places[0].filename} ends in sys.exit({error.code!r})"
    lines = [*traceback.format_list(places), *traceback.format_exception_only(error)]
    return "\n" + "".join(lines).rstrip()


def _is_before(frame: traceback.FrameSummary) -> bool:
    """Return True for a call that leads to the imported code."""
    return frame.filename.startswith(_OURS) or "importlib" in frame.filename
