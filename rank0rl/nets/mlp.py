"""Fully connected networks: one memory, read by torch and by NumPy.

In torch, autograd takes the gradient of any loss; kernels take the gradients of the built-in losses.
NumPy serves for acting, a few times faster than torch at these sizes. In NumPy, a stack of one-row products (B, 1, d)
gives rows whose bits do not depend on B, which a product (B, d) does not; that is what makes a run
the same for every number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.nets.flat import Views, place

Array = npt.NDArray[Any]

Activation: TypeAlias = Literal["tanh", "relu", "elu", "silu", "gelu"]


def _elu(x: Array) -> Array:
    """Compute exp(x) - 1 below 0 by tanh, as kernels do: expm1 differs by the version of the C library."""
    half, one, two = np.float32(0.5), np.float32(1), np.float32(2)
    t = np.tanh(half * np.minimum(x, 0))
    return np.where(x > 0, x, two * t / (one - t))


def _silu(x: Array) -> Array:
    half = np.float32(0.5)
    return x * (half + half * np.tanh(half * x))


def _gelu(x: Array) -> Array:
    """Compute the form with tanh: NumPy has no erf."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": nn.functional.tanh,
    "relu": nn.functional.relu,
    "elu": nn.functional.elu,
    "silu": nn.functional.silu,
    "gelu": partial(nn.functional.gelu, approximate="tanh"),
}
_IN_NUMPY: dict[str, Callable[[Array], Array]] = {
    "tanh": lambda x: np.tanh(x, out=x),  # written over
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": _elu,
    "silu": _silu,
    "gelu": _gelu,
}


class MLP(nn.Module):
    """Fully connected layers with activations between them, orthogonal weights and zero biases.

    Args:
        sizes: number of inputs, of units in each hidden layer, and of outputs.
        rng: draws the weights.
        last_gain: scale of the last layer's weights. The hidden layers have sqrt(2).
        activation: of the hidden layers.
        layer_norm: True if each hidden layer is normalized before its activation.

    Source: Saxe et al. 2014, arXiv:1312.6120 (orthogonal); Andrychowicz et al. 2021,
    arXiv:2006.05990 (a last policy layer of 0.01).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rng: np.random.Generator,
        last_gain: float,
        activation: Activation = "tanh",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.weights = nn.ParameterList()  # (inputs, outputs) each
        self.biases = nn.ParameterList()
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            gain = last_gain if i == len(sizes) - 2 else math.sqrt(2)
            weight = nn.init.orthogonal_(torch.empty(n_in, n_out), gain, generator=torch_rng)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(n_out)))
        self.activation = activation
        self.norms = nn.ModuleList([nn.LayerNorm(n) for n in sizes[1:-1] if layer_norm])
        self._norms = [*self.norms]  # found in a tenth of the time
        self._arrays = Views(self.weights._parameters), Views(self.biases._parameters)
        self._scales = [Views(norm._parameters) for norm in self._norms]

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs (N, outputs) from inputs (N, inputs)."""
        *hidden, last = zip(self.weights, self.biases, strict=True)
        activate = _IN_TORCH[self.activation]
        for i, (weight, bias) in enumerate(hidden):
            x = torch.addmm(bias, x, weight)
            x = activate(self._norms[i](x) if self._norms else x)
        return torch.addmm(last[1], x, last[0])

    def numpy(self, x: Array) -> Array:
        """Compute outputs (..., outputs) in NumPy.

        Args:
            x: (..., inputs). The bits of a row depend only on the shape of the last two axes. Pass
                (B, 1, inputs) if they must not depend on B.
        """
        weights, biases = self._arrays
        *hidden, last = zip(weights(), biases(), strict=True)
        activate = _IN_NUMPY[self.activation]
        for i, (weight, bias) in enumerate(hidden):
            x = x @ weight
            x += bias
            if self._scales:
                scale, shift = self._scales[i]()
                x = _layer_norm(x, scale, shift, self._norms[i].eps)
            x = activate(x)
        x = x @ last[0]
        x += last[1]
        return x

    def table(self, theta: Tensor) -> Array:
        """Return where each layer lies in the flat vector theta, for kernels: see `nets.kernels.mlp`."""
        rows, kept = [], 0
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            code, norm, units = -1, [-1, -1], weight.shape[1]
            kept += units
            if i < len(self.weights) - 1:
                code = get_args(Activation).index(self.activation)
                kept += units if code else 0  # slopes, but for tanh
            if i < len(self._norms):
                norm = [place(p, theta) for p in self._norms[i].parameters()]
                kept += units + 1
            rows.append(
                [place(weight, theta), place(bias, theta), *weight.shape, code, *norm, kept]
            )
        return np.array(rows)


def _layer_norm(x: Array, scale: Array, shift: Array, eps: float) -> Array:
    """Normalize rows (..., n) as torch's LayerNorm does."""
    x = x - x.mean(axis=-1, keepdims=True)
    x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
    x *= scale
    x += shift
    return x
