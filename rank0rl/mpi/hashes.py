"""Hashes that show whether two ranks, or two runs, have the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]


def sha256_arrays(arrays: Mapping[str, Array]) -> str:
    """Return a hash of names, dtypes, shapes and bytes. The order of the names does not matter."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        if array.size:  # an empty array's memory cannot be cast
            digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def sha256_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and bytes, in the order of the mapping."""
    import torch  # here, because ranks that have no tensors need not wait for it to load

    digest = hashlib.sha256()
    for name, t in tensors.items():
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256_each(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name and the hash of each tensor. The name does not enter its hash."""
    return {name: sha256_tensors({"0": t}) for name, t in tensors.items()}
