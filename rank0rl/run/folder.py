"""The folder of a run: make it, lock it, and read what a run has written into it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.envs.retry import FAILURES
from rank0rl.options import apply, names
from rank0rl.run import files
from rank0rl.run.agents import short_name
from rank0rl.run.logger import read_rows
from rank0rl.run.options import RunOptions
from rank0rl.run.settings import load, starts
from rank0rl.run.trust import without_seal

_DRAFT = ".config.toml.tmp"  # the temporary name of the first file of a run
_LOCK = ".lock"


def new_folder(options: RunOptions) -> Path:
    """Make the folder of a new run. Refuse one that holds a run already."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    env = options.env_id.replace("/", "-").replace(":", "-")
    name = f"{env}-{short_name(options.algo)}"
    try:
        if options.run_dir:
            folder = Path(options.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_run(folder)
            # It can be written to; config.toml replaces it.
            files.append(folder / _DRAFT).close()
        else:
            Path("runs").mkdir(exist_ok=True)
            folder = _first_free(f"runs/{name}-seed{options.seed}-{stamp}")
        files.sync(folder.parent)  # the folder is there after a power cut
    except OSError as error:
        raise ValueError(
            f"cannot make the run's folder: {error}; choose another --run-dir"
        ) from None
    return folder


def _refuse_run(folder: Path) -> None:
    """Raise ValueError if a folder holds a run, or the record of one whose checkpoints have gone."""
    if list(folder.glob("checkpoints/*.pt")):
        raise ValueError(f"{folder} holds a run already: choose another --run-dir, or --resume it")
    if read_rows(folder):
        raise ValueError(
            f"{folder} has the record of a run, and no checkpoint to go on from: choose another --run-dir, or "
            f"remove {folder / 'progress.csv'}"
        )


def _first_free(name: str) -> Path:
    """Make a folder of this name, with a number after it if there is one already."""
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def discard(folder: Path) -> None:
    """Remove the folder of a run that has written nothing yet. One that holds anything stays."""
    with contextlib.suppress(OSError):
        for name in (_DRAFT, _LOCK):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def lock(folder: Path, patience_s: float, is_new: bool = False) -> Callable[[], None]:
    """Keep other processes from training in a folder, at most while this process lives.

    Args:
        folder: the folder.
        patience_s: seconds to wait for another process at most.
        is_new: if a run is to begin there. Another process may have begun one meanwhile.

    Returns:
        A function that ends the lock.

    Raises:
        ValueError: if another process goes on training there, or the folder holds a link, or a run where one is to
            begin, or cannot be written to.
    """
    files.check_folder(folder)
    end = time.monotonic() + patience_s
    held: list[int] = []

    def unlock() -> None:
        while held:
            os.close(held.pop())

    try:
        while (file := files.lock(folder / _LOCK)) is None:
            if time.monotonic() >= end:
                raise ValueError(
                    f"another process is training in {folder}: wait until it ends, or choose another "
                    f"--run-dir"
                )
            time.sleep(0.1)
        held.append(file)
    except OSError as error:
        if error.filename:
            raise ValueError(f"cannot train in {folder}: {error.strerror}") from None
        # a file system without locks
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=unlock)  # a child may outlive this process
    if is_new:
        try:
            _refuse_run(folder)
        except ValueError:
            unlock()
            raise
    return unlock


Array = npt.NDArray[np.float64]

_NEEDED = {"iteration", "steps", "episodes", "seconds", "return_mean", "steps_per_s"}
_NEEDED |= {"weights_sha256"}
_LAST = 1 << 63  # steps and seconds of any run are fewer
FOREIGN = (
    *(ValueError, OSError),  # whose messages say what is wrong
    *(LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
)
"""Errors of reading a folder that no run has written."""


class NoRowsError(ValueError):
    """A folder holds no run, or a run that has not finished an iteration yet."""


@dataclass(frozen=True)
class RunData:
    """The contents of a run's config.toml and progress.csv."""

    folder: Path
    """The run's folder."""
    settings: dict[str, Any]
    """All settings that are not None."""
    starts: list[dict[str, Any]]
    """One record for each start of the run, the first start first: versions, machine, command."""
    rows: list[dict[str, str]]
    """One row for each iteration, column -> text; at least one row."""

    def column(self, name: str) -> Array:
        """Return the numbers of a column, shape (rows,); NaN where the column is empty.

        Raises:
            ValueError: if the column holds text.
        """
        try:
            return np.array([float(row[name] or "nan") for row in self.rows])
        except ValueError as error:
            raise ValueError(f"{self.folder / 'progress.csv'}, column {name}: {error}") from None

    def info_columns(self) -> list[str]:
        """Return the columns of --info and of a curriculum, which lie between those of episodes and speed."""
        names = [*self.rows[0]]
        usual = {
            *["eval_return", "eval_return_std", "eval_length", "settings", "coefficients"],
            *FAILURES,
        }
        first = names.index("longest") + 1 if "longest" in names else None
        return [n for n in names[first : names.index("steps_per_s")] if first and n not in usual]


def read_run(folder: Path) -> RunData:
    """Read the settings and the rows that a run has written so far.

    Raises:
        NoRowsError: if the folder holds no run with at least one iteration.
        ValueError: if there is no such folder, or its files are not a run's.
    """
    path = folder / "progress.csv"
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}, and so no {path}: check the name")
    if not path.exists():
        raise NoRowsError(
            f"{folder} has no progress.csv: no iteration has ended yet, or it is not a run's folder, such as "
            f"runs/Walker2d-v5-ppo-seed0-..."
        )
    rows = read_rows(folder)
    if not rows:
        raise NoRowsError(f"{path} has no rows: the run has not finished an iteration yet")
    if missing := _NEEDED - rows[0].keys():
        raise ValueError(
            f"{path} was not written by rank0rl: it has no column {', '.join(sorted(missing))}"
        )
    file = folder / "config.toml"
    settings = without_seal(load(file))
    if missing := {"env_id", "algo", "seed", "total_steps"} - settings.keys():
        raise ValueError(
            f"config {file} is not of a run: it has no setting {', '.join(sorted(missing))}"
        )
    own = names(RunOptions, in_file=True)
    apply({k: v for k, v in settings.items() if k in own}, RunOptions(), source=str(file))
    run = RunData(folder, settings, starts(file), rows)
    for name in ("steps", "seconds"):
        values = run.column(name)
        if not ((values > 0) & (values < _LAST)).all():
            raise ValueError(f"{path}, column {name}: expected numbers above 0 in every row")
    return run


def differing(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each run, its own values of the settings that are not the same in all runs."""
    names = [
        name
        for name in sorted(set().union(*settings))
        if any(one.get(name) != settings[0].get(name) for one in settings)
    ]
    return [{name: one[name] for name in names if name in one} for one in settings]
