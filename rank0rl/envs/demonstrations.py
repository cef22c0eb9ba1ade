"""Read observations and actions to learn from, out of a Minari dataset or files of arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.agent import Space, Spaces
from rank0rl.batch import Batch, concatenate, count
from rank0rl.options import OptionError

Array = npt.NDArray[Any]

_MOST = 1 << 30  # bytes of arrays in a file
_MOST_TIMES = 20  # or this many times its size: numbers are not packed any smaller


def read(source: str, spaces: Spaces) -> Batch:
    """Return the observations and actions of demonstrations.

    Args:
        source: name of a Minari dataset on this machine, such as walker2d/ppo-v0; a file.npz with
            the arrays "obs", (N, *obs), and "act", (N, *act), which has the environment's numbers
            of choices; or a folder of such files. Batches of --keep-batches number choices from 0.
        spaces: spaces of the environment.

    Returns:
        "obs", (N, *obs), and "act", (N, *act), with the dtypes of the spaces.

    Raises:
        OptionError: if there is no such data, or it does not fit the spaces.
    """
    path = Path(source)
    parts = _files(path, spaces.act.first) if path.exists() else _minari(source)
    rows = concatenate([_checked(obs, act, spaces, source) for obs, act in parts])
    if not count(rows):
        raise OptionError(f"--data {source}: there are no rows in it")
    return rows


def _files(path: Path, first: Array | None) -> Iterator[tuple[Any, Any]]:
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise OptionError(f"--data {path}: there is no .npz file in this folder")
    for file in files:
        if not file.is_file():
            raise OptionError(f"--data {path}: {file.name} is not a regular file")
        try:
            _check_inflated(file)
            with np.load(file, allow_pickle=False) as arrays:
                obs, act, is_kept = arrays["obs"], arrays["act"], "fragment_id" in arrays
        except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise OptionError(
                f"--data {path}: {file.name} must be an .npz file with the arrays obs and act: "
                f"{error}"
            ) from None
        yield obs, act if is_kept else _from_0(act, first)


def _check_inflated(file: Path) -> None:
    """Raise ValueError for a small file that would fill the memory."""
    with zipfile.ZipFile(file) as packed:
        size = sum(each.file_size for each in packed.infolist())
    most = max(_MOST, _MOST_TIMES * file.stat().st_size)
    if size > most:
        raise ValueError(f"expected at most {most:,} bytes of arrays in this file, got {size:,}")


def _minari(name: str) -> Iterator[tuple[Any, Any]]:
    try:
        import minari
    except ModuleNotFoundError:
        raise OptionError(
            f"--data {name}: there is no such file, and no Minari to look for a dataset: pip install "
            f"'minari[hdf5]'"
        ) from None
    try:
        dataset = minari.load_dataset(name)  # of this machine: it downloads nothing unless asked to
    except Exception as error:  # whatever Minari raises for it
        raise OptionError(
            f"--data {name}: there is no such file, and no such Minari dataset here ({error}); "
            f"minari list local shows those that there are"
        ) from None
    space = dataset.action_space
    first = getattr(space, "start", None)
    if getattr(space, "low", None) is not None and space.dtype.kind in "iu":
        first = space.low  # a Box of integers: these are choices too
    try:
        episodes = [(episode.observations, episode.actions) for episode in dataset]
    except Exception as error:  # whatever h5py raises for it
        raise OptionError(f"--data {name}: the dataset cannot be read: {error}") from None
    for obs, act in episodes:
        if not isinstance(obs, np.ndarray) or not isinstance(act, np.ndarray):
            raise OptionError(f"--data {name}: observations and actions must be arrays, not dicts")
        yield obs[: len(act)], _from_0(act, first)


def _from_0(act: Any, first: Any) -> Any:
    """Return actions with choices that are numbered from 0. Those of another shape stay as they are."""
    return act - first if first is not None and act.shape[1:] == np.shape(first) else act


def _checked(obs: Any, act: Any, spaces: Spaces, source: str) -> Batch:
    """Return arrays with the dtypes of the spaces; raise OptionError if they do not fit."""
    rows = {"obs": (obs, spaces.obs), "act": (act, spaces.act)}
    for name, (array, space) in rows.items():
        sizes = array.ndim and obs.ndim and array.shape == (len(obs), *space.shape)
        if not sizes or not _fits(array, space):
            raise OptionError(
                f"--data {source}: {name!r} must be {space.dtype} {('N', *space.shape)}, of numbers "
                f"that this environment takes: got {array.dtype} {array.shape}"
            )
    return {name: array.astype(space.dtype) for name, (array, space) in rows.items()}


def _fits(array: Array, space: Space) -> bool:
    """Return True if the rows are elements of a space. Bounds of a box are not checked."""
    if space.kind == "hybrid":
        n = len(space.choices)
        return _fits(array[:, n:], space.halves()[1]) and _are(array[:, :n], space.choices)
    if not space.choices:
        with np.errstate(over="ignore"):
            cast = array.astype(space.dtype) if array.dtype.kind in "fiu" else array
        if cast.dtype.kind == "f":
            return bool(np.isfinite(cast).all())
        return array.dtype.kind in "iu" and bool((cast == array).all())
    numbers = array.reshape(len(array), len(space.choices))
    return array.dtype.kind in "iu" and _are(numbers, space.choices)


def _are(numbers: Array, choices: tuple[int, ...]) -> bool:
    """Return True if rows of numbers are choices, with so many values each."""
    whole = numbers == np.floor(numbers)
    return bool(((numbers >= 0) & (numbers < choices) & whole).all())
