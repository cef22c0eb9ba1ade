r"""Memory: environments that show too little, and a policy that remembers what it saw before.

    python examples/05_memory.py

The same at full length:

    python train.py examples.05_memory:recall --recurrent gru --minibatch-size 400 --lr linear:1e-3:0 \
        --episodes-per-batch 64 --num-episodes 4096 --chunk-steps 50
    python train.py examples.05_memory:cartpole --recurrent gru --minibatch-size 256 --lr linear:5e-4:0 \
        --target-kl 0.02 --total-steps 300000
"""

from typing import Any

import gymnasium as gym
import numpy as np

import rank0rl


class Recall(gym.Env):
    """The first observation is 1 or -1, all others are 0. The last action must tell which it was."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, steps: int = 50) -> None:
        self.steps = steps

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


class WithoutVelocities(gym.ObservationWrapper):
    """CartPole that shows only the cart's place and the pole's angle."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Leave out the velocities."""
        return observation[[0, 2]]


def recall(**kwargs: Any) -> gym.Env:
    """Make `Recall`."""
    return Recall(**kwargs)


def cartpole(**kwargs: Any) -> gym.Env:
    """Make CartPole without velocities."""
    return WithoutVelocities(gym.make("CartPole-v1", **kwargs))


if __name__ == "__main__":
    sizes = {"episodes_per_batch": 64, "num_episodes": 640, "minibatch_size": 256, "chunk_steps": 8}
    run = rank0rl.train(recall, env_kwargs={"steps": 8}, recurrent="gru", lr=2e-3, **sizes)
    print(f"remembered in {run.summary['return_mean']:.0%} of the last 100 episodes")
