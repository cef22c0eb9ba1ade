"""MLPs, policies, a value function, an observation normalizer.

Each network has two forward passes over one memory: torch's, for gradients, and NumPy's, for
acting. In NumPy, a stack of one-row products (B, 1, d) gives rows whose bits do not depend on B,
which a product (B, d) does not; that is what makes a run the same for every number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Space

Array = npt.NDArray[Any]

_LOG_2PI = math.log(2 * math.pi)


class MLP(nn.Module):
    """Fully connected layers with tanh between them, orthogonal weights and zero biases.

    Args:
        sizes: numbers of inputs, of each hidden layer's units, and of outputs.
        rng: for the weights.
        last_gain: scale of the last layer's weights; the hidden layers have sqrt(2).

    Source: Saxe et al. 2014, arXiv:1312.6120 (orthogonal); Andrychowicz et al. 2021,
    arXiv:2006.05990 (a last policy layer of 0.01).
    """

    def __init__(self, sizes: Sequence[int], rng: np.random.Generator, last_gain: float) -> None:
        """Draw the weights."""
        super().__init__()
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.weights = nn.ParameterList()  # (inputs, outputs) each
        self.biases = nn.ParameterList()
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            gain = last_gain if i == len(sizes) - 2 else math.sqrt(2)
            weight = nn.init.orthogonal_(torch.empty(n_in, n_out), gain, generator=torch_rng)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(n_out)))
        self._views: tuple[int, list[tuple[Array, Array]]] = (0, [])

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs) -> (N, outputs)."""
        *hidden, last = zip(self.weights, self.biases, strict=True)
        for weight, bias in hidden:
            x = torch.tanh(torch.addmm(bias, x, weight))
        return torch.addmm(last[1], x, last[0])

    def numpy(self, x: Array) -> Array:
        """The same on NumPy arrays, (..., inputs) -> (..., outputs).

        The bits of a row depend on the shape of its last two axes only: pass (B, 1, inputs) where
        they must not depend on B.
        """
        *hidden, last = self._arrays()
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            np.tanh(x, out=x)
        return x @ last[0] + last[1]  # type: ignore[no-any-return]

    def _arrays(self) -> list[tuple[Array, Array]]:
        """NumPy views of the weights, made anew when the weights have moved in memory."""
        address = self.weights[0].data_ptr()
        if self._views[0] != address:
            pairs = zip(self.weights, self.biases, strict=True)
            self._views = address, [(w.detach().numpy(), b.detach().numpy()) for w, b in pairs]
        return self._views[1]


class Moments(nn.Module):
    """Running mean and variance of rows, in float64: 0 and 1 before the first row.

    Args:
        shape: of one row.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        """Begin with no rows."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def merge(self, rows: Array) -> None:
        """Add rows, (N, *shape).

        Source: Chan, Golub and LeVeque 1983, eq. 1.5.
        """
        n, old = len(rows), self.count.item()
        mean = torch.from_numpy(np.asarray(rows.mean(axis=0, dtype=np.float64)))
        var = torch.from_numpy(np.asarray(rows.var(axis=0, dtype=np.float64)))
        delta, total = mean - self.mean, old + n
        squares = self.var * old + var * n + delta**2 * (old * n / total)
        self.mean += delta * (n / total)
        self.var.copy_(squares / total)
        self.count += n


class ObsNormalizer(nn.Module):
    """(obs - mean) / std, limited to +-10. It flattens observations.

    `merge` is for rank 0, after the last gradient step: an iteration acts, evaluates and learns
    with the statistics that were broadcast before it.
    """

    shift: Tensor
    scale: Tensor
    limit = 10.0

    def __init__(self, shape: Sequence[int]) -> None:
        """Begin with mean 0 and variance 1."""
        super().__init__()
        size = math.prod(shape)
        self.moments = Moments((size,))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self._views: tuple[int, Array, Array] = (0, np.empty(0), np.empty(0))

    def forward(self, obs: Tensor) -> Tensor:
        """(N, *shape) -> (N, size), float32."""
        flat = obs.reshape(len(obs), -1)
        return ((flat - self.shift) * self.scale).clamp_(-self.limit, self.limit)

    def numpy(self, obs: Array) -> Array:
        """The same on NumPy arrays."""
        if self._views[0] != self.shift.data_ptr():
            self._views = self.shift.data_ptr(), self.shift.numpy(), self.scale.numpy()
        _, shift, scale = self._views
        x = (obs.reshape(len(obs), -1) - shift) * scale
        return np.clip(x, -self.limit, self.limit, out=x)

    def merge(self, obs: Array) -> None:
        """Add the observations of a batch, (N, *shape)."""
        self.moments.merge(obs.reshape(len(obs), -1))
        self.shift.copy_(self.moments.mean)
        self.scale.copy_(1 / torch.sqrt(self.moments.var + 1e-8))  # 1e-8: some never change


