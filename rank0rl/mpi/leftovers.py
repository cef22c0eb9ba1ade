"""Files of dead jobs on this host, removed when the next job starts.

A supervisor locks the folder of its job for as long as it lives. So a folder that can be locked, of this user and this
host, is of a supervisor that is dead.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where no ranks are started
    fcntl = None  # type: ignore[assignment]

from rank0rl.mpi import processes

PREFIX = "rank0rl-"  # of the name of a job's folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a job's folder. It ends with this process at the latest.

    Raises:
        OSError: if another process holds it, or the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)  # children do not inherit it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """Make a folder for a job; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no locks here: it will not be found if it is left
                stack.enter_context(locked(folder))
            yield folder


def remove() -> None:
    """Remove what dead jobs of this user left on this host: their folders, and MPI's files."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, LookupError):  # it lives, or another start removes it
            if _is_ours(folder):
                with locked(folder):
                    if not processes.survivors(folder):
                        processes.remove_mpi_files(folder)
                        shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Return True if this user's supervisor on this host made the folder."""
    about = folder.lstat()
    host = (folder / "begun").read_text().split()[-1]
    return about.st_uid == os.getuid() and not folder.is_symlink() and host == platform.node()
