"""A layer that remembers: GRU or LSTM, over chunks of an episode in torch and step by step in NumPy.

Source: Cho et al. 2014, arXiv:1406.1078 (GRU); Hochreiter and Schmidhuber 1997 (LSTM), with a forget
bias of 1 (Gers et al. 2000); in the forms of torch.nn.GRU and torch.nn.LSTM.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.nets.mlp import View

Array = npt.NDArray[Any]

Cell: TypeAlias = Literal["gru", "lstm"]


class Recurrent(nn.Module):
    """From observations and a memory to features and the next memory.

    A GRU's memory is its features. An LSTM's is its features and its cells.

    Args:
        cell: "gru" or "lstm".
        inputs: number of inputs.
        size: number of features.
        rng: draws the weights, orthogonal.
    """

    def __init__(self, cell: Cell, inputs: int, size: int, rng: np.random.Generator) -> None:
        """Draw the weights."""
        super().__init__()
        self.size, self._is_lstm = size, cell == "lstm"
        self.memory = 2 * size if self._is_lstm else size
        """Numbers in a memory."""
        self.layer: Any = (nn.LSTM if self._is_lstm else nn.GRU)(inputs, size, batch_first=True)
        self._views = [
            View(self.layer._parameters, name) for name, _ in self.layer.named_parameters()
        ]
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        for name, parameter in self.layer.named_parameters():
            if name.startswith("weight"):
                for gate in torch.split(parameter.data, size):
                    nn.init.orthogonal_(gate, generator=torch_rng)
            else:
                nn.init.zeros_(parameter)
                if name == "bias_ih_l0" and self._is_lstm:
                    parameter.data[size : 2 * size] = 1.0  # remember at first

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Compute the features (n, L, size) of chunks (n, L, inputs) that begin with memory (n, m)."""
        before: Any = memory[None]
        if self._is_lstm:
            before = tuple(part.contiguous() for part in before.split(self.size, dim=2))
        return self.layer(x, before)[0]  # type: ignore[no-any-return]

    def step(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the next memory (N, m) for inputs (N, inputs) and memory (N, m). It begins with the features."""
        layer = self.layer
        by_x = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
        by_h = nn.functional.linear(memory[:, : self.size], layer.weight_hh_l0, layer.bias_hh_l0)
        if self._is_lstm:
            i, f, g, o = (by_x + by_h).chunk(4, dim=1)
            cells = torch.sigmoid(f) * memory[:, self.size :] + torch.sigmoid(i) * torch.tanh(g)
            return torch.cat([torch.sigmoid(o) * torch.tanh(cells), cells], dim=1)
        r, z, n = by_x.chunk(3, dim=1)
        r_h, z_h, n_h = by_h.chunk(3, dim=1)
        keep = torch.sigmoid(z + z_h)
        new = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
        return new + keep * (memory - new)

    def numpy(self, x: Array, memory: Array) -> Array:
        """Return what `step` does, in NumPy. No row depends on how many there are."""
        w_x, w_h, b_x, b_h = (view() for view in self._views)
        by_x = (x[:, None, :] @ w_x.T)[:, 0] + b_x
        by_h = (memory[:, None, : self.size] @ w_h.T)[:, 0] + b_h
        if self._is_lstm:
            i, f, g, o = np.split(by_x + by_h, 4, axis=1)
            cells = _sigmoid(f) * memory[:, self.size :] + _sigmoid(i) * np.tanh(g)
            return np.concatenate([_sigmoid(o) * np.tanh(cells), cells], axis=1)
        r, z, n = np.split(by_x, 3, axis=1)
        r_h, z_h, n_h = np.split(by_h, 3, axis=1)
        keep = _sigmoid(z + z_h)
        new = np.tanh(n + _sigmoid(r + r_h) * n_h)
        return new + keep * (memory - new)  # type: ignore[no-any-return]


def _sigmoid(x: Array) -> Array:
    return np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x)  # type: ignore[no-any-return]
