"""CMA-ES, by the package cma: for policies with at most 3,000 weights.

Source: Hansen 2016, arXiv:1604.00772; https://github.com/CMA-ES/pycma. Observations are normalized as
in `es`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from rank0rl.agent import Agent, Array, Fragment, Spaces, Step
from rank0rl.batch import Batch
from rank0rl.nets.candidates import Candidates
from rank0rl.options import CheckedOptions, OptionError, option

with contextlib.suppress(ModuleNotFoundError):
    import cma

MOST = 3000  # weights: their covariance takes 72 MB


@dataclass(frozen=True)
class CMAESOptions(CheckedOptions):
    """Options of CMA-ES."""

    population: int = option(16, "[2, inf)")
    """Number of candidates. --episodes-per-batch must be this number or a multiple of it. With a multiple, each candidate plays several episodes."""
    std: float = option(0.5, "(0, inf)")
    """Initial standard deviation of the weights, usually 0.1 to 1."""
    hidden: tuple[int, ...] = option((), "[1, inf)")
    """Units of each hidden layer of the policy. None: a linear policy."""


class CMAES(Agent):
    """Rank 0 asks for candidates and tells what they returned; the ranks run them.

    All that is saved is what was told. A resumed run tells it again, and so comes to the same state.
    """

    Options = CMAESOptions
    settings = "cmaes"

    def __init__(self, spaces: Spaces, options: CMAESOptions, rng: np.random.Generator) -> None:
        if "cma" not in globals():
            raise OptionError("--algo cmaes needs the package cma: pip install cma")
        self.options = options
        self.nets = Candidates(spaces, options.hidden, rng)
        if len(self.nets.theta) > MOST:
            raise OptionError(
                f"CMA-ES needs the covariance of all weights, so there may be at most {MOST:,}: got "
                f"{len(self.nets.theta):,}; choose a smaller --hidden, or --algo es"
            )
        self.candidates = np.zeros((options.population, len(self.nets.theta)), np.float32)
        self.version = np.zeros(1, np.int64)  # told to all ranks: the number of updates
        self.start = self.nets.theta.astype(np.float64)
        self.begin(int(rng.integers(2**63)))

    @classmethod
    def check(cls, spaces: Spaces, options: CMAESOptions, run: Any) -> None:
        Candidates.check(spaces, run, "cmaes", options.population)
        if run.episodes_per_batch % options.population:
            raise OptionError(
                f"every candidate needs as many episodes: got episodes_per_batch="
                f"{run.episodes_per_batch} for a population of {options.population}; set a multiple"
            )

    def begin(self, key: int) -> None:
        """Ask for the first candidates."""
        self.keys: list[int] = []
        self.told: list[Array] = []
        about = {"popsize": self.options.population, "randn": self.randn, "verbose": -9}
        self.strategy = cma.CMAEvolutionStrategy(self.start, self.options.std, about)
        self.ask(key)

    def ask(self, key: int) -> None:
        """Ask for the next candidates, drawn by a key."""
        self.keys.append(key)
        self.rng = np.random.default_rng(key)
        self.asked = self.strategy.ask()
        self.candidates[:] = self.asked
        self.version[:] = len(self.told)

    def tell(self, ret: Array) -> None:
        """Tell the returns of the candidates, (population,); the strategy minimizes their negatives."""
        self.told.append(ret)
        self.strategy.tell(self.asked, (-ret).tolist())
        self.nets.theta[:] = self.strategy.mean

    def randn(self, *shape: int) -> Array:
        """Draw normal numbers from the stream of this update."""
        return self.rng.standard_normal(shape)

    def act(self, step: Step) -> tuple[Array, Batch]:
        return self.nets.act(step, self.candidate, int(self.version[0])), {}

    def candidate(self, fragment_id: int) -> Array:
        """Return the weights of a candidate, (n,)."""
        return self.candidates[fragment_id % self.options.population]

    def process(self, fragment: Fragment) -> Batch:
        return {"ret": np.array([fragment.rew.sum()]), **self.nets.observed(fragment.obs)}

    def update(self, batch: Batch, rng: np.random.Generator, progress: float) -> dict[str, float]:
        population = self.options.population
        of = batch["fragment_id"] % population
        self.tell(np.bincount(of, batch["ret"], population) / np.bincount(of, minlength=population))
        self.nets.merge(batch)
        self.ask(int(rng.integers(2**63)))
        return {"best_return": float(self.told[-1].max()), "std": float(self.strategy.sigma)}

    def modules(self) -> dict[str, Any]:
        return {
            "policy": self.nets.mlp,
            "norm": self.nets.norm,
            "candidates": self.candidates,
            "version": self.version,
        }

    def state(self) -> dict[str, Any]:
        told = np.stack(self.told) if self.told else np.zeros((0, self.options.population))
        return {"start": self.start, "keys": np.array(self.keys), "told": told}

    def load(self, state: dict[str, Any]) -> None:
        first, *keys = np.asarray(state["keys"]).tolist()
        self.start = np.asarray(state["start"])
        self.begin(first)
        for ret, key in zip(np.asarray(state["told"]), keys, strict=True):
            self.tell(ret)
            self.ask(key)

    def modules_loaded(self) -> None:
        self.start = self.nets.theta.astype(np.float64)
        self.begin(self.keys[0])

    def mode(self) -> nn.Module:
        return self.nets.mode()
