"""Number of cores that torch and BLAS use: a setting, because it changes the last bits of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController


def set_threads(n: int) -> None:
    """Let torch and NumPy's BLAS use n threads from now on, in this process."""
    torch.set_num_threads(n)
    # A new controller each time, because imports of the user's code may have loaded another BLAS.
    ThreadpoolController().limit(limits=n)


@contextmanager
def using_threads(n: int) -> Iterator[None]:
    """Use n threads inside the `with` block, and one before and after it."""
    if n == 1:
        yield
        return
    set_threads(n)
    try:
        yield
    finally:
        set_threads(1)
