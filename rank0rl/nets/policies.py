"""Policies: drawing actions, their probabilities, and the distance of two policies.

Each works over one memory in two ways, as `mlp.MLP` does: in torch, where autograd takes the
gradient of any loss, and in NumPy, for acting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import NEVER, Space, choose
from rank0rl.nets.conv import network
from rank0rl.nets.mlp import View, place

Array = npt.NDArray[Any]

Parameters: TypeAlias = tuple[Tensor, ...]
"""Parameters of a distribution of actions for each of N inputs."""

_LOG_2PI = math.log(2 * math.pi)


class GaussianPolicy(nn.Module):
    """Independent normal actions. A network gives the means; the log standard deviations are parameters.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, a box.
        hidden: units of each hidden layer.
        rng: draws the weights.
        log_std: initial log standard deviation.
        rows: number of log-std parameters that are summed. Adam steps each of them, so the sum
            moves `rows` times as fast.
    """

    in_kernels = True

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Sequence[int],
        rng: np.random.Generator,
        log_std: float = 0.0,
        rows: int = 1,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.noise = ("normal", space.size)
        self.shape = space.shape
        self.mlp = network(inputs, hidden, space.size, rng, last_gain=0.01)
        one = torch.full((space.size,), log_std)
        self.log_std = nn.Parameter(one if rows == 1 else one.repeat(rows, 1) / rows)
        self._view = View(self._parameters, "log_std")

    def act(self, x: Array, noise: Array, mask: Any = None) -> Array:
        """Compute actions (B, *shape) from inputs (B, inputs) and noise (B, k). No row depends on B."""
        act = self.mlp.numpy(x[:, None, :])[:, 0]
        act += np.exp(self._log_std()) * noise
        return act.reshape(-1, *self.shape)  # type: ignore[no-any-return]

    def distribution(self, x: Tensor, mask: Any = None) -> Parameters:
        """Return means (N, k) for inputs (N, inputs), and log standard deviations (k,)."""
        log_std = self.log_std.clone() if self.log_std.ndim == 1 else self.log_std.sum(dim=0)
        return self.mlp(x), log_std

    def mode(self, x: Tensor, mask: Any = None) -> Tensor:
        """Return the means (N, *shape) for inputs (N, inputs)."""
        return self.mlp(x).reshape(-1, *self.shape)  # type: ignore[no-any-return]

    @staticmethod
    def logp(of: Parameters, act: Tensor) -> Tensor:
        """Return the log-densities (N,) of actions (N, *shape)."""
        mean, log_std = of
        z = (act.reshape(len(act), -1) - mean) * torch.exp(-log_std)
        return -0.5 * z.square().sum(dim=1) - log_std.sum() - 0.5 * _LOG_2PI * len(log_std)

    @staticmethod
    def entropy(of: Parameters) -> Tensor:
        """Return the entropy, (), in nats. It is the same for all inputs."""
        _, log_std = of
        return log_std.sum() + 0.5 * (_LOG_2PI + 1) * len(log_std)

    @staticmethod
    def kl(old: Parameters, new: Parameters) -> Tensor:
        """Return the KL divergence of new from old distributions, (N,), in nats."""
        (mean0, log_std0), (mean1, log_std1) = old, new
        spread = torch.exp(2 * (log_std0 - log_std1))
        z = (mean1 - mean0) * torch.exp(-log_std1)
        return (0.5 * (spread + z.square() - 1) + log_std1 - log_std0).sum(dim=1)

    def log_prob(self, x: Array, act: Array, mask: Any = None) -> Array:
        """Return the log-densities (N,) of actions (N, *shape) for inputs (N, inputs), in NumPy."""
        log_std = self._log_std()
        z = act.reshape(len(act), -1) - self.mlp.numpy(x)
        z *= np.exp(-log_std)
        z *= z
        logp = np.add.reduce(z, axis=1)
        logp *= -0.5
        logp -= np.add.reduce(log_std).item() + 0.5 * _LOG_2PI * len(log_std)
        return logp  # type: ignore[no-any-return]

    def _log_std(self) -> Array:
        log_std = self._view()
        return log_std if log_std.ndim == 1 else np.add.reduce(log_std)


class CategoricalPolicy(nn.Module):
    """One of n choices, or several such choices at once, independent of each other.

    The probabilities are the softmax of a network's output. A mask (N, all choices) tells which
    choices may be taken; the others then have probability 0.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        space: the space of actions, discrete.
        hidden: units of each hidden layer.
        rng: draws the weights.
    """

    in_kernels = True

    def __init__(
        self,
        inputs: Sequence[int],
        space: Space,
        hidden: Sequence[int],
        rng: np.random.Generator,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.noise = ("uniform", len(space.choices))
        self.space = space
        self.mlp = network(inputs, hidden, space.size, rng, last_gain=0.01)
        self._choices = space.choice_slices()

    def act(self, x: Array, noise: Array, mask: Array | None = None) -> Array:
        """Draw choices (B, *shape), int64, from inputs (B, inputs) and noise (B, k). No row depends on B."""
        return choose(self.mlp.numpy(x[:, None, :])[:, 0], noise, self.space, mask)

    def distribution(self, x: Tensor, mask: Tensor | None = None) -> Parameters:
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
    def logp(of: Parameters, act: Tensor) -> Tensor:
        """Return the log-probabilities (N,) of choices (N, *shape)."""
        act = act.reshape(len(act), -1)
        each = [p.gather(1, act[:, i : i + 1]) for i, p in enumerate(of)]
        return torch.cat(each, dim=1).sum(dim=1)

    @staticmethod
    def entropy(of: Parameters) -> Tensor:
        """Return the mean entropy over the inputs, (), in nats."""
        return -torch.stack([(p.exp() * p).sum(dim=1).mean() for p in of]).sum()

    @staticmethod
    def kl(old: Parameters, new: Parameters) -> Tensor:
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
        return np.add.reduce(np.take_along_axis(logits, taken, axis=1), axis=1)  # type: ignore[no-any-return]


Policy: TypeAlias = GaussianPolicy | CategoricalPolicy


def head(policy: Policy, theta: Tensor) -> tuple[Array | None, Array | None]:
    """Return what kernels must know of a policy's distribution besides its network.

    Args:
        policy: the policy, flat.
        theta: its flat vector.

    Returns:
        One of two arrays of int64, and None for the other. Of normal actions: where the log standard
        deviations begin in theta, how many are summed, and of how many actions. Of choices: the
        columns at which each begins, and their number.
    """
    if isinstance(policy, GaussianPolicy):
        std = policy.log_std
        shape = std.shape if std.ndim == 2 else (1, *std.shape)
        return np.array([place(std, theta), *shape]), None
    columns = policy.space.choice_slices()
    return None, np.array([*(c.start for c in columns), columns[-1].stop])


class Mode(nn.Module):
    """A module from observations to a policy's most probable actions, for an agent's `mode`.

    Args:
        policy: takes normalized observations.
        norm: normalizes observations; None leaves them as they are.
    """

    def __init__(self, policy: Policy, norm: nn.Module | None = None) -> None:
        """Combine the modules."""
        super().__init__()
        self.policy, self.norm = policy, norm or nn.Identity()

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return actions (N, *act) for flattened observations (N, numbers), float32."""
        return self.policy.mode(self.norm(obs), mask)


def make_policy(
    inputs: Sequence[int],
    act: Space,
    hidden: Sequence[int],
    rng: np.random.Generator,
    log_std: float = 0.0,
    rows: int = 1,
) -> Policy:
    """Return a policy for a space of actions: normal for a box, categorical for choices.

    Args:
        inputs: shape of the inputs: (number,), or the shape of an image.
        act: the space of actions.
        hidden: units of each hidden layer.
        rng: draws the weights.
        log_std: initial log standard deviation of normal actions.
        rows: number of log-std parameters that are summed, see `GaussianPolicy`.
    """
    if act.choices:
        return CategoricalPolicy(inputs, act, hidden, rng)
    return GaussianPolicy(inputs, act, hidden, rng, log_std, rows)
