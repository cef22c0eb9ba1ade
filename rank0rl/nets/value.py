"""A value function, and fitting it to returns by minibatch gradient steps."""

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
    """An MLP that predicts returns in units of their standard deviation.

    So the loss has the same size whatever the rewards are, and the scale is learned on rank 0 alone.
    It is a scale without a shift: returns that hardly vary around a large number are learned slowly.

    Args:
        shape: (inputs,), or that of an image.
        hidden: units of each hidden layer.
        rng: for the weights.
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
        """Values in units of the scale, (N,), of inputs (N, inputs)."""
        return self.mlp(x)[:, 0]  # type: ignore[no-any-return]

    def predict(self, x: Array) -> Array:
        """Values in units of reward, (N,), of inputs (N, inputs), on NumPy arrays."""
        return self.mlp.numpy(x)[-1][:, 0] * self.scale.numpy()  # type: ignore[no-any-return]

    def numpy(self, x: Array) -> tuple[Array, Callable[[Array], None]]:
        """As `forward`, on NumPy arrays; and what takes d loss / d values, (N,), to gradients."""
        layers = self.mlp.numpy(x)
        return layers[-1][:, 0], lambda by_value: self.mlp.backward(layers, by_value[:, None])

    def merge(self, ret: Array) -> None:
        """Add returns, (N,) to the statistics; predictions in units of reward stay what they were.

        Those who update only. Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2.2.
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
    """Least squares, E[(V - R)^2], with R in units of the value function's scale.

    Args:
        value: flat, with gradients in place.
        adam: over its parameters.
        x: inputs, (N, inputs).
        ret: returns in units of reward, (N,).
        rng: for the order of rows.
        lr: Adam's step size.
        epochs: passes over the rows.
        minibatch_size: rows of one gradient step.

    Returns:
        The mean squared error over the last epoch, as it went.
    """
    gradient = _by_autograd if isinstance(value.mlp, ConvNet) else _in_closed_form
    rows = {"x": x, "ret": ret / value.scale.numpy()}
    errors: list[Array] = []
    for _ in range(epochs):
        errors.clear()
        for part in minibatches(rows, minibatch_size, rng):
            errors.append(gradient(value, **part))
            adam.step(lr)
    return float(np.square(np.concatenate(errors)).mean())


def _in_closed_form(value: ValueFunction, x: Array, ret: Array) -> Array:
    """Errors (n,) of a minibatch; their mean square's gradient is left in place."""
    val, pullback = value.numpy(x)
    error: Array = val - ret
    pullback(np.float32(2 / len(error)) * error)
    return error


def _by_autograd(value: ValueFunction, x: Array, ret: Array) -> Array:
    """The same for any network."""
    for parameter in value.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    error = value(torch.from_numpy(x)) - torch.from_numpy(ret)
    error.square().mean().backward()
    return error.detach().numpy()  # type: ignore[no-any-return]
