"""Evolution strategies: antithetic noise on the weights, shaped by ranks.

Source: Salimans et al. 2017, arXiv:1703.03864; linear policies and normalized observations as in
Mania et al. 2018, arXiv:1803.07055.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.candidates import Candidates
from rank0rl.nets.flat import Adam
from rank0rl.options import CheckedOptions, OptionError, Scheduled, option, value_at


@dataclass(frozen=True)
class ESOptions(CheckedOptions):
    """Options of evolution strategies. The population is --episodes-per-batch."""

    std: float = option(0.05, "(0, inf)")
    """Standard deviation of the noise on each weight, usually 0.02 to 0.1."""
    lr: Scheduled = option(0.02, "(0, inf)")
    """Adam's step size, usually 0.01 to 0.05. A number, linear:START:END or cosine:START:END."""
    weight_decay: float = option(0.005, "[0, inf)")
    """Weight of the weights' squares, usually 0 to 0.01."""
    hidden: tuple[int, ...] = option((), "[1, inf)")
    """Units of each hidden layer of the policy. None: a linear policy."""


class ES(Agent):
    """Candidates 2i and 2i + 1 are the center plus and minus the noise of pair i.

    Noise never travels. A rank makes that of the candidates it runs, and rank 0 makes all of it
    again for the update, from a key that is drawn in each update and broadcast with the weights.
    """

    Options = ESOptions
    settings = "es"
    coefficients = ("lr", "std", "weight_decay")

    def __init__(self, spaces: Spaces, options: ESOptions, rng: np.random.Generator) -> None:
        self.options = options
        self.nets = Candidates(spaces, options.hidden, rng)
        self.adam = Adam(self.nets.flat)
        self.key = rng.integers(2**63, size=1)
        self.first_key = self.key.copy()

    @classmethod
    def check(cls, spaces: Spaces, options: ESOptions, run: Any) -> None:
        Candidates.check(spaces, run, "es", 2)
        if run.episodes_per_batch % 2:
            raise OptionError(
                f"candidates come in pairs: got episodes_per_batch={run.episodes_per_batch}; set an even number"
            )

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.nets.act(step, self.candidate, int(self.key[0])), {}

    def process(self, fragment: Fragment) -> Batch:
        return {"ret": np.array([fragment.rew.sum()]), **self.nets.observed(fragment.obs)}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        opt, theta, ret = self.options, self.nets.theta, batch["ret"]
        shaped = (rankdata(ret) - 0.5) / len(ret) - 0.5  # -0.5 .. 0.5; equal returns get equal ones
        signs = 1 - 2 * (batch["fragment_id"] % 2)
        gradient = np.zeros_like(theta)
        for pair in np.unique(batch["fragment_id"] // 2):
            weight = (shaped * signs)[batch["fragment_id"] // 2 == pair].sum()
            gradient += np.float32(weight / (len(ret) * opt.std)) * self.noise_of(int(pair))
        [vector] = self.nets.flat.vectors
        assert vector.grad is not None
        vector.grad.copy_(torch.from_numpy(np.float32(opt.weight_decay) * theta - gradient))
        self.adam.step(value_at(opt.lr, progress))
        self.nets.merge(batch)
        self.key[:] = rng.integers(2**63)
        return {
            "best_return": float(ret.max()),
            "gradient_norm": float(np.linalg.norm(gradient)),
            "weight_norm": float(np.linalg.norm(theta)),
        }

    def candidate(self, fragment_id: int) -> Array:
        """Return the weights of a candidate, (n,)."""
        sign = np.float32(self.options.std * (1 - 2 * (fragment_id % 2)))
        return self.nets.theta + sign * self.noise_of(fragment_id // 2)

    def noise_of(self, pair: int) -> Array:
        """Return the noise of a pair of candidates, (n,)."""
        rng = np.random.default_rng((int(self.key[0]), pair))
        return rng.standard_normal(len(self.nets.theta)).astype(np.float32)

    def modules(self) -> dict[str, Any]:
        return {"policy": self.nets.mlp, "norm": self.nets.norm, "key": self.key}

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load(state["adam"])

    def modules_loaded(self) -> None:
        self.key[:] = self.first_key

    def mode(self) -> nn.Module:
        return self.nets.mode()
