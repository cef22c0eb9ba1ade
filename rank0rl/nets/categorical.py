"""A policy that chooses: one of n values, or several such choices at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import NEVER, Space, choose
from rank0rl.batch import Batch
from rank0rl.nets.conv import Hidden, network

Array = npt.NDArray[Any]


class CategoricalPolicy(nn.Module):
    """One of n choices, or several such choices at once, independent of each other.

    The probabilities are the softmax of a network's output. A mask (N, all choices) tells which
    choices may be taken; the others then have probability 0.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, discrete.
        hidden: units of each hidden layer, or a network of one's own.
        rng: draws the weights.
        layers: "activation", "layer_norm" and "columns" of the network, see `conv.network`.
    """

    in_kernels = True

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Hidden,
        rng: np.random.Generator,
        **layers: Any,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.noise = ("uniform", len(space.choices))
        self.space = space
        self.mlp = network(inputs, hidden, space.size, rng, 0.01, **layers)
        self._choices = space.choice_slices()

    def act(
        self, x: Array, noise: Array, mask: Array | None = None, explore: bool = True
    ) -> tuple[Array, Batch]:
        """Draw choices (B, *shape), int64, from inputs (B, inputs) and noise (B, k). No row depends on B.

        Without `explore`, take the most probable ones.
        """
        return choose(self.mlp.numpy(x[:, None, :])[:, 0], noise, self.space, mask, explore), {}

    def distribution(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return log-probabilities for inputs (N, inputs): (N, n) for each of the choices at once."""
        logits = self.mlp(x)
        if mask is not None:
            logits = logits.masked_fill(~mask, NEVER)
        return tuple(torch.log_softmax(logits[:, columns], dim=1) for columns in self._choices)

    def mode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the most probable choices (N, *shape), int64, for inputs (N, inputs)."""
        each = [logp.argmax(dim=1) for logp in self.distribution(x, mask)]
        return torch.stack(each, dim=1).reshape(-1, *self.space.shape)

    @staticmethod
    def logp(of: tuple[Tensor, ...], act: Tensor) -> Tensor:
        """Return the log-probabilities (N,) of choices (N, *shape)."""
        act = act.reshape(len(act), -1)
        each = [p.gather(1, act[:, i : i + 1]) for i, p in enumerate(of)]
        return torch.cat(each, dim=1).sum(dim=1)

    @staticmethod
    def entropy(of: tuple[Tensor, ...]) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats."""
        return -torch.stack([(p.exp() * p).sum(dim=1).mean() for p in of]).sum()

    @staticmethod
    def kl(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats."""
        each = [(p.exp() * (p - q)).sum(dim=1) for p, q in zip(old, new, strict=True)]
        return torch.stack(each).sum(dim=0)

    def log_prob(self, x: Array, act: Array, mask: Array | None = None) -> Array:
        """Return the log-probabilities (N,) of choices (N, *shape) for inputs (N, inputs), in NumPy."""
        logits = self.mlp.numpy(x)
        if mask is not None:
            logits[~mask] = NEVER
        for columns in self._choices:
            some = logits[:, columns]
            some -= some.max(axis=1, keepdims=True)
            some -= np.log(np.exp(some).sum(axis=1, keepdims=True))
        taken = act.reshape(len(act), -1) + np.array([columns.start for columns in self._choices])
        return np.add.reduce(np.take_along_axis(logits, taken, axis=1), axis=1)
