"""Numbers from the info of steps: figures of an episode, as --info names them, and those that an agent reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.envs.spaces import has_length
from rank0rl.envs.state import State
from rank0rl.envs.wrappers import Around

EPISODE = "rank0rl_episode"
"""Key of an episode's figures so far, label -> number, in the info of a step."""

GAVE_UP = "rank0rl_gave_up"
"""Key in the info of a step that could not be made, and truncates the episode."""

_HOW: Mapping[str, Callable[[float, float], float]] = {
    "last": lambda old, new: new,
    "sum": lambda old, new: old + new,
    "max": max,
}


_FIGURE = "figure/"  # begins the name of one in a state
_READ = "read/"  # begins the name of numbers that an agent reads there


def parse(name: str) -> tuple[str, str]:
    """Return how a figure is computed, "last", "sum" or "max", and from which item of infos.

    Args:
        name: an item, or "sum:item" or "max:item".
    """
    how, colon, item = name.partition(":")
    return (how, item) if colon and how in _HOW else ("last", name)


def label(name: str) -> str:
    """Return a figure's name in the record: "success", or "cost_sum" for "sum:cost"."""
    how, item = parse(name)
    return item if how == "last" else f"{item}_{how}"


class InfoError(ValueError):
    """An item of an info is missing, or is not a number. The environment has not failed."""


class EpisodeInfo(Around):
    """An environment that puts the figures of the episode so far into info["rank0rl_episode"] at each step.

    `names` are figures as `parse` takes them. A figure is nan if no step of the episode had it.
    """

    def __init__(self, make: Callable[[], Any], names: Sequence[str]) -> None:
        super().__init__(make)
        self._names = names
        self._figures = [(label(name), *parse(name)) for name in names]
        self._so_far: dict[str, float] = {}

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment and the figures."""
        self._so_far = {}
        return self._env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        answer = self._env.step(action)
        if not (has_length(answer, 5) and isinstance(answer[4], Mapping)):
            return answer  # it is wrong, and the block says how
        obs, rew, terminated, truncated, info = answer
        for name, how, item in self._figures:
            if item in info:
                new = _number(item, info[item])
                before = self._so_far.get(name)
                self._so_far[name] = new if before is None else _HOW[how](before, new)
        found = {name: self._so_far.get(name, math.nan) for name, _, _ in self._figures}
        return obs, rew, terminated, truncated, {**info, EPISODE: found}

    def take_state(self) -> State:
        """Return the state of the environment, and the figures."""
        figures = {_FIGURE + name: np.array(value) for name, value in self._so_far.items()}
        return super().take_state() | figures

    def give_state(self, taken: State) -> None:
        """Let the environment and the figures go on."""
        super().give_state(taken)
        own = [name for name in taken if name.startswith(_FIGURE)]
        self._so_far = {name.removeprefix(_FIGURE): float(taken[name]) for name in own}

    def beside(self, agent: Any) -> Any:
        """Wrap another agent of the same game, with figures of its own."""
        return EpisodeInfo(partial(super().beside, agent), self._names)


class StepInfo(Around):
    """An environment that keeps what an agent reads from the info of its last step: see `Agent.info`."""

    def __init__(self, make: Callable[[], Any], names: Sequence[str]) -> None:
        super().__init__(make)
        self._names = names
        self.step_info: dict[str, npt.NDArray[np.float64]] = {}
        """Name -> numbers of the last step, (...)."""

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment, and the numbers to 0: they are those of a first step that is given up."""
        self.step_info = {name: np.zeros_like(x) for name, x in self.step_info.items()}
        return self._env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        answer = self._env.step(action)
        # If it is wrong, the block says how.
        if has_length(answer, 5) and isinstance(answer[4], Mapping):
            if GAVE_UP in answer[4]:
                if not self.step_info:
                    raise InfoError(
                        f"the info of every step must have {', '.join(self._names)}, because the agent reads it "
                        f"(Agent.info): none is known of an environment if its first step failed"
                    )
                return answer  # the numbers stay those of the step before
            found = {name: _numbers(name, answer[4]) for name in self._names}
            for name, before in self.step_info.items():
                if found[name].shape != before.shape:
                    raise InfoError(
                        f"info[{name!r}] must have the same shape in every step, because the agent reads it "
                        f"(Agent.info): got {found[name].shape} after {before.shape}"
                    )
            self.step_info = found
        return answer

    def take_state(self) -> State:
        """Return the state of the environment, and the numbers."""
        return super().take_state() | {_READ + name: x for name, x in self.step_info.items()}

    def give_state(self, taken: State) -> None:
        """Let the environment go on, with the numbers of the step before."""
        super().give_state(taken)
        own = [name for name in taken if name.startswith(_READ)]
        self.step_info = {name.removeprefix(_READ): taken[name] for name in own}

    def beside(self, agent: Any) -> Any:
        """Wrap another agent of the same game."""
        return StepInfo(partial(super().beside, agent), self._names)


def _numbers(name: str, info: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    try:
        found = np.asarray(info[name])
        if found.dtype.kind in "biuf":
            return found.astype(np.float64)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError):
        pass  # whatever it is that cannot become an array
    got = f"{info[name]!r:.100}" if name in info else f"the keys {sorted(map(str, info))!r:.300}"
    raise InfoError(
        f"the info of every step must have {name!r}, a number or an array of numbers, because the agent "
        f"reads it (Agent.info): got {got}"
    )


def _number(item: str, value: Any) -> float:
    try:
        return float(np.asarray(value).item())
    except (TypeError, ValueError):
        raise InfoError(
            f"info[{item!r}] must be a number, for --info: got {value!r:.100}"
        ) from None
