"""Claims: a run of a study is trained by the process that has claimed it, on whichever machine that is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path


def claim(folder: Path) -> Callable[[], None] | None:
    """Claim a folder for this process, at most while it lives.

    Args:
        folder: of a run, for instance. It is made if there is none.

    Returns:
        A function that gives it up; None if another process has claimed it.

    Raises:
        OSError: if the file system has no locks: two machines would train the same run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A file system that machines share knows the locks of files that are open for writing.
    file = os.open(folder / "claim", os.O_RDWR | os.O_CREAT)
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            os.close(file)
            raise OSError(
                f"a study needs a folder on a file system with locks: {folder} has none ({error}); "
                f"choose another --out"
            ) from error
    return partial(os.close, file)
