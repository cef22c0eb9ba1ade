"""Compile kernels with numba, and keep the compiled code in a private folder.

Numba pickles what it compiles, so the folder belongs to this user alone. Its name holds a hash of
all kernels: numba by itself misses changes in the functions that a function calls.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import scipy.linalg.cython_blas  # noqa: F401  the BLAS of compiled code
from threadpoolctl import ThreadpoolController

# A product of one thread has the same bits everywhere, and kernels have threads of their own.
ThreadpoolController().select(user_api="blas").limit(limits=1)

F = TypeVar("F", bound=Callable[..., Any])

# What LLVM may assume about floats. Infinities and nan stay what they are: checks look for them.
_ASSUME = {"contract", "reassoc", "nsz", "arcp"}


def kernel(function: F) -> F:
    """Compile a function when it is first called. It runs without Python's global lock."""
    return _compiled(function, inline="never")


def part(function: F) -> F:
    """Compile a short function anew within each kernel that calls it: that takes less time than a call."""
    return _compiled(function, inline="always")


def _compiled(function: F, inline: str) -> F:
    folder = cache_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        compiled = numba.njit(
            function,
            cache=bool(folder),
            nogil=True,
            error_model="numpy",
            fastmath=_ASSUME,
            inline=inline,
        )
    finally:
        numba.config.CACHE_DIR = before
    return compiled  # type: ignore[no-any-return]


def cache_folder() -> Path | None:
    """Return the folder of compiled code, made if need be; None if there is no private one."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
        folder = base / "rank0rl" / f"kernels-{_sources()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if private and os.access(folder, os.W_OK) else None


def _sources() -> str:
    """Return a hash of all modules in this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
