"""A reward that is kept for the record, before wrappers change it for the agent."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


class RawReward(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose steps give their reward in info["raw_reward"] too.

    With `--info sum:raw_reward` the record has the returns before wrappers around this one, such as
    ClipReward, change rewards.
    """

    def step(self, action: Any) -> Any:
        """Step the environment."""
        obs, rew, terminated, truncated, info = self.env.step(action)
        return obs, rew, terminated, truncated, {**info, "raw_reward": rew}
