"""PPO that makes a large batch of few steps, and takes as long for every update: what is left is between ranks."""

import time

import numpy as np

from algos.ppo import PPO
from rank0rl.agent import Fragment
from rank0rl.batch import Batch

COPIES = 1000  # of each row: steps of real environments take as long as they like
UPDATE_S = 2.0  # longer than TCP remembers what a link carries


class Large(PPO):
    """Learns nothing."""

    def process(self, fragment: Fragment) -> Batch:
        rows = super().process(fragment)
        return {name: np.repeat(x, COPIES, axis=0) for name, x in rows.items()}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        time.sleep(UPDATE_S)
        return {"rows": len(batch["obs"])}
