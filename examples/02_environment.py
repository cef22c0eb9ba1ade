"""An environment of your own: a corridor, with a reward at its end.

    python examples/02_environment.py
    python train.py examples.02_environment:corridor --env-kwargs distance=5

Any gymnasium.Env will do whose episodes repeat: the same seed and the same actions give the same
episode. So draw from `self.np_random`, which `reset` seeds, and keep nothing between episodes.
"""

from typing import Any

import gymnasium as gym
import numpy as np

import rank0rl


class Corridor(gym.Env):
    """Go left or right. Only the goal, at 0, has a reward, and an episode ends after 60 steps.

    Args:
        distance: steps from the start to the goal. The reset option "distance" overrides it.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, distance: int = 30) -> None:
        self.distance = distance

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.place, self.t = (options or {}).get("distance", self.distance), 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Go one step; one in ten goes the other way."""
        self.place += (1 if action else -1) * (-1 if self.np_random.random() < 0.1 else 1)
        self.t += 1
        there = self.place <= 0
        return self._obs(), float(there), there, self.t == 60, {"success": there}

    def _obs(self) -> np.ndarray:
        return np.float32([self.place / 30])


def corridor(**kwargs: Any) -> gym.Env:
    """Make the environment. Every rank imports this file and calls this function."""
    return Corridor(**kwargs)


def main() -> None:
    """Train. `info` keeps a number of every episode, here the last info["success"]."""
    run = rank0rl.train(
        corridor, env_kwargs={"distance": 5}, info=["success"], nprocs=2, total_steps=30_000
    )
    print(f"success: {list(run.progress['success_mean'])[-1]:.2f}")


if __name__ == "__main__":
    main()
