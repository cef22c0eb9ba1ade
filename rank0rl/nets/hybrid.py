"""A policy for actions of choices and numbers at once, from a policy for each of the two."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch

Array = npt.NDArray[Any]


class HybridPolicy(nn.Module):
    """Choices, and numbers behind them, in one row. Given the observation, they are independent of each other.

    One network gives both. A mask is of the choices. The normal distribution function turns normal noise to
    the uniform numbers that draw choices.

    Args:
        net: the network.
        choices: a categorical policy over the first of its outputs.
        numbers: a continuous policy over the others.
    """

    def __init__(self, net: Any, choices: Any, numbers: Any) -> None:
        super().__init__()
        from scipy import special  # 0.3 s and some memory, for this policy alone

        self._ndtr = special.ndtr
        self.mlp, self.choices, self.numbers = net, choices, numbers
        self._n, self._logits = choices.noise[1], choices.space.size
        self.noise = ("normal", self._n + numbers.noise[1])

    def act(
        self, x: Array, noise: Array, mask: Array | None = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Return actions (B, k) for inputs (B, inputs) and noise (B, k). No row depends on B."""
        out = self.mlp.numpy(x[:, None, :])[:, 0]
        # in float32, what follows differs by the version of the C library
        uniform = self._ndtr(noise[:, : self._n].astype(np.float64))
        first, _ = self.choices.act(out[:, : self._logits], uniform, mask, explore)
        second, extras = self.numbers.act(out[:, self._logits :], noise[:, self._n :])
        act = np.concatenate([first.astype(out.dtype), second], axis=1)
        if "draw" not in extras:
            return act, {}
        return act, {"draw": np.concatenate([act[:, : self._n], extras["draw"]], axis=1)}

    def distribution(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what the two policies do, one behind the other, for inputs (N, inputs)."""
        out = self.mlp(x)
        first = self.choices.distribution(out[:, : self._logits], mask)
        return (*first, *self.numbers.distribution(out[:, self._logits :]))

    def mode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the most probable choices and the numbers of `mode`, (N, k), for inputs (N, inputs)."""
        out = self.mlp(x)
        first = self.choices.mode(out[:, : self._logits], mask)
        return torch.cat([first.to(out.dtype), self.numbers.mode(out[:, self._logits :])], dim=1)

    def logp(self, of: tuple[Tensor, ...], draw: Tensor) -> Tensor:
        """Return the log-probabilities of choices plus the log-densities of numbers, (N,), of draws (N, k)."""
        first = self.choices.logp(of[: self._n], draw[:, : self._n].long())
        return first + self.numbers.logp(of[self._n :], draw[:, self._n :])

    def entropy(self, of: tuple[Tensor, ...]) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats: the sum of both."""
        return self.choices.entropy(of[: self._n]) + self.numbers.entropy(of[self._n :])

    def kl(self, old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats: the sum of both."""
        first = self.choices.kl(old[: self._n], new[: self._n])
        return first + self.numbers.kl(old[self._n :], new[self._n :])

    def log_prob(self, x: Array, draw: Array, mask: Array | None = None) -> Array:
        """Return the log-probabilities (N,) of draws (N, k) for inputs (N, inputs), in NumPy."""
        out = self.mlp.numpy(x)
        taken = draw[:, : self._n].astype(np.int64)
        first = self.choices.log_prob(out[:, : self._logits], taken, mask)
        return first + self.numbers.log_prob(out[:, self._logits :], draw[:, self._n :])
