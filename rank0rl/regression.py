"""Fit a value function to returns by minibatch gradient steps, in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.batch import minibatches
from rank0rl.flat import Adam
from rank0rl.nets import ValueFunction

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
    rows = {"x": x, "ret": ret / value.scale.numpy()}
    errors: list[Array] = []
    for _ in range(epochs):
        errors.clear()
        for part in minibatches(rows, minibatch_size, rng):
            val, pullback = value.numpy(part["x"])
            error = val - part["ret"]
            pullback(np.float32(2 / len(error)) * error)
            adam.step(lr)
            errors.append(error)
    return float(np.square(np.concatenate(errors)).mean())
