"""A network of your own in PPO: any torch modules, here with ReLU and layer norm.

    python examples/04_network.py
    python train.py CartPole --algo examples/04_network.py:MyPPO

All else stays PPO's: its options, its update, its export.
"""

from torch import nn

import rank0rl
from rank0rl.algos.ppo import PPO


class MyPPO(PPO):
    """PPO with other networks."""

    @staticmethod
    def make_networks(spaces, options, rng):
        """Return modules that take normalized observations (N, n). Leave one out to keep PPO's own."""
        n, k = spaces.obs.size, spaces.act.size
        return {
            "policy": nn.Sequential(
                nn.Linear(n, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, k)
            ),
            "value": nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 1)),
        }


if __name__ == "__main__":
    rank0rl.train("CartPole", algo=MyPPO, nprocs=2, total_steps=20_000, minibatch_size=256)
