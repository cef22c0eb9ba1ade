"""Whole episodes of an agent, apart from training: with seeds that training does not use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl import seeding
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.rollout import Rollout

Array = npt.NDArray[Any]

LANES = 16  # at most: what acts on them all costs little more than on one


def whole_episodes(
    agent: Agent,
    make_env: Callable[[], Any],
    episodes: int,
    seed: int = 0,
    lanes: int = LANES,
) -> Batch:
    """Returns and lengths. An episode is the same however many there are, on however many lanes.

    Args:
        agent: acts; it learns nothing.
        make_env: makes one environment.
        episodes: how many.
        seed: of them: other ones than those of training, whatever its seed was.
        lanes: environments to step at the same time, at most.

    Returns:
        "return" and "length" of each, (episodes,).
    """
    part = Part(make_env, episodes, seed, lambda: iter(range(episodes)), lanes)
    try:
        ended = part(agent)
    finally:
        part.close()
    order = np.argsort(ended["fragment_id"])
    return {name: ended[name][order] for name in ("return", "length")}


class Part:
    """What one rank has of such episodes: the same ones, with the same noise, at every call.

    Args:
        make_env: makes one environment.
        episodes: how many there are, over all ranks.
        seed: of them.
        mine: called for the numbers of those that this rank takes part in.
        lanes: environments of this rank, at most.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        episodes: int,
        seed: int,
        mine: Callable[[], Iterator[int]],
        lanes: int = LANES,
    ) -> None:
        """Make the environments."""
        seed = seeding.integer(seed, "evaluate", 0, 0)
        self._rollout = Rollout(make_env, range(min(episodes, lanes)), seed, episodes=mine)

    def __call__(self, agent: Agent) -> Batch:
        """This rank's episodes: "fragment_id", "return" and "length" of each, (E,), as they ended."""
        return self._rollout.collect(agent, 1)[1]

    def close(self) -> None:
        """Close the environments."""
        self._rollout.close()


def quiet(agent: Agent) -> Agent:
    """An agent that takes the mean of normal actions; one that draws choices stays what it is."""
    return _Quiet(agent) if agent.noise[0] == "normal" else agent


class _Quiet(Agent):
    def __init__(self, agent: Agent) -> None:
        @functools.wraps(agent.act)  # whether it takes a mask is seen by its signature
        def act(obs: Array, noise: Array, *args: Any, **kwargs: Any) -> tuple[Array, Batch]:
            return agent.act(obs, np.zeros_like(noise), *args, **kwargs)

        self.noise = agent.noise
        self.act = act  # type: ignore[method-assign]
