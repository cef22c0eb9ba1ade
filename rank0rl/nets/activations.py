"""Activations of hidden layers, in torch and in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

Array = npt.NDArray[Any]

Activation: TypeAlias = Literal["tanh", "relu", "elu", "silu"]


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _silu(x: Array) -> Array:
    half = np.float32(0.5)
    return x * (half + half * np.tanh(half * x))  # type: ignore[no-any-return]


IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": nn.functional.tanh,
    "relu": nn.functional.relu,
    "elu": nn.functional.elu,
    "silu": nn.functional.silu,
}
IN_NUMPY: dict[str, Callable[[Array], Array]] = {
    "tanh": lambda x: np.tanh(x, out=x),  # written over
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": _elu,
    "silu": _silu,
}
