"""The policies of an evolution strategy: one network, with other weights for every candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from rank0rl.agent import Spaces, Step, choose
from rank0rl.batch import Batch
from rank0rl.nets.flat import Flat
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.nets.policies import Mode, make_policy
from rank0rl.options import OptionError

Array = npt.NDArray[Any]

_CENTER = -1  # in place of a candidate's number


def check_episodes(spaces: Spaces, run: Any, algo: str, least: int) -> None:
    """Raise OptionError unless candidates can act, and a run compares them, in `least` episodes or more."""
    if spaces.act.kind == "hybrid":
        raise OptionError(
            f"{algo} takes actions that are choices, or numbers, and not both at once: set --algo ppo or a2c"
        )
    if not run.episodes_per_batch or run.episodes_per_batch < least:
        raise OptionError(
            f"{algo} compares whole episodes, one of each candidate: got episodes_per_batch="
            f"{run.episodes_per_batch}; set --episodes-per-batch to {least} or more"
        )


class Candidates:
    """A network that acts for several candidates at once. Actions are means, or the best choices.

    Without hidden layers, it is a linear policy.
    """

    def __init__(self, spaces: Spaces, hidden: Sequence[int], rng: np.random.Generator) -> None:
        self._space = spaces.act
        self.norm = ObsNormalizer(spaces.obs.shape)
        self.policy = make_policy((spaces.obs.size,), spaces.act, tuple(hidden), rng)
        mlp: Any = self.policy.mlp
        self.mlp = mlp
        self.flat = Flat(mlp)
        [vector] = self.flat.vectors
        self.theta: Array = vector.detach().numpy()
        """The center: weights and biases, (n,), float32, in the memory of the network's own."""
        self._table = mlp.table(vector).tolist()
        self._of: tuple[Any, ...] = ()
        self._layers: list[tuple[Array, Array]] = []

    @staticmethod
    def check(spaces: Spaces, run: Any, algo: str, least: int) -> None:
        """Raise OptionError as `check_episodes`, and if the next candidates play before an update."""
        check_episodes(spaces, run, algo, least)
        if run.overlap:
            raise OptionError(
                f"{algo} learns from the candidates that have played, and with --overlap the next "
                f"ones are playing already: leave it out; an update takes little time here"
            )

    def act(self, step: Step, weights_of: Callable[[int], Array], version: int) -> Array:
        """Return actions, (B, *act): each row's are those of its candidate, or of the center without `explore`.

        Args:
            step: its fragment ids are those of the candidates.
            weights_of: returns the weights, (n,), of a candidate.
            version: changes whenever the weights of candidates do.
        """
        x = self.norm.numpy(step.obs)[:, None]
        of = tuple(step.fragment_id.tolist()) if step.explore else (_CENTER,) * len(x)
        *hidden, last = self._layers_of(of, weights_of, version)
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        out: Array = (x @ last[0] + last[1])[:, 0]
        if self._space.kind == "box":
            return out.reshape(-1, *self._space.shape)
        return choose(out, step.noise, self._space, step.mask, explore=False)

    @staticmethod
    def observed(obs: Array) -> Batch:
        """Return the row of an episode's observations, (T, *obs), for `merge`: few numbers, to be sent."""
        flat = obs.reshape(len(obs), -1)
        return {
            "steps": np.array([len(flat)]),
            "obs_mean": flat.mean(axis=0, dtype=np.float64)[None],
            "obs_var": flat.var(axis=0, dtype=np.float64)[None],
        }

    def merge(self, batch: Batch) -> None:
        """Add what was observed in the episodes of a batch to the normalizer. Rank 0 only."""
        self.norm.merge_groups(batch["steps"], batch["obs_mean"], batch["obs_var"])

    def mode(self) -> nn.Module:
        """Return the center's policy as a torch module, for an agent's `mode`."""
        return Mode(self.policy, self.norm)

    def _layers_of(
        self, candidates: tuple[int, ...], weights_of: Callable[[int], Array], version: int
    ) -> list[tuple[Array, Array]]:
        """Return weights (B, inputs, outputs) and biases (B, 1, outputs) of each layer.

        They are kept until another candidate has its turn.
        """
        of = (version, *candidates)
        if of != self._of:
            rows = np.stack([self.theta if i == _CENTER else weights_of(i) for i in of[1:]])
            self._layers = [
                (rows[:, at : at + n * m].reshape(-1, n, m), rows[:, None, bias : bias + m])
                for at, bias, n, m, *_ in self._table
            ]
            self._of = of
        return self._layers
