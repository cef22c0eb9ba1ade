"""Layers for `act` of agents of one's own: torch modules whose rows do not depend on each other.

torch rounds a product of several rows differently from the product of one. So an agent with `nn.Linear`
in `act` has another curve for every number of ranks. Without gradients, the layers of this module compute
a stack of one-row products, whose bits do not depend on their number; with gradients, they are torch's own.
Of torch's activations, Tanh, ReLU, LeakyReLU and GELU do not depend on the number of rows; Sigmoid, SiLU,
ELU, Softplus and Mish do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """torch's Linear: from (N, inputs) to (N, outputs). Without gradients no row depends on N."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W' + b."""
        if torch.is_grad_enabled():
            return super().forward(x)
        stack = x.detach().numpy()[..., None, :] @ self.weight.detach().numpy().T
        out = torch.from_numpy(stack[..., 0, :])
        return out if self.bias is None else out + self.bias


class GRU(nn.Module):
    """One step of a gated recurrent unit: from inputs (N, inputs) and a memory (N, size) to the next one.

    Args:
        inputs: number of inputs.
        size: number of features, which are the memory.

    Source: Cho et al. 2014, arXiv:1406.1078, in the form of torch.nn.GRUCell.
    """

    def __init__(self, inputs: int, size: int) -> None:
        """Draw the weights, from torch's global generator."""
        super().__init__()
        self.of_inputs, self.of_memory = Linear(inputs, 3 * size), Linear(size, 3 * size)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the next memory."""
        r, z, n = self.of_inputs(x).chunk(3, dim=-1)
        r_h, z_h, n_h = self.of_memory(memory).chunk(3, dim=-1)
        keep = _sigmoid(z + z_h)
        new = torch.tanh(n + _sigmoid(r + r_h) * n_h)
        return new + keep * (memory - new)


def _sigmoid(x: Tensor) -> Tensor:
    """Compute torch.sigmoid, whose last few numbers of many have other bits, from tanh."""
    return 0.5 + 0.5 * torch.tanh(0.5 * x)
