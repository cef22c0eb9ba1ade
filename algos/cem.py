"""The cross-entropy method: no gradients. Source: de Boer et al. 2005, Annals of OR 134, 19-67."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step, choose
from rank0rl.batch import Batch
from rank0rl.nets.candidates import check_episodes
from rank0rl.options import CheckedOptions, OptionError, option


@dataclass(frozen=True)
class CEMOptions(CheckedOptions):
    """Options of the cross-entropy method."""

    population: int = option(40, "[2, inf)")
    """Number of candidates per iteration. --episodes-per-batch must be the same number."""
    elite: float = option(0.25, "(0, 1]")
    """Share of the candidates around which the next ones are drawn, usually 0.1 to 0.3. It is that of two at least."""
    std: float = option(1.0, "(0, inf)")
    """Initial standard deviation of the weights."""
    extra_std: float = option(0.2, "[0, inf)")
    """Standard deviation added at the start. It falls linearly to 0 at half of the run."""


class CEM(Agent):
    """Linear policies, one candidate per episode, for box and discrete actions."""

    Options = CEMOptions
    settings = "cem"
    coefficients = ("elite", "extra_std")

    def __init__(self, spaces: Spaces, options: CEMOptions, rng: np.random.Generator) -> None:
        self.options, self.space = options, spaces.act
        self.mean = np.zeros((spaces.obs.size, spaces.act.size))
        self.std = np.full_like(self.mean, options.std)
        self.candidates = np.zeros((options.population, *self.mean.shape), np.float32)
        self.draw(rng, 0.0)
        self.first = self.candidates.copy()

    @classmethod
    def check(cls, spaces: Spaces, options: CEMOptions, run: Any) -> None:
        check_episodes(spaces, run, "cem", 2)
        if run.episodes_per_batch != options.population:
            raise OptionError(
                f"every candidate plays one episode: got episodes_per_batch={run.episodes_per_batch} for a "
                f"population of {options.population}; set --episodes-per-batch and --population to the same number"
            )

    def act(self, step: Step) -> tuple[Array, Batch]:
        weights = self.candidates[step.fragment_id % self.options.population]
        if not step.explore:
            weights[:] = self.mean
        obs = step.obs.reshape(len(step.obs), 1, -1).astype(np.float32)
        out = (obs @ weights)[:, 0]
        if self.space.kind == "box":
            return out.reshape(-1, *self.space.shape), {}
        return choose(out, step.noise, self.space, step.mask, explore=False), {}

    def process(self, fragment: Fragment) -> Batch:
        candidate = self.candidates[[fragment.fragment_id % self.options.population]]
        return {"ret": np.array([fragment.rew.sum()]), "candidate": candidate}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        count = max(2, int(self.options.elite * len(batch["ret"])))  # one alone has no spread
        best = np.argsort(-batch["ret"], kind="stable")[:count]
        elite = batch["candidate"][best].astype(np.float64)
        self.mean[:], self.std = elite.mean(0), elite.std(0)
        self.draw(rng, progress)
        return {"elite_return": batch["ret"][best].mean(), "std": self.std.mean()}

    def draw(self, rng: np.random.Generator, progress: float) -> None:
        """Draw the next candidates."""
        std = self.std + self.options.extra_std * max(0.0, 1 - 2 * progress)
        self.candidates[:] = self.mean + std * rng.standard_normal(self.candidates.shape)

    def modules(self) -> dict[str, Any]:
        return {"candidates": self.candidates, "mean": self.mean}

    def modules_loaded(self) -> None:
        self.candidates[:] = self.mean + self.first

    def state(self) -> dict[str, Any]:
        return {"std": self.std}

    def load(self, state: dict[str, Any]) -> None:
        self.std = np.asarray(state["std"])
