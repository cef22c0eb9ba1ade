"""PPO with a large batch of few steps and updates of equal length, for python benchmarks/links.py iteration.

Almost all of the remaining time is what ranks exchange.
"""

import time
from dataclasses import dataclass

import numpy as np

from rank0rl.agent import Fragment
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.batch import Batch
from rank0rl.options import option

UPDATE_S = 2.0  # seconds: longer than TCP remembers what a link carries


@dataclass(frozen=True)
class LargeOptions(PPOOptions):
    """Options of PPO, and one more."""

    copies: int = option(1000, "[1, inf)")
    """Copies of each row, so that few steps of an environment make a large batch."""


class Large(PPO):
    """PPO that learns nothing."""

    Options = LargeOptions

    def process(self, fragment: Fragment) -> Batch:
        rows = super().process(fragment)
        return {name: np.repeat(x, self.options.copies, axis=0) for name, x in rows.items()}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        time.sleep(UPDATE_S)
        return {"rows": len(batch["obs"])}
