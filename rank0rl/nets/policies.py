"""Policies: drawing actions, their probabilities, and the distance of two policies.

Each works over one memory in two ways, as `mlp.MLP` does: in torch, where autograd takes the
gradient of any loss, and in NumPy, for acting and for gradients in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import NEVER, Space, choose
from rank0rl.nets.conv import network
from rank0rl.nets.mlp import View

Array = npt.NDArray[Any]

Pullback: TypeAlias = Callable[[Array, float], None]
"""Function that writes gradients of the parameters, from d loss / d log-probability, (N,), and d loss / d entropy."""

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
        act = self.mlp.numpy(x[:, None, :])[-1][:, 0]
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

    def numpy(self, x: Array, act: Array, mask: Any = None) -> tuple[Array, float, Pullback]:
        """Return log-densities (N,), entropy, and the pullback of gradients, in NumPy."""
        log_std = self._log_std()
        layers = self.mlp.numpy(x)
        inverse = np.exp(-log_std)
        z = act.reshape(len(act), -1) - layers[-1]
        z *= inverse
        const = np.add.reduce(log_std).item() + 0.5 * _LOG_2PI * len(log_std)

        def pullback(by_logp: Array, by_entropy: float) -> None:
            by_mean = by_logp[:, None] * z
            by_mean *= inverse
            self.mlp.backward(layers, by_mean)
            by_log_std = by_logp @ squares - (np.add.reduce(by_logp) - by_entropy)
            assert self.log_std.grad is not None
            self.log_std.grad.numpy()[:] = by_log_std

        squares = z * z
        logp = np.add.reduce(squares, axis=1)
        logp *= -0.5
        logp -= const
        return logp, const + 0.5 * len(log_std), pullback

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
        return choose(self.mlp.numpy(x[:, None, :])[-1][:, 0], noise, self.space, mask)

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

    def numpy(
        self, x: Array, act: Array, mask: Array | None = None
    ) -> tuple[Array, float, Pullback]:
        """Return log-probabilities (N,), mean entropy, and the pullback of gradients, in NumPy."""
        layers = self.mlp.numpy(x)
        if mask is not None:
            layers[-1][~mask] = NEVER
        act, rows = act.reshape(len(act), -1), np.arange(len(act))
        all_logp, entropies = np.empty_like(layers[-1]), []
        for columns in self._choices:
            logp = layers[-1][:, columns] - layers[-1][:, columns].max(axis=1, keepdims=True)
            logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
            all_logp[:, columns] = logp
            entropies.append(-(np.exp(logp) * logp).sum(axis=1, keepdims=True))
        taken = act + np.array([columns.start for columns in self._choices])

        def pullback(by_logp: Array, by_entropy: float) -> None:
            probs = np.exp(all_logp)
            by_logits = probs * -by_logp[:, None]
            by_logits[rows[:, None], taken] += by_logp[:, None]
            if by_entropy:
                for columns, entropy in zip(self._choices, entropies, strict=True):
                    by_logits[:, columns] -= (
                        by_entropy / len(act) * probs[:, columns] * (all_logp[:, columns] + entropy)
                    )
            self.mlp.backward(layers, by_logits)

        logp = np.add.reduce(all_logp[rows[:, None], taken], axis=1)
        return logp, sum(float(entropy.mean()) for entropy in entropies), pullback


Policy: TypeAlias = GaussianPolicy | CategoricalPolicy


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
