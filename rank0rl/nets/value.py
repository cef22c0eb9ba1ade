"""The value function, in units of the standard deviation of returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.nets.conv import Hidden, network
from rank0rl.nets.normalize import Moments

Array = npt.NDArray[Any]


class ValueFunction(nn.Module):
    """A network that predicts returns in units of their standard deviation.

    The loss then has the same size whatever the rewards are. Rank 0 alone learns the scale. It is a
    scale without a shift: returns that hardly vary around a large number are learned slowly.

    To learn returns, call `merge(ret)` first. The targets of `forward` are then `ret / scale`.

    Args:
        shape: (inputs,), or the shape of an image.
        hidden: units of each hidden layer, or a network of one's own.
        rng: draws the weights.
        layers: "activation", "layer_norm" and "columns" of the network, see `conv.network`.
    """

    in_kernels = True
    scale: Tensor

    def __init__(
        self, shape: Sequence[int], hidden: Hidden, rng: np.random.Generator, **layers: Any
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.mlp = network(shape, hidden, 1, rng, 1.0, **layers)
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

        (A network of one's own whose last layer is not linear predicts other values until it has learned.)

        Rank 0 only: its weights are broadcast.

        Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2.2.
        """
        self.moments.merge(ret)
        scale = torch.sqrt(self.moments.var + 1e-8).to(torch.float32)
        with torch.no_grad():
            for last in (*self.mlp.weights[-1:], *self.mlp.biases[-1:]):
                last.mul_(self.scale / scale)
        self.scale.copy_(scale)
