"""A penalty on the KL divergence from the acting policy, beside PPO's clip.

    python train.py CartPole --algo examples/kl_penalty.py --kl-coef 3 --total-steps 50000

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 8. Its estimate: http://joschu.net/blog/kl-approx.html, k3.
"""

from dataclasses import dataclass

import torch

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.options import option


@dataclass(frozen=True)
class KLPenaltyOptions(PPOOptions):
    """Options of PPO, and one more."""

    kl_coef: float = option(1.0, "[0, inf)")
    """Weight of the KL divergence, usually 0.5 to 10."""


class KLPenalty(PPO):
    """PPO with one more term in its loss."""

    Options = KLPenaltyOptions

    def loss(self, log_ratio, *others):
        """Return PPO's loss plus kl_coef E[r - 1 - log r], which is never negative."""
        kl = (torch.expm1(log_ratio) - log_ratio).mean()
        return super().loss(log_ratio, *others) + self.options.kl_coef * kl
