"""Number of threads of torch and BLAS. It changes the last bits of results, so training uses one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController


def set_threads(n: int, raises: bool = True) -> None:
    """Let torch and NumPy's BLAS use n threads from now on; if not `raises`, what uses fewer stays at that."""
    torch.set_num_threads(n if raises else min(n, torch.get_num_threads()))
    # A new controller each time, because imports of the user's code may have loaded another BLAS.
    for library in ThreadpoolController().lib_controllers:
        library.set_num_threads(n if raises else min(n, library.num_threads))


def blas() -> str:
    """Return the name and version of each BLAS in this process, and the CPU that its code is for.

    That of torch is not among them if it is built into torch.
    """
    found = ThreadpoolController().select(user_api="blas").info()
    names = ("internal_api", "version", "architecture")
    return ", ".join(sorted({" ".join(str(one.get(n) or "") for n in names) for one in found}))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let them use one thread within the `with` block, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadpoolController().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
