"""The cross-entropy method: no gradients. Source: de Boer et al. 2005, Annals of OR 134, 19-67."""

from dataclasses import dataclass

import numpy as np

from rank0rl.agent import Agent
from rank0rl.options import CheckedOptions, option


@dataclass(frozen=True)
class CEMOptions(CheckedOptions):
    """Options of the cross-entropy method."""

    population: int = option(40, "[2, inf)")
    """Candidates of one iteration: give --episodes-per-batch the same number."""
    elite: float = option(0.25, "(0, 1]")
    """Share of the candidates that the next ones are drawn around, usually 0.1 to 0.3."""
    std: float = option(1.0, "(0, inf)")
    """Initial standard deviation of the weights."""
    extra_std: float = 0.2
    """Added to it at first, and less and less until half of the run is over."""


class CEM(Agent):
    """Linear policies, one candidate per episode, for box and single discrete actions."""

    Options = CEMOptions

    def __init__(self, spaces, options, rng):
        self.options, self.space = options, spaces.act
        self.mean = np.zeros((spaces.obs.size, spaces.act.size))
        self.std = np.full_like(self.mean, options.std)
        self.candidates = np.zeros((options.population, *self.mean.shape), np.float32)
        self.draw(rng, 0.0)

    def act(self, obs, noise, fragment_id):
        weights = self.candidates[fragment_id % self.options.population]
        out = (obs.reshape(len(obs), 1, -1).astype(np.float32) @ weights)[:, 0]
        return (out.argmax(1) if self.space.choices else out.reshape(-1, *self.space.shape)), {}

    def process(self, fragment):
        candidate = self.candidates[[fragment.fragment_id % self.options.population]]
        return {"ret": np.array([fragment.rew.sum() / len(fragment.end)]), "candidate": candidate}

    def update(self, batch, rng, progress):
        count = max(1, int(self.options.elite * len(batch["ret"])))
        best = np.argsort(-batch["ret"], kind="stable")[:count]
        elite = batch["candidate"][best].astype(np.float64)
        self.mean, self.std = elite.mean(0), elite.std(0)
        self.draw(rng, progress)
        return {"elite_return": batch["ret"][best].mean(), "std": self.std.mean()}

    def draw(self, rng, progress):
        std = self.std + self.options.extra_std * max(0.0, 1 - 2 * progress)
        self.candidates[:] = self.mean + std * rng.standard_normal(self.candidates.shape)

    def modules(self):
        return {"candidates": self.candidates}

    def state(self):
        return {"mean": self.mean, "std": self.std}

    def load(self, state):
        self.mean, self.std = (np.asarray(state[name]) for name in ("mean", "std"))
