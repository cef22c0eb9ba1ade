"""The folder of a run: a new one is made, and no two processes train in the same one."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from rank0rl.run.agents import short_name
from rank0rl.run.options import RunOptions


def new_folder(options: RunOptions) -> Path:
    """Make the folder of a new run.

    Raises:
        ValueError: if it cannot be made, or holds a run already.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{options.env_id.rpartition(':')[2].replace('/', '-')}-{short_name(options.algo)}"
    try:
        if options.run_dir:
            folder = Path(options.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.tmp").touch()  # it can be written to; config.toml replaces it
        else:
            Path("runs").mkdir(exist_ok=True)
            folder = _first_free(f"runs/{name}-seed{options.seed}-{stamp}")
    except OSError as error:
        raise ValueError(
            f"cannot make the run's folder: {error}; choose another --run-dir"
        ) from None
    if list(folder.glob("checkpoints/*.pt")):
        raise ValueError(f"{folder} holds a run already: choose another --run-dir, or --resume it")
    return folder


def discard(folder: Path) -> None:
    """Remove the folder of a run that has written nothing yet. One that holds anything stays."""
    with contextlib.suppress(OSError):
        (folder / "config.tmp").unlink(missing_ok=True)
        folder.rmdir()


def _first_free(name: str) -> Path:
    """Make a folder of this name, with a number after it if there is one already."""
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def lock(folder: Path, patience_s: float) -> Callable[[], None]:
    """Keep other processes from training in a run's folder, at most while this process lives.

    Args:
        folder: of the run.
        patience_s: seconds to wait for another process to end.

    Returns:
        A function that lets others train there.

    Raises:
        ValueError: if another process still has it then.
    """
    held: list[int] = []

    def unlock() -> None:
        while held:
            os.close(held.pop())

    if os.name != "posix":
        return unlock
    import fcntl

    held.append(os.open(folder, os.O_RDONLY))
    os.register_at_fork(after_in_child=unlock)  # a child may outlive this process
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            unlock()
            raise ValueError(
                f"another process is training in {folder}: wait until it ends, or choose another "
                f"--run-dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        return unlock
