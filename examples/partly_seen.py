r"""Environments that show too little: an agent must remember what it saw before.

PPO with a memory learns both:

    python train.py examples.partly_seen:cartpole --recurrent gru --minibatch-size 512 --lr linear:1e-3:0 \
        --total-steps 300000
    python train.py examples.partly_seen:recall --recurrent gru --minibatch-size 400 --lr linear:1e-3:0 \
        --episodes-per-batch 64 --num-episodes 4096 --chunk-steps 50
"""

from typing import Any

import gymnasium as gym
import numpy as np


class WithoutVelocities(gym.ObservationWrapper):
    """CartPole, of which only the cart's place and the pole's angle are seen."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Leave out the velocities."""
        return observation[[0, 2]]


class Recall(gym.Env):
    """The first observation is 1 or -1, all others are 0. The action in step 50 must tell which it was."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 50

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Draw what is to be remembered."""
        super().reset(seed=seed)
        self.answer, self.t = int(self.np_random.integers(2)), 0
        return np.float32([2 * self.answer - 1, 0]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Give 1 for the right answer in the last step."""
        self.t += 1
        over = self.t == self.steps
        reward = float(over and action == self.answer)
        return np.float32([0, self.t / self.steps]), reward, over, False, {}


def cartpole() -> gym.Env:
    """Make CartPole without velocities."""
    return WithoutVelocities(gym.make("CartPole-v1"))


def recall() -> gym.Env:
    """Make `Recall`."""
    return Recall()
