"""Files of dead jobs on this host, removed when the next job starts.

A supervisor locks the folder of its job for as long as it lives. So a folder that can be locked, of this user and this
host, is of a supervisor that is dead.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where no ranks are started
    fcntl = None  # type: ignore[assignment]

from rank0rl.mpi import processes

PREFIX = "rank0rl-"  # of the name of a job's folder
_BEGUN_BYTES = 1000  # more than two numbers and the longest name of a host


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
        # It lives, another start removes it, or it is no folder of a job.
        with contextlib.suppress(OSError, LookupError, ValueError):
            if _is_ours(folder):
                with locked(folder):
                    if not processes.survivors(folder):
                        processes.remove_mpi_files(folder)
                        shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Return True if this user's supervisor on this host made the folder."""
    about = folder.lstat()  # first: nothing that another user put there is opened
    return (
        stat.S_ISDIR(about.st_mode)
        and about.st_uid == os.getuid()
        and _host(folder / "begun") == platform.node()
    )


def _host(begun: Path) -> str:
    """Return the host of the supervisor that wrote this file; "" if it is no regular file."""
    descriptor = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
    with open(descriptor, "rb") as file:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(_BEGUN_BYTES).decode().split()[-1] if regular else ""