class GaussianPolicy(nn.Module):
    """Independent normal actions: the mean is an MLP of the input, the standard deviation a parameter.

    Args:
        size: numbers of inputs and of actions' components.
        shape: of one action.
        hidden: units of each hidden layer.
        rng: for the weights.
        log_std: initial log of the standard deviation.
    """

    def __init__(
        self,
        size: tuple[int, int],
        shape: tuple[int, ...],
        hidden: Sequence[int],
        rng: np.random.Generator,
        log_std: float = 0.0,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.noise = ("normal", size[1])
        self.shape = shape
        self.mlp = MLP([size[0], *hidden, size[1]], rng, last_gain=0.01)
        self.log_std = nn.Parameter(torch.full((size[1],), log_std))

    def act(self, x: Array, noise: Array) -> tuple[Array, Array]:
        """Actions (B, *shape) and their log-densities (B,), of inputs (B, inputs) and noise (B, k).

        No row depends on B.
        """
        log_std = self.log_std.detach().numpy()
        act = self.mlp.numpy(x[:, None, :])[:, 0] + np.exp(log_std) * noise
        logp = -0.5 * np.square(noise).sum(axis=1) - (log_std.sum() + 0.5 * _LOG_2PI * len(log_std))
        return act.reshape(-1, *self.shape), logp.astype(np.float32)

    def evaluate(self, x: Tensor, act: Tensor) -> tuple[Tensor, Tensor]:
        """Log-densities (N,) of actions (N, *shape), and the entropy, (), in nats."""
        z = (act.reshape(len(act), -1) - self.mlp(x)) * torch.exp(-self.log_std)
        const = self.log_std.sum() + 0.5 * _LOG_2PI * len(self.log_std)
        return -0.5 * z.square().sum(dim=1) - const, const + 0.5 * len(self.log_std)


class CategoricalPolicy(nn.Module):
    """One of n choices, with probabilities that are the softmax of an MLP of the input.

    Args:
        size: numbers of inputs and of choices.
        hidden: units of each hidden layer.
        rng: for the weights.
    """

    noise = ("uniform", 1)

    def __init__(
        self, size: tuple[int, int], hidden: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.mlp = MLP([size[0], *hidden, size[1]], rng, last_gain=0.01)

    def act(self, x: Array, noise: Array) -> tuple[Array, Array]:
        """Choices (B,), int64, and their log-probabilities (B,), of inputs (B, inputs) and noise (B, 1).

        No row depends on B.
        """
        logits = self.mlp.numpy(x[:, None, :])[:, 0]
        logits -= logits.max(axis=1, keepdims=True)
        cumulative = np.exp(logits).cumsum(axis=1)
        act = (noise * cumulative[:, -1:] >= cumulative[:, :-1]).sum(axis=1)
        chosen = np.take_along_axis(logits, act[:, None], axis=1)[:, 0]
        return act, chosen - np.log(cumulative[:, -1])

    def evaluate(self, x: Tensor, act: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (N,) of choices (N,), and the mean entropy, (), in nats."""
        logp = torch.log_softmax(self.mlp(x), dim=1)
        entropy = -(logp.exp() * logp).sum(dim=1).mean()
        return logp.gather(1, act[:, None])[:, 0], entropy


def make_policy(
    size: int,
    act: Space,
    hidden: Sequence[int],
    rng: np.random.Generator,
    log_std: float = 0.0,
) -> GaussianPolicy | CategoricalPolicy:
    """The policy for a space of actions: normal for a box, categorical for choices.

    Args:
        size: number of inputs.
        act: the space of actions.
        hidden: units of each hidden layer.
        rng: for the weights.
        log_std: initial log standard deviation of normal actions.
    """
    if act.kind == "discrete":
        return CategoricalPolicy((size, act.n), hidden, rng)
    return GaussianPolicy((size, act.size), act.shape, hidden, rng, log_std)


class ValueFunction(nn.Module):
    """An MLP that predicts returns in units of their standard deviation.

    So the loss has the same size whatever the rewards are, and the scale is learned on rank 0 alone.

    Args:
        size: number of inputs.
        hidden: units of each hidden layer.
        rng: for the weights.
    """

    scale: Tensor

    def __init__(self, size: int, hidden: Sequence[int], rng: np.random.Generator) -> None:
        """Draw the weights."""
        super().__init__()
        self.mlp = MLP([size, *hidden, 1], rng, last_gain=1.0)
        self.moments = Moments(())
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Values in units of the scale, (N,), of inputs (N, inputs)."""
        return self.mlp(x)[:, 0]  # type: ignore[no-any-return]

    def numpy(self, x: Array) -> Array:
        """Values in units of reward, (N,)."""
        return self.mlp.numpy(x)[:, 0] * self.scale.numpy()  # type: ignore[no-any-return]

    def merge(self, ret: Array) -> None:
        """Add returns, (N,), to the statistics; predictions in units of reward stay what they were.

        Rank 0 only. Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2.2.
        """
        self.moments.merge(ret)
        scale = torch.sqrt(self.moments.var + 1e-8).to(torch.float32)
        with torch.no_grad():
            self.mlp.weights[-1].mul_(self.scale / scale)
            self.mlp.biases[-1].mul_(self.scale / scale)
        self.scale.copy_(scale)
