"""Fit a value function to returns by minibatch gradient steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rank0rl.batch import minibatches
from rank0rl.learners import ALONE, Learners
from rank0rl.nets._nets import ConvNet, ValueFunction
from rank0rl.nets.flat import Adam

Array = npt.NDArray[Any]


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
    learners: Learners = ALONE,
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
        minibatch_size: rows of one gradient step, of all learners.
        learners: each with as many rows.

    Returns:
        The mean squared error over the last epoch, as it went.
    """
    gradient = _by_autograd if isinstance(value.mlp, ConvNet) else _in_closed_form
    rows = {"x": x, "ret": ret / value.scale.numpy()}
    errors: list[Array] = []
    for _ in range(epochs):
        errors.clear()
        for part in minibatches(rows, learners.share(minibatch_size), rng):
            errors.append(gradient(value, **part))
            learners.average_grads(adam.flat)
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
