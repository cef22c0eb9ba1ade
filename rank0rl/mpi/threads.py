"""How many cores torch and BLAS use: a setting of the run, because it changes the last bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController


def set_threads(n: int) -> None:
    """Let torch and NumPy's BLAS use n threads from here on, in this process."""
    torch.set_num_threads(n)
    # Looks for libraries anew each time, as an agent's own imports may have brought another BLAS.
    ThreadpoolController().limit(limits=n)


@contextmanager
def using_threads(n: int) -> Iterator[None]:
    """Use n threads inside the `with` block, where one is used before and after it."""
    if n == 1:
        yield
        return
    set_threads(n)
    try:
        yield
    finally:
        set_threads(1)
