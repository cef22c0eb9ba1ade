r"""Environments that show too little: an agent must remember what it saw before.

PPO with a memory learns both:

    python train.py examples.partly_seen:cartpole --recurrent gru --minibatch-size 256 --lr linear:5e-4:0 \
        --target-kl 0.02 --total-steps 300000
    python train.py examples.partly_seen:recall --recurrent gru --minibatch-size 400 --lr linear:1e-3:0 \
        --episodes-per-batch 64 --num-episodes 4096 --chunk-steps 50

A critic that sees more than the policy helps here:

    python train.py examples.partly_seen:luck --policy-obs seen --critic-obs seen hidden --total-steps 40000
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


class Keys(gym.ObservationWrapper):
    """CartPole with two keys: what is seen, and the velocities, which only a critic may see."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        two = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"seen": two, "hidden": two})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        """Divide the numbers between the keys."""
        return {"seen": observation[[0, 2]], "hidden": observation[[1, 3]]}


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


def cartpole_keys(**kwargs: Any) -> gym.Env:
    """Make CartPole with two keys."""
    return Keys(gym.make("CartPole-v1", **kwargs))


def cartpole(**kwargs: Any) -> gym.Env:
    """Make CartPole without velocities."""
    return WithoutVelocities(gym.make("CartPole-v1", **kwargs))


def recall() -> gym.Env:
    """Make `Recall`."""
    return Recall()
