"""A critic that sees more than the policy, through two keys of a Dict observation.

python train.py examples.luck:luck --policy-obs seen --critic-obs seen hidden --total-steps 40000
"""

from typing import Any

import gymnasium as gym
import numpy as np


class Luck(gym.Env):
    """Each step rewards the action that is seen to be right with 1, and adds the episode's luck, of a size of 10.

    A critic that sees the luck and the time expects it, so that advantages show what the actions did.
    """

    def __init__(self) -> None:
        one, two = (gym.spaces.Box(-np.inf, np.inf, (n,), np.float32) for n in (1, 2))
        self.observation_space = gym.spaces.Dict({"seen": one, "hidden": two})
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        """Begin an episode of 20 steps."""
        super().reset(seed=seed)
        self.t, self.luck = 0, 10 * self.np_random.normal()
        return self._draw(), {}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        """Give the luck, and 1 for the right action."""
        self.t += 1
        reward = float(self.luck + (action == self.right))
        return self._draw(), reward, self.t == 20, False, {}

    def _draw(self) -> dict[str, np.ndarray]:
        self.right = int(self.np_random.integers(2))
        hidden = np.float32([self.luck, self.t / 20])
        return {"seen": np.float32([2 * self.right - 1]), "hidden": hidden}


def luck() -> gym.Env:
    """Make `Luck`."""
    return Luck()
