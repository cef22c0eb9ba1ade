"""Networks, policies, value functions, normalizers, optimizers. No MPI, no files.

MKL, which is part of torch, chooses its code for square roots and inverse trigonometric functions by the type
of CPU, even where it is told not to. With --cpu portable, NumPy computes these functions of torch.
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


def _replace(of_torch: Any, name: str, function: Callable[..., Any]) -> None:
    """Let NumPy compute a function of torch's on the CPU: new, in place, and in a tensor that is given."""
    kept = {torch.float64, torch.complex64, torch.complex128}
    if name == "sqrt":  # others are rounded once more, from float64
        kept.add(torch.float32)

    def compute(x: Tensor) -> Tensor:
        is_number = x.is_floating_point() or x.is_complex()
        numbers = x.detach() if is_number else x.to(torch.get_default_dtype())
        wide = torch.complex64 if x.is_complex() else torch.float64
        exact = numbers if numbers.dtype in kept else numbers.to(wide)
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(function(exact.numpy()))).to(numbers.dtype)

    def out(x: Tensor, *, out: Tensor) -> Tensor:
        if not torch.can_cast(x.dtype if x.is_floating_point() else torch.float32, out.dtype):
            raise RuntimeError(f"the result of {name} can't be cast to {out.dtype}")
        return (out if out.shape == x.shape else out.resize_(x.shape)).copy_(compute(x))

    of_torch.impl(name, compute, "CPU")
    of_torch.impl(f"{name}_", lambda x: out(x, out=x), "CPU")
    of_torch.impl(f"{name}.out", out, "CPU")


IS_PORTABLE = os.environ.get("MKL_CBWR") == "COMPATIBLE"

if IS_PORTABLE:
    _torch: Any = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a function is replaced
        for _name, _function in _BY_NUMPY.items():
            _replace(_torch, _name, _function)
