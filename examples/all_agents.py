"""A PettingZoo parallel environment as one gymnasium.Env: the policy sees and moves all agents at once.

    python train.py examples.all_agents:make --env-kwargs module=pettingzoo.sisl.multiwalker_v9

It needs: pip install "pettingzoo[sisl]". An agent that is gone shows zeros, and its actions do nothing. The reward
is the sum over all agents.
"""

import importlib
from typing import Any

import gymnasium as gym
import numpy as np


class AllAgents(gym.Env):
    """An environment whose observations and actions are a Dict with a key for each agent.

    Args:
        game: a PettingZoo parallel environment.
    """

    def __init__(self, game: Any) -> None:
        self.game = game
        agents = game.possible_agents
        self.observation_space = gym.spaces.Dict({a: game.observation_space(a) for a in agents})
        self.action_space = gym.spaces.Dict({a: game.action_space(a) for a in agents})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        """Begin an episode."""
        obs, _ = self.game.reset(seed=seed, options=options)
        return self._of_all(obs), {}

    def step(self, action: dict) -> tuple[dict, float, bool, bool, dict]:
        """Move all agents that are not gone. The episode ends when all are."""
        obs, rew, _, truncated, _ = self.game.step({a: action[a] for a in self.game.agents})
        over = not self.game.agents
        cut_off = over and any(truncated.values())
        return self._of_all(obs), float(sum(rew.values())), over and not cut_off, cut_off, {}

    def _of_all(self, obs: dict) -> dict[str, Any]:
        return {
            a: obs[a] if a in obs else np.zeros(space.shape, space.dtype)
            for a, space in self.observation_space.spaces.items()
        }

    def close(self) -> None:
        """Close the game."""
        self.game.close()


def make(module: str, **kwargs: Any) -> AllAgents:
    """Make the parallel environment of a module, such as pettingzoo.sisl.multiwalker_v9."""
    return AllAgents(importlib.import_module(module).parallel_env(**kwargs))
