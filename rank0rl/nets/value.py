"""The value function, and fitting it to returns by minibatch gradient steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        return self.mlp.numpy(x)[-1][:, 0] * self.scale.numpy()  # type: ignore[no-any-return]

    def numpy(self, x: Array) -> tuple[Array, Callable[[Array], None]]:
        """Compute `forward` in NumPy; also return a function from d loss / d values, (N,), to gradients."""
        layers = self.mlp.numpy(x)
        return layers[-1][:, 0], lambda by_value: self.mlp.backward(layers, by_value[:, None])

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

    Returns:
        Mean squared error over the last epoch, each minibatch's from before its step.
    """
    gradient = _by_autograd if isinstance(value.mlp, ConvNet) else _in_closed_form
    rows = {"x": x, "ret": ret / value.scale.numpy()}
    errors: list[Array] = []
    for _ in range(epochs):
        errors.clear()
        for minibatch in minibatches(rows, minibatch_size, rng):
            errors.append(gradient(value, **minibatch))
            adam.step(lr)
    return float(np.square(np.concatenate(errors)).mean())


def _in_closed_form(value: ValueFunction, x: Array, ret: Array) -> Array:
    """Write the gradient of the mean squared error in place; return the errors (n,)."""
    val, pullback = value.numpy(x)
    error: Array = val - ret
    pullback(np.float32(2 / len(error)) * error)
    return error


def _by_autograd(value: ValueFunction, x: Array, ret: Array) -> Array:
    """Do the same for any network."""
    for parameter in value.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    error = value(torch.from_numpy(x)) - torch.from_numpy(ret)
    error.square().mean().backward()
    return error.detach().numpy()  # type: ignore[no-any-return]
