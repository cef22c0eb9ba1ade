"""SPO: a smooth penalty in place of PPO's clip, so that ratios which are too far away are pulled back.

    python train.py CartPole --algo examples/spo.py --total-steps 50000

Source: Xie et al. 2025, arXiv:2401.16025.
"""

from rank0rl.algos.ppo import PPO


class SPO(PPO):
    """PPO with another objective. Its maximum is at ratios of 1 +- clip_ratio."""

    def loss(self, log_ratio, entropy, value, rows):
        """Return the loss of a minibatch: maximize r A - |A| / (2 clip_ratio) (r - 1)^2."""
        ratio, adv = log_ratio.exp(), rows["adv"]
        objective = ratio * adv - adv.abs() / (2 * self.clip_ratio) * (ratio - 1).square()
        value_loss = (value - rows["ret"]).square().mean()
        more = self.options.value_coef * value_loss - self.entropy_coef * entropy
        return more - objective.mean()
