"""Networks, policies, value functions, normalizers, optimizers. No MPI, no files.

MKL, which is part of torch, computes these functions by code that it chooses by the type of CPU, even where
it is told not to. With --cpu portable, NumPy computes them, in torch too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, library

_BY_NUMPY = {"sqrt": np.sqrt, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan}
_torch: Any = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Let NumPy compute a function of torch's on the CPU: new, in place, and in a tensor that is given."""
    kept = {torch.float64, torch.complex64, torch.complex128}
    if name == "sqrt":  # others are rounded once more, from float64
        kept.add(torch.float32)

    def compute(x: Tensor) -> Tensor:
        numbers = x.detach() if x.is_floating_point() or x.is_complex() else x.float()
        exact = numbers if numbers.dtype in kept else numbers.double()
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(function(exact.numpy()))).to(numbers.dtype)

    def out(x: Tensor, *, out: Tensor) -> Tensor:
        return out.resize_(x.shape).copy_(compute(x))

    _torch.impl(name, compute, "CPU")
    _torch.impl(f"{name}_", lambda x: x.copy_(compute(x)), "CPU")
    _torch.impl(f"{name}.out", out, "CPU")


if os.environ.get("MKL_CBWR") == "COMPATIBLE":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a function is replaced
        for _name, _function in _BY_NUMPY.items():
            _replace(_name, _function)
