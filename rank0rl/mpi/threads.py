"""Number of threads of torch and BLAS. It changes the last bits of results, so training uses one."""

from __future__ import annotations

import torch
from threadpoolctl import ThreadpoolController


def set_threads(n: int) -> None:
    """Let torch and NumPy's BLAS use n threads from now on, in this process."""
    torch.set_num_threads(n)
    # A new controller each time, because imports of the user's code may have loaded another BLAS.
    ThreadpoolController().limit(limits=n)
