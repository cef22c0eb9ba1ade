"""Environment that sleeps in every step, for python benchmarks/scaling_model.py: ranks do not compete for cores."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Sleeps(gym.Env):
    """Environment whose step lets other processes have the core, and whose episodes never end.

    Args:
        step_s: seconds of a step.
        size: length of an observation, at least 2. The other numbers are 0.
    """

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, step_s: float = 0.005, size: int = 2) -> None:
        """Begin before the first episode."""
        self.step_s = step_s
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; observe (seed % 1000, 0, ...)."""
        self.first, self.t = (seed or 0) % 1000, 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep; the reward is the number of the step."""
        time.sleep(self.step_s)
        self.t += 1
        return self._obs(), float(self.t), False, False, {}

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self.observation_space.shape)
        obs[:2] = self.first, self.t
        return obs


gym.register("Sleeps-v0", "benchmarks.sleeps:Sleeps")
