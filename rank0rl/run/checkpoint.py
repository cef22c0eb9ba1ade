"""The state of a run at an iteration boundary, in files that are complete or absent and never run code.

A file is a line that names the format, the SHA-256 of what follows, and a nested dict of tensors,
numbers and strings as `torch.save` writes it, read back with `weights_only=True`. A run's files are
numbered by iteration; the last few are kept.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FORMAT = "rank0rl checkpoint"
_VERSION = 4


class NotSaved(Exception):
    """A checkpoint could not be written; the message says why, and what there still is."""


def snapshot(value: Any, name: str = "") -> Any:
    """A copy of nested dicts and lists of tensors, arrays, numbers and strings; arrays become tensors.

    Raises:
        TypeError: for anything else, since it could not be saved without running code on loading.
    """
    if isinstance(value, Mapping):
        return {_plain(key, name): snapshot(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    return _plain(value.item() if isinstance(value, np.generic) else value, name)


def _plain(value: Any, name: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, arrays, numbers and strings, in dicts and lists: got "
        f"{type(value).__name__} in {name.lstrip('.') or 'its state'!r}"
    )


def first_difference(a: Any, b: Any) -> str | None:
    """Where two snapshots differ first, bit for bit; None if they do not."""
    mine, other = dict(_leaves(a, "")), dict(_leaves(b, ""))
    differ = (name for name in {**mine, **other} if mine.get(name) != other.get(name))
    return next(differ, None)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Name and bytes, or text, of everything in a snapshot."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield name, len(value)
        for key, item in items:
            yield from _leaves(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, torch.Tensor):
        raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, (value.dtype, value.shape, raw)
    else:
        yield name, repr(value)


def save(run: Path, iteration: int, state: Mapping[str, Any], keep: int) -> None:
    """Write the state of an iteration boundary, then drop all but the run's last files.

    Args:
        run: the run's folder.
        iteration: the number of iterations made.
        state: what `snapshot` gave.
        keep: how many files to keep, this one included.

    Raises:
        NotSaved: if it cannot be written, as on a full disk.
    """
    _save(run, f"{iteration:08d}.pt", state)
    for old in _files(run)[:-keep]:
        old.unlink()


def save_best(run: Path, state: Mapping[str, Any]) -> None:
    """Write the state of the boundary at which the run's evaluation was best so far.

    Raises:
        NotSaved: if it cannot be written.
    """
    _save(run, "best.pt", state)


def _save(run: Path, name: str, state: Mapping[str, Any]) -> None:
    path = _folder(run) / name
    try:
        path.parent.mkdir(exist_ok=True)
        write(path, state)
    except OSError as error:
        before = _files(run)
        there = f"the last complete one is {before[-1]}" if before else "there is none before it"
        raise NotSaved(f"cannot write checkpoint {path}: {error.strerror}; {there}") from error


def latest(run: Path) -> Path:
    """The file of a run's last boundary; if `run` is a file, that one.

    Raises:
        ValueError: if there is none.
    """
    if run.suffix == ".pt":
        return run
    files = _files(run)
    if not files:
        raise ValueError(
            f"cannot read a checkpoint: there is none in {_folder(run)}; name the folder of a run"
        )
    return files[-1]


def before(run: Path, iteration: int) -> Path | None:
    """The file of a run's last boundary with at most so many iterations, if there still is one."""
    files = [file for file in _files(run) if int(file.stem) <= iteration]
    return files[-1] if files else None


def _folder(run: Path) -> Path:
    return run / "checkpoints"


def _files(run: Path) -> list[Path]:
    """The complete ones, in order."""
    return sorted(f for f in _folder(run).glob("*.pt") if f.stem.isdecimal())


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state: to a temporary name, flushed, then renamed over the file that was there."""
    memory = io.BytesIO()
    torch.save(state, memory)
    payload = memory.getvalue()
    head = f"{_FORMAT} {_VERSION}\n{hashlib.sha256(payload).hexdigest()}\n"
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(head.encode() + payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise


def read(path: Path) -> dict[str, Any]:
    """Read a state.

    Raises:
        ValueError: if there is no file, or it is no complete checkpoint of this format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read checkpoint {path}: {error.strerror}") from None
    head, _, rest = data.partition(b"\n")
    digest, _, payload = rest.partition(b"\n")
    name, _, version = head[:100].decode(errors="replace").rpartition(" ")
    if name != _FORMAT or not version.isdecimal():
        raise ValueError(
            f"{path} is no checkpoint, or one cut short: expected it to begin with {_FORMAT!r}"
        )
    if int(version) != _VERSION:
        raise ValueError(
            f"checkpoint {path} has format {version}, and this version of rank0rl reads format "
            f"{_VERSION}: go on with the version that wrote it (config.toml names it)"
        )
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError(
            f"checkpoint {path} is damaged: its contents do not match its SHA-256; remove it to go "
            f"on from the one before it"
        )
    try:
        return torch.load(io.BytesIO(payload), weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # torch's own words advise to load it without this safety
        raise ValueError(
            f"checkpoint {path} holds what cannot be loaded without running code from it "
            f"({type(error).__name__}): it was not written by rank0rl"
        ) from None
