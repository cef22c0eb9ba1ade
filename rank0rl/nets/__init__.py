"""Networks, policies, value functions, normalizers, optimizers. No MPI, no files.

MKL, which is part of torch, chooses its code for square roots and inverse trigonometric functions by the type
of CPU, even where it is told not to. With --cpu portable, NumPy computes these functions of torch. MKL's
products are then slow, so NumPy computes the large ones of an update.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, library, nn

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


_IS_PORTABLE = os.environ.get("MKL_CBWR") == "COMPATIBLE"
_LARGE = 2**18
"""Multiplications of a product from which on NumPy takes less time. A call of it takes 10 us more."""


@contextmanager
def numpy_products(net: nn.Module, rows: int) -> Iterator[None]:
    """Let NumPy compute torch's products of a network and so many rows, in this thread, if they are large.

    MKL would take up to three times as long.
    """
    sizes = [p.numel() for p in net.parameters() if p.ndim == 2]
    if not (_IS_PORTABLE and sizes and rows * sum(sizes) >= _LARGE * len(sizes)):
        yield
        return
    thread, known = threading.get_ident(), (torch.float32, torch.float64)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        if threading.get_ident() != thread or not a.dtype == b.dtype in known:
            return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
        return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if beta == alpha == 1:
            return mm(a, b).add_(c)
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))

    with library._scoped_library("aten", "IMPL") as of_torch:
        of_torch.impl("mm", mm, "CPU")
        of_torch.impl("addmm", addmm, "CPU")
        yield


if _IS_PORTABLE:
    _torch: Any = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a function is replaced
        for _name, _function in _BY_NUMPY.items():
            _replace(_torch, _name, _function)
