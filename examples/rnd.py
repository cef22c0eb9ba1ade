"""Curiosity: a bonus for observations that a network cannot predict yet (random network distillation).

    python train.py MountainCarContinuous --algo examples/rnd.py --config configs/ppo.toml --total-steps 200000

Source: Burda et al. 2018, arXiv:1810.12894.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import Sequential, Tanh

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.batch import minibatches
from rank0rl.nets.layers import Linear  # a row of it has the same bits in every batch
from rank0rl.nets.normalize import Moments
from rank0rl.options import option


@dataclass(frozen=True)
class RNDOptions(PPOOptions):
    """Options of PPO, and two more."""

    bonus_coef: float = option(1.0, "[0, inf)")
    """Weight of the bonus, in units of its running standard deviation."""
    bonus_lr: float = option(1e-3, "(0, inf)")
    """Adam's step size for the predictor."""


class RND(PPO):
    """PPO with a bonus in its rewards."""

    Options = RNDOptions

    def __init__(self, spaces, options, rng):
        super().__init__(spaces, options, rng)
        self.target = Sequential(Linear(spaces.obs.size, 64), Tanh(), Linear(64, 32))
        self.predictor = Sequential(Linear(spaces.obs.size, 64), Tanh(), Linear(64, 32))
        self.errors = Moments(())
        self.bonus_adam = torch.optim.Adam(self.predictor.parameters(), options.bonus_lr)

    def error(self, obs):
        """Return the error of the prediction for each observation, (N,)."""
        x = torch.from_numpy(self.norm.numpy(obs))
        return (self.predictor(x) - self.target(x).detach()).square().mean(dim=1)

    @torch.no_grad()
    def process(self, fragment):
        """Add the bonus to the rewards."""
        error = self.error(fragment.obs).numpy()
        bonus = self.options.bonus_coef * error / self.errors.var.sqrt().item()
        return {**super().process(replace(fragment, rew=fragment.rew + bonus)), "error": error}

    def update(self, batch, rng, progress):
        """Train the predictor on each observation once, and PPO."""
        self.errors.merge(batch["error"])
        for rows in minibatches({"obs": batch["obs"]}, self.options.minibatch_size, rng):
            self.bonus_adam.zero_grad()
            self.error(rows["obs"]).mean().backward()
            self.bonus_adam.step()
        return {**super().update(batch, rng, progress), "error": batch["error"].mean()}

    def modules(self):
        """Return PPO's modules and all that the bonus reads."""
        own = {"target": self.target, "predictor": self.predictor, "errors": self.errors}
        return {**super().modules(), **own}

    def state(self):
        """Return PPO's state and the predictor's optimizer."""
        return {**super().state(), "bonus_adam": self.bonus_adam.state_dict()}

    def load(self, state):
        """Restore both."""
        super().load(state)
        self.bonus_adam.load_state_dict(state["bonus_adam"])
