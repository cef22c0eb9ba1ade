"""Fit a value function to returns by minibatch gradient steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rank0rl.batch import minibatches
from rank0rl.nets.flat import Adam
from rank0rl.nets.mlp import has_kernels
from rank0rl.nets.value import ValueFunction

Array = npt.NDArray[Any]


class ValueFit:
    """Minimizes E[(V - R)^2], with R in units of the value function's scale.

    Args:
        value: the value function, flat, with gradients in place.
        adam: the optimizer of its parameters.
        threads: number of threads; the results do not depend on it.
    """

    def __init__(self, value: ValueFunction, adam: Adam, threads: int) -> None:
        """Compile the gradient steps if the network is an MLP, or load them from the cache."""
        self._value = value
        self._steps: Any = _AutogradFit(value, adam)
        if has_kernels(value):
            from rank0rl.nets.compiled import CompiledFit  # the compiler, which only rank 0 needs

            self._steps = CompiledFit(value, adam, threads)
            self._steps.compile()

    def __call__(
        self,
        x: Array,
        ret: Array,
        rng: np.random.Generator,
        *,
        lr: float,
        epochs: int,
        minibatch_size: int,
    ) -> float:
        """Make the gradient steps.

        Args:
            x: inputs, (N, inputs).
            ret: returns in units of reward, (N,).
            rng: draws the order of rows.
            lr: Adam's step size.
            epochs: passes over the rows.
            minibatch_size: rows per gradient step.

        Returns:
            Mean squared error over the last epoch, each minibatch's from before its step.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        ret, error = ret / self._value.scale.numpy(), np.empty(0)
        for _ in range(epochs):
            error = self._steps.epoch(x, ret, minibatch_size, rng, lr)
        return float(np.square(error).mean())


class _AutogradFit:
    """Does what `CompiledFit` does, for any network."""

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
