"""Repeat an episode whose environment has failed, from its seed and its actions.

So a failure that does not come again, such as that of a server or a file, does not change the learning curve.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rank0rl.envs.info import GAVE_UP, InfoError
from rank0rl.envs.spaces import has_length, name_of
from rank0rl.envs.state import State
from rank0rl.envs.wrappers import Around

FAILURES = ("env_mended", "env_truncated")
"""Columns of the record: failures after which the episode went on, and those that cut it off."""


_SEEN = "seen"  # name of the last observation in a state


class RetriedEnv(Around):
    """A gymnasium environment that is made anew when it raises, and whose episode is then repeated.

    Args:
        make: makes the environment.
        retries: number of failures at the same step of an episode after which it is repeated.
        truncate: end the episode at a step that fails once more. Otherwise its error is raised.
        max_steps: longest episode that is repeated, in steps.
    """

    def __init__(
        self, make: Callable[[], Any], retries: int, truncate: bool, max_steps: int
    ) -> None:
        self._make, self._retries, self._truncate = make, retries, truncate
        self._max_steps = max_steps if retries else 0
        self.failures = dict.fromkeys(FAILURES, 0)
        """Number of failures since `take_failures`, for each of `FAILURES`."""
        self._broken = False
        self._begun_from: State | None = None
        super().__init__(self._make_first)

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment; make it anew if that fails."""
        self._reset, self._begun_from = kwargs, None
        self._done: list[tuple[Any, Any]] = []  # actions and rewards of the episode
        self._steps = 0
        self._failed: Counter[int] = Counter()  # step, 0 for the reset -> its failures
        try:
            answer = self._begin()
        except Exception as error:
            answer = self._again(error, None)
        if has_length(answer, 2):
            self._seen, self._info = np.array(answer[0]), answer[1]
        return answer

    def step(self, action: Any) -> Any:
        """Step the environment; repeat the episode if that fails."""
        given = copy.deepcopy(action)  # a step may write into its action
        try:
            answer = self._env.step(action)
        except InfoError:
            raise
        except Exception as error:
            answer = self._again(error, given)
        self._steps += 1
        if has_length(answer, 5):
            self._seen, self._info = np.array(answer[0]), answer[4]
            if self._steps <= self._max_steps:
                self._done.append((given, answer[1]))
        return answer

    def take_state(self) -> State:
        """Return the state of the environment, and its last observation."""
        seen = {_SEEN: self._seen} if self._seen.dtype.kind in "biuf" else {}
        return super().take_state() | seen

    def give_state(self, taken: State) -> None:
        """Let the environment go on from a state. A later failure repeats the episode from there."""
        self._begun_from = taken
        self._seen = taken.get(_SEEN, self._seen)
        super().give_state(taken)

    def _make_first(self) -> Any:
        for _ in range(self._retries):
            try:
                return self._make()
            except Exception as error:
                self.failures["env_mended"] += 1
                warnings.warn(
                    f"making an environment raised {_first_line(error)}; it is made anew",
                    RuntimeWarning,
                    stacklevel=5,
                )
        return self._make()

    def _begin(self) -> Any:
        """Reset the environment, a new one if the last one has failed."""
        if self._broken:
            with contextlib.suppress(Exception):
                self._env.close()
            self._env = self._make()
            self._broken = False
        answer = self._env.reset(**copy.deepcopy(self._reset))
        if self._begun_from is not None:
            super().give_state(self._begun_from)
        return answer

    def _again(self, error: Exception, action: Any) -> Any:
        """Return the answer to a step that has failed, or to a reset if there is no action; or raise."""
        self._failed_at = self._steps + (action is not None)
        failures = 0
        while True:
            self._broken = True
            failures += 1
            self._failed[self._failed_at] += 1
            if self._failed[self._failed_at] > self._retries or len(self._done) < self._steps:
                return self._give_up(error, action)
            warnings.warn(
                f"{name_of(self)} raised {_first_line(error)}; its episode is repeated",
                RuntimeWarning,
                stacklevel=3,
            )
            try:
                answer = self._repeat(error)
                if action is not None:
                    self._failed_at = self._steps + 1
                    answer = self._env.step(copy.deepcopy(action))
            except _NotRepeatedError:
                raise
            except Exception as another:
                error = another
            else:
                self.failures["env_mended"] += failures
                return answer

    def _repeat(self, error: Exception) -> Any:
        """Repeat the episode in a new environment, up to the step that failed. Return the reset's answer."""
        self._failed_at = 0
        begun = self._begin()
        if not self._steps:
            return begun
        for action, rew in self._done:
            self._failed_at += 1
            obs, again, *flags = self._env.step(copy.deepcopy(action))[:4]
            if again != rew or any(flags):
                break
        else:
            if np.array(obs).tobytes() == self._seen.tobytes():
                return begun
        raise _NotRepeatedError(
            f"{name_of(self)} does not repeat an episode from its seed and actions, so after a "
            f"failure in step {self._steps + 1} the curve would be another one; leave --env-retries "
            f"out, or find out why with python -m rank0rl check"
        ) from error

    def _give_up(self, error: Exception, action: Any) -> Any:
        """Return the answer that ends the episode at a step that cannot be made; raise if there is none."""
        if self._truncate and action is not None:
            self.failures["env_truncated"] += 1
            return self._seen.copy(), 0.0, False, True, {**self._info, GAVE_UP: True}
        if self._retries:
            error.add_note(
                f"The environment was made anew after {self._failed[self._failed_at] - 1} failures at "
                f"this step; --env-retries is {self._retries}."
                if len(self._done) == self._steps
                else f"The episode is longer than --max-replay-steps {self._max_steps}, so it is not repeated."
            )
        raise error


class _NotRepeatedError(RuntimeError):
    """An environment does not repeat an episode from its seed and actions."""


def take_failures(envs: Iterable[Any]) -> dict[str, int]:
    """Return the number of failures of these environments since the last call, for each of `FAILURES`."""
    taken = dict.fromkeys(FAILURES, 0)
    for env in envs:
        for name in taken:
            taken[name] += env.failures[name]
            env.failures[name] = 0
    return taken


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"
