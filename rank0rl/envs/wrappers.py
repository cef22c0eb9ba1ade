"""Wrappers of environments: reset methods, raw rewards, and those that are refused.

They do not change spaces. What they wrap may be another object than a `gymnasium.Env`, such as an `EnvProcess`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from rank0rl.envs import state
from rank0rl.envs.spaces import name_of


class Around(state.Stateful):
    """The environment that `make` makes, used as if it were not wrapped. A subclass changes some methods."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._env = make()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the environment, such as a space or the method `step`."""
        return getattr(self._env, name)

    def has_state(self) -> bool:
        """Return True if the environment has a state."""
        return state.has_state(self._env)

    def take_state(self) -> state.State:
        """Return the state of the environment."""
        return state.take_state(self._env)

    def give_state(self, taken: state.State) -> None:
        """Let the environment go on from a state."""
        state.give_state(self._env, taken)

    def beside(self, agent: Any) -> Any:
        """Wrap another agent of the same game as this one is wrapped."""
        return self._env.beside(agent) if isinstance(self._env, Around) else agent


class ResetMethod(Around):
    """An environment whose reset passes its options to a method of the environment first.

    So a curriculum works with an environment that takes no reset options. The method is one of the
    environment or of a wrapper, and takes the settings.

    Raises:
        ValueError: if the environment has no such method.
    """

    def __init__(self, make: Callable[[], Any], method: str) -> None:
        super().__init__(make)
        try:
            self._method = self._env.get_wrapper_attr(method)
        except AttributeError:
            raise ValueError(
                f"--curriculum-method names a method of the environment: got {method!r}, which "
                f"{type(self._env.unwrapped).__name__} does not have"
            ) from None

    def reset(self, *, options: Any = None, **kwargs: Any) -> Any:
        """Call the method with the options, if there are any. Then reset the environment."""
        if options is not None:
            self._method(options)
        return self._env.reset(**kwargs)


class RawReward(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that puts the reward of each step into info["raw_reward"] too.

    With `--info sum:raw_reward` the record has the returns that wrappers around this one, such as
    ClipReward, have not changed.
    """

    def step(self, action: Any) -> Any:
        """Step the environment."""
        obs, rew, terminated, truncated, info = self.env.step(action)
        return obs, rew, terminated, truncated, {**info, "raw_reward": rew}


_RUNNING = (
    gym.wrappers.NormalizeObservation,
    gym.wrappers.NormalizeReward,
    gym.wrappers.vector.NormalizeObservation,
    gym.wrappers.vector.NormalizeReward,
)


def running_statistics(env: Any) -> list[str]:
    """Return the names of wrappers of an environment, or a vector environment, that normalize with running statistics.

    The observations of such an environment depend on all that it has seen, so no episode can be repeated.
    """
    found = []
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        if isinstance(env, _RUNNING):
            found.append(type(env).__name__)
        env = env.env
    if isinstance(env, gym.vector.SyncVectorEnv):
        found += running_statistics(env.envs[0])
    return found


def refuse_running_statistics(env: Any) -> None:
    """Refuse wrappers that make a run depend on the number of ranks.

    Raises:
        ValueError: naming the wrappers.
    """
    found = running_statistics(env)
    if found:
        raise ValueError(
            f"{name_of(env)} is wrapped in {' and '.join(found)}, whose running statistics would "
            f"differ on every rank: leave the wrapper out; the agents here normalize observations "
            f"and scale values themselves, with statistics of all ranks"
        )
