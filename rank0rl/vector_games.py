"""A vector environment as a game: its environments step together, and begin together with one seed.

An environment whose episode has ended waits for the others, as an agent that has left a game does. What a
vector environment resets by itself has no seed of its own, so those steps are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate


class VectorGame:
    """A vector environment with the methods of a PettingZoo parallel environment.

    Args:
        env: the vector environment.
        name: its name, for messages.
    """

    def __init__(self, env: Any, name: str) -> None:
        """Look at how it resets.

        Raises:
            ValueError: if it does not reset by itself, or takes no seed.
        """
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"a vector environment must reset by itself, at the next step or at the same: {name} has "
                f'metadata["autoreset_mode"] {mode}; make it with autoreset_mode="NextStep"'
            )
        begun, _ = copy.deepcopy(env.reset(seed=1))
        if not data_equivalence(begun, env.reset(seed=1)[0], exact=True):
            raise ValueError(
                f"a vector environment must begin the same episodes after two resets with the same seed, "
                f"or no run could be resumed: those of {name} differ (EnvPool ignores the seed of a "
                f"reset); name the single gymnasium.Env, and --num-envs says how many there are"
            )
        self._env, self._is_same_step = env, mode is AutoresetMode.SAME_STEP
        self.possible_agents = [*range(env.num_envs)]
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._actions: dict[int, Any] = {}

    def observation_space(self, agent: int) -> Any:
        """Return the space of the observations of each environment."""
        return self._env.single_observation_space

    def action_space(self, agent: int) -> Any:
        """Return the space of the actions of each environment."""
        return self._env.single_action_space

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode of every environment."""
        obs, infos = self._env.reset(**kwargs)
        of = self.possible_agents
        return dict(zip(of, self._each(obs), strict=True)), {i: _info(infos, i) for i in of}

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step all environments; those that are not in `actions` take their last one again."""
        self._actions |= actions
        space = self._env.single_action_space
        both = [self._actions[i] for i in self.possible_agents]
        act: Any = create_empty_array(space, len(both))
        act = concatenate(space, both, act)
        all_obs, rew, terminated, truncated, all_infos = self._env.step(act)
        each = self._each(all_obs)
        obs = {i: each[i] for i in actions}
        infos = {i: _info(all_infos, i) for i in actions}
        if self._is_same_step:
            for i in actions:
                if terminated[i] or truncated[i]:
                    obs[i] = all_infos["final_obs"][i]
                    infos[i] = _info(all_infos.get("final_info", {}), i)
        return obs, rew, terminated, truncated, infos

    def render(self) -> Any:
        """Return the picture of the first environment."""
        return self._env.render()[0]

    def close(self) -> None:
        """Close all environments."""
        self._env.close()

    def _each(self, obs: Any) -> list[Any]:
        return [*iterate(self._env.observation_space, obs)]


def is_vector(env: Any) -> bool:
    """Return True for a vector environment, also for one that is a gymnasium.Env by its class."""
    return isinstance(env, gym.vector.VectorEnv)


def _info(infos: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the info of one environment: what a vector environment marks as its own in "_name"."""
    found = {}
    for name, values in infos.items():
        own = infos.get(f"_{name}")
        if not name.startswith("_") and (own is None or own[i]):
            found[name] = _info(values, i) if isinstance(values, Mapping) else np.asarray(values)[i]
    return found
