"""The state of a run, in one file that is complete or absent, and that never runs code.

The file is a line that names the format, the SHA-256 of what follows, and a nested dict of tensors,
numbers and strings as `torch.save` writes it, read back with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FORMAT = b"rank0rl checkpoint 1\n"
NAME = "checkpoint.pt"


def snapshot(value: Any) -> Any:
    """A copy of nested dicts and lists of tensors, arrays, numbers and strings; arrays become tensors.

    Raises:
        TypeError: for anything else, since it could not be saved without running code on loading.
    """
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, arrays, numbers and strings, in dicts and lists: got "
        f"{type(value).__name__}"
    )


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state: to a temporary name, flushed, then renamed over the file that was there."""
    memory = io.BytesIO()
    torch.save(state, memory)
    payload = memory.getvalue()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(_FORMAT + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a state.

    Raises:
        ValueError: if there is no file, or it is no complete checkpoint of this format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read checkpoint {path}: {error.strerror}") from None
    head, digest, payload = data[: len(_FORMAT)], *_split(data[len(_FORMAT) :])
    if head != _FORMAT:
        raise ValueError(
            f"{path} is no checkpoint that this version reads: expected it to begin with "
            f"{_FORMAT.decode().strip()!r}"
        )
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError(f"checkpoint {path} is damaged: its contents do not match its SHA-256")
    return torch.load(io.BytesIO(payload), weights_only=True)  # type: ignore[no-any-return]


def _split(data: bytes) -> tuple[bytes, bytes]:
    digest, _, payload = data.partition(b"\n")
    return digest, payload
