"""A symmetry loss: in a mirrored state, the policy is to take the mirrored action.

    python train.py Pendulum --algo examples/symmetry.py --total-steps 200000

Source: Yu et al. 2018, arXiv:1801.08093.
"""

from dataclasses import dataclass

import numpy as np

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.options import option

OBS_SIGNS, ACT_SIGNS = np.float32([1, -1, -1]), -1  # Pendulum: cos, sin, speed; torque


@dataclass(frozen=True)
class SymmetryOptions(PPOOptions):
    """Options of PPO, and one more."""

    symmetry_coef: float = option(1.0, "[0, inf)")
    """Weight of the symmetry loss."""


class Symmetry(PPO):
    """PPO with a loss that computes the policy for other inputs."""

    Options = SymmetryOptions
    devices = ("cpu",)

    def process(self, fragment):
        """Add mirrored observations to the rows."""
        return {**super().process(fragment), "mirrored": fragment.obs * OBS_SIGNS}

    def loss(self, log_ratio, entropy, value, rows):
        """Return PPO's loss plus symmetry_coef E[(mean(s) - mirrored mean(mirrored s))^2]."""
        mean, _ = self.policy.distribution(rows["obs"])
        other, _ = self.policy.distribution(self.norm(rows["mirrored"]))
        off = (mean - ACT_SIGNS * other).square().mean()
        return super().loss(log_ratio, entropy, value, rows) + self.options.symmetry_coef * off
