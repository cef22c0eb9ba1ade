"""The value function, and fitting it to returns by minibatch gradient steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import minibatches
from rank0rl.nets.conv import ConvNet, network
from rank0rl.nets.flat import Adam
from rank0rl.nets.normalize import Moments

Array = npt.NDArray[Any]


class ValueFunction(nn.Module):
    """A network that predicts returns in units of their standard deviation.

    The loss then has the same size whatever the rewards are. Rank 0 alone learns the scale. It is a
    scale without a shift: returns that hardly vary around a large number are learned slowly.

    Args:
        shape: (inputs,), or the shape of an image.
        hidden: units of each hidden layer.
        rng: draws the weights.
    """

    scale: Tensor

    def __init__(
        self, shape: Sequence[int], hidden: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.mlp = network(shape, hidden, 1, rng, last_gain=1.0)
        self.moments = Moments(())
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Predict values (N,) in units of the scale, from inputs (N, inputs)."""
        return self.mlp(x)[:, 0]  # type: ignore[no-any-return]

    def predict(self, x: Array) -> Array:
        """Predict values (N,) in units of reward, from inputs (N, inputs), in NumPy."""
        return self.mlp.numpy(x)[:, 0] * self.scale.numpy()  # type: ignore[no-any-return]

    def merge(self, ret: Array) -> None:
        """Add returns (N,) to the statistics, without changing predictions in units of reward.

        Rank 0 only: its weights are broadcast.

        Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2.2.
        """
        self.moments.merge(ret)
        scale = torch.sqrt(self.moments.var + 1e-8).to(torch.float32)
        with torch.no_grad():
            self.mlp.weights[-1].mul_(self.scale / scale)
            self.mlp.biases[-1].mul_(self.scale / scale)
        self.scale.copy_(scale)


def fit_value(
    value: ValueFunction,
    adam: Adam,
    x: Array,
    ret: Array,
    rng: np.random.Generator,
    *,
    lr: float,
    epochs: int,
    minibatch_size: int,
    threads: int = 1,
) -> float:
    """Minimize E[(V - R)^2], with R in units of the value function's scale.

    Args:
        value: the value function, flat, with gradients in place.
        adam: the optimizer of its parameters.
        x: inputs, (N, inputs).
        ret: returns in units of reward, (N,).
        rng: draws the order of rows.
        lr: Adam's step size.
        epochs: passes over the rows.
        minibatch_size: rows per gradient step.
        threads: number of threads; the result does not depend on it.

    Returns:
        Mean squared error over the last epoch, each minibatch's from before its step.
    """
    ret = ret / value.scale.numpy()
    steps: Any = _AutogradFit(value, adam)
    if not isinstance(value.mlp, ConvNet):
        from rank0rl.nets.compiled import CompiledFit  # loads the compiler, which only rank 0 needs

        steps = CompiledFit(value, adam, threads)
    error = np.empty(0)
    for _ in range(epochs):
        error = steps.epoch(x, ret, minibatch_size, rng, lr)
    return float(np.square(error).mean())


class _AutogradFit:
    """What `CompiledFit` does, for any network."""

    def __init__(self, value: ValueFunction, adam: Adam) -> None:
        self._value, self._adam = value, adam

    def epoch(
        self, x: Array, ret: Array, minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> Array:
        errors = []
        for few in minibatches({"x": x, "ret": ret}, minibatch_size, rng):
            self._adam.flat.zero_grad()
            error = self._value(torch.from_numpy(few["x"])) - torch.from_numpy(few["ret"])
            error.square().mean().backward()
            self._adam.step(lr)
            errors.append(error.detach().numpy())
        return np.concatenate(errors)
