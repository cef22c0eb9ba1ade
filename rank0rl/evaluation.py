"""Whole episodes with seeds that training does not use, acted in by weights that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.rollout import Rollout

_LANES = 16  # at most: what acts on them all costs little more than on one


class Evaluation:
    """The same episodes, and the same noise in them, at every call: what differs is the policy.

    Args:
        make_env: makes one environment.
        episodes: how many there are, over all ranks.
        seed: of them: others than those of training, whatever its seed was.
        deterministic: take the mean of normal actions. Choices are drawn as ever.
        mine: called for the numbers of the episodes that this rank takes part in; by default all.
        lanes: environments on this rank, at most.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        episodes: int,
        seed: int,
        *,
        deterministic: bool = False,
        mine: Callable[[], Iterator[int]] | None = None,
        lanes: int = _LANES,
    ) -> None:
        """Make the environments."""
        self._deterministic = deterministic
        self.rollout = Rollout(
            make_env,
            range(min(episodes, lanes, _LANES)),
            seeding.integer(seed, "evaluate", 0, 0),
            episodes=mine or (lambda: iter(range(episodes))),
        )

    def __call__(self, agent: Agent) -> Batch:
        """This rank's episodes: "unit", "return" and "length" of each, (E,), as they ended."""
        _, ended = self.rollout.collect(_WithoutNoise(agent) if self._deterministic else agent, 1)
        return ended

    def close(self) -> None:
        """Close the environments."""
        self.rollout.close()


class _WithoutNoise(Agent):
    """An agent that acts as another one does on average."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self.noise = agent, agent.noise
        self.act = self._act if agent.noise[0] == "normal" else agent.act  # type: ignore[method-assign]

    def _act(
        self, obs: npt.NDArray[Any], noise: npt.NDArray[Any], *args: Any, **kwargs: Any
    ) -> tuple[npt.NDArray[Any], Batch]:
        return self._agent.act(obs, np.zeros_like(noise), *args, **kwargs)
