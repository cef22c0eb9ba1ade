r"""An environment whose episodes become harder as the agent succeeds, and figures of its episodes.

    python train.py examples.harder:corridor --curriculum examples.harder:farther --info success \
        --total-steps 200000

Without --curriculum, all episodes begin 30 steps from the goal, and PPO never gets there.
"""

from typing import Any

import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    """Go left or right. Only the goal, at 0, has a reward, and an episode ends after 60 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin at a distance from the goal, 30 if no reset option says otherwise."""
        super().reset(seed=seed)
        self.place, self.t = (options or {}).get("distance", 30), 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Go one step; one in ten goes the other way."""
        self.place += (1 if action else -1) * (-1 if self.np_random.random() < 0.1 else 1)
        self.t += 1
        there = self.place <= 0
        return self._obs(), float(there), there, self.t == 60, {"success": there}

    def _obs(self) -> np.ndarray:
        return np.float32([self.place / 30])


def corridor() -> gym.Env:
    """Make the environment."""
    return Corridor()


def farther(progress: float, record: dict[str, Any]) -> dict[str, int]:
    """Begin 2 steps from the goal, and 2 steps farther whenever 8 of 10 episodes reach it."""
    distance: int = record["settings"]["distance"] if record else 2
    if record.get("success_mean", 0.0) > 0.8:
        distance = min(distance + 2, 30)
    return {"distance": distance}
