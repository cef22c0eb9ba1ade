"""An environment that is one program on several processes: each of them makes it, and makes the same calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from rank0rl.envs.state import State, Stateful, give_state, has_state, take_state
from rank0rl.envs.wrappers import refuse_running_statistics

_numbers = itertools.count()
_made: dict[int, Any] = {}  # in each process: number -> environment


class SharedEnv(gym.Env[Any, Any], Stateful):
    """The environment as the first of its processes uses it. What it answers there counts.

    Args:
        call: calls a function in every process, and returns what it returns here.
        make: makes the environment in a process. It is pickled.
    """

    def __init__(self, call: Callable[..., Any], make: Callable[[], Any]) -> None:
        self._call, self._number = call, next(_numbers)
        env = call(_make, self._number, make)
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.spec = env.spec or gym.envs.registration.EnvSpec(type(env.unwrapped).__name__)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset the environment in every process."""
        return self._on_all("reset", seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step the environment in every process."""
        return self._on_all("step", action)

    def render(self) -> Any:
        """Draw the environment in every process."""
        return self._on_all("render")

    def close(self) -> None:
        """Close the environment in every process."""
        if self._number in _made:
            self._on_all("close")

    def has_state(self) -> bool:
        """Return True if the environment has a state."""
        return has_state(_made[self._number])

    def take_state(self) -> State:
        """Return the state of the environment, as the first process takes it. All of them do, at the same time."""
        taken: State = self._call(_take, self._number)
        return taken

    def give_state(self, taken: State) -> None:
        """Let the environment go on from a state, in every process."""
        self._call(_give, self._number, taken)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the environment. A method is called in every process."""
        if name.startswith("_") or name == "spec":
            raise AttributeError(name)
        found = getattr(_made[self._number], name)
        return (
            (lambda *args, **kwargs: self._on_all(name, *args, **kwargs))
            if callable(found)
            else found
        )

    def _on_all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(_call, self._number, name, args, kwargs)


def _make(number: int, make: Callable[[], Any]) -> Any:
    env = make()
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"an environment of several ranks must be a gymnasium.Env: got {env!r:.100}; games and vector "
            f"environments have one rank"
        )
    refuse_running_statistics(env)
    _made[number] = env
    return env


def _call(number: int, name: str, args: Any, kwargs: Any) -> Any:
    env = _made.pop(number) if name == "close" else _made[number]
    return getattr(env, name)(*args, **kwargs)


def _take(number: int) -> State:
    return take_state(_made[number])


def _give(number: int, taken: State) -> None:
    give_state(_made[number], taken)
