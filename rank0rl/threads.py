"""How many cores torch and BLAS use: a setting of the run, because it changes the last bits."""

from __future__ import annotations

from functools import cache

import torch
from threadpoolctl import ThreadpoolController


def set_threads(n: int) -> None:
    """Let torch and NumPy's BLAS use n threads from here on, in this process."""
    torch.set_num_threads(n)
    _controller().limit(limits=n)


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # looks through all loaded libraries: once is enough
