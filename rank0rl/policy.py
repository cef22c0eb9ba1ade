"""The policy of a run, outside of training."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rank0rl import evaluation
from rank0rl.agent import Agent, Step
from rank0rl.batch import Batch
from rank0rl.envs.spaces import (
    describe,
    is_flattened,
    mask_of,
    nested_actions,
    to_env,
)
from rank0rl.mpi.threads import one_thread
from rank0rl.rollout import draws
from rank0rl.run import checkpoint
from rank0rl.run.agents import make_agent
from rank0rl.run.options import RunOptions
from rank0rl.run.settings import of_file, read_saved
from rank0rl.run.shares import env_maker, make_shown
from rank0rl.run.state import restore_agent

Array = npt.NDArray[Any]


class Policy:
    """A function from observations to actions.

    Args:
        agent: acts; it learns nothing here.
        options: options of its run.
    """

    def __init__(self, agent: Agent, options: RunOptions) -> None:
        self.agent, self.options = agent, options
        env = self.make_env()  # to see its spaces
        self.spaces = describe(env)
        """Spaces as the agent has them, flattened."""
        self.observation_space = (env.env if is_flattened(env) else env).observation_space
        """Space of the observations that `__call__` takes, besides flattened ones."""
        self._nested = nested_actions(env)
        env.close()
        self._noise = draws(agent, options.seed, 0, 0)

    def __call__(
        self,
        obs: Any,
        deterministic: bool = False,
        mask: Any = None,
        memory: Array | None = None,
    ) -> Any:
        """Choose actions, as the environment takes them.

        Args:
            obs: one observation of the environment, or many of them, (B, *obs). Many of a Dict or Tuple
                space are a list, or flattened.
            deterministic: choose the most probable actions.
            mask: choices that may be taken, (choices,) or (B, choices), as in info["action_mask"].
            memory: of an agent that has one: what it returned in the step before, (m,) or (B, m).
                None where an episode begins.

        Returns:
            One action, or (B, *act); and for an agent with a memory, the next memory too. Many actions
            of a Dict or Tuple space, or of integers, are a list.

        Raises:
            ValueError: if observations or a mask have another shape.
        """
        rows, is_one = self._rows(obs)
        if mask is not None:
            given = [mask] if is_one else mask
            masks = [mask_of({"action_mask": one}, self.spaces.act.size) for one in given]
            mask = np.stack(masks).astype(bool)  # Gymnasium's are int8
        if self.agent.memory:
            zeros = np.zeros((len(rows), self.agent.memory), np.float32)
            memory = zeros if memory is None else np.reshape(memory, zeros.shape).copy()
        ids = np.zeros(len(rows), np.int64)
        step = Step(rows, self._noise(len(rows)), ids, mask, memory)
        act, extras = evaluation.Deterministic.of(self.agent, bool(deterministic)).act(step)
        many = to_env(act, self.spaces.act)
        if self._nested:
            many = [self._nested(row) for row in many]
        if not self.agent.memory:
            return many[0] if is_one else many
        memory = extras["memory"]
        return (many[0], memory[0]) if is_one else (many, memory)

    def make_env(self, **kwargs: Any) -> Any:
        """Make an environment as the run's, with its wrappers.

        Its observations are flattened, as the agent sees them. `__call__` takes them, and those of
        the environment itself.

        Args:
            kwargs: more arguments, such as render_mode="human".

        Returns:
            The environment, of gymnasium.
        """
        return make_shown(self.options, **kwargs)

    def evaluate(
        self, episodes: int = 100, seed: int | None = None, deterministic: bool = False
    ) -> Batch:
        """Run whole episodes, the same ones for the same seed. Training never sees any of them.

        Args:
            episodes: number of episodes, at least 1.
            seed: seed of the episodes. None: the run's seed, which gives the episodes of the run's own
                evaluations.
            deterministic: choose the most probable actions.

        Returns:
            "return", "length" and what --info named, (episodes,) each.

        Raises:
            ValueError: for less than one episode.
        """
        if episodes < 1:
            raise ValueError(f"episodes must be at least 1: got {episodes}")
        with one_thread():
            return evaluation.whole_episodes(
                evaluation.Deterministic.of(self.agent, bool(deterministic)),
                env_maker(self.options, evaluation=True),
                episodes,
                self.options.seed if seed is None else seed,
                info=self.options.info,
            )

    def _rows(self, obs: Any) -> tuple[Array, bool]:
        """Return observations as the agent takes them, (B, *obs), and True if it was a single one."""
        shape, dtype, space = self.spaces.obs.shape, self.spaces.obs.dtype, self.observation_space
        if not (isinstance(space, gym.spaces.Box) or _is_one_hot(obs, shape)):
            has_parts = isinstance(space, gym.spaces.Dict | gym.spaces.Tuple)
            is_one = isinstance(obs, Mapping | tuple) if has_parts else space.contains(obs)
            many = [*obs] if isinstance(obs, list | np.ndarray) and not is_one else [obs]
            with contextlib.suppress(Exception):  # whatever a part of another kind raises
                if has_parts or all(map(space.contains, many)):
                    flat: list[Any] = [gym.spaces.flatten(space, one) for one in many]
                    if flat and all(np.shape(each) == shape for each in flat):
                        return np.asarray(flat, dtype), is_one
        if isinstance(obs, dict | tuple):
            got = f"{obs!r:.100}"
        else:
            rows = np.asarray(obs)
            if rows.shape == shape:
                return rows.astype(dtype)[None], True
            if rows.shape[1:] == shape:
                return rows.astype(dtype), False
            got = f"{type(obs).__name__} {rows.shape}"
        raise ValueError(
            f"observations of {self.options.env_id} must be of shape {shape}, or (B, *{shape}) for "
            f"many, or of {space}: got {got}"
        )


def _is_one_hot(obs: Any, shape: tuple[int, ...]) -> bool:
    """Return True for one choice, flattened: not so many choices of 0 and 1."""
    is_row = isinstance(obs, np.ndarray) and obs.shape == shape
    return bool(is_row and np.count_nonzero(obs) == 1 and obs.max() == 1)


def load(run: str | Path, trust: bool = False) -> Policy:
    """Load the policy of a run's last checkpoint.

    Args:
        run: the run's folder, or one of its checkpoints, such as checkpoints/best.pt.
        trust: True to import all code that the run names. Without it, code that is not part of
            Gymnasium or rank0rl is only imported for runs of your own, and is an error for others.

    Returns:
        The policy, with the run's spaces.

    Raises:
        ValueError: if there is no such run, its checkpoint is damaged, or it names code that is not
            trusted.
    """
    saved = read_saved(checkpoint.latest(Path(run)), trust=trust)
    options, agent_options = of_file(saved["settings"], str(run))
    env = env_maker(options)()
    agent = make_agent(options, agent_options, describe(env))
    env.close()
    restore_agent(agent, saved)
    return Policy(agent, options)
