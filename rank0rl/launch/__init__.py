"""Start and watch ranks. Only the standard library is imported in this folder.

A job has the same exit code under every MPI (docs/failures.md has the table for users):

0        success
1        an exception, or a failure that has no code of its own
2        wrong use, such as an unknown option
n        a rank has called sys.exit(n) or os._exit(n)
128 + s  signal s: 130 after Ctrl-C, 137 after SIGKILL, 143 after SIGTERM

The supervisor finds the failures of a job, and reports one for the whole job: see supervisor.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUCCESS, FAILURE, WRONG_USE = 0, 1, 2
_LONG = 20_000  # characters of a message: a traceback is shorter
_READ_S = 2.0  # for a reader, once this process has been asked to end
_asked: list[float] = []  # times at which it was


def exit_code_after(signum: int) -> int:
    """Return the exit code of a process or job that a signal has ended, as shells give it."""
    return 128 + signum


def hurry() -> None:
    """Note that this process has been asked to end: soon it waits for no reader of its output any more."""
    _asked.append(time.monotonic())


def waits_for_readers() -> bool:
    """Return True while output that nobody reads may hold this process up."""
    return not _asked or time.monotonic() < _asked[0] + _READ_S


class _Held:
    """Context in which signals raise nothing. What they would have raised comes at its end, or that of an outer one."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls_user = False
        self.claim = threading.Lock()
        """Held by a thread that ends the process: `user_code` then does not return."""
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self._error and not self.depth:
            error, self._error = self._error, None
            raise error

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Call code of the user within a record. It may never come back, so a signal may end the process meanwhile."""
        self.calls_user = True
        try:
            yield
        finally:
            with self.claim:
                self.calls_user = False

    def interrupt(self, error: BaseException) -> None:
        """Raise an error from the handler of a signal, once nothing is held."""
        if not self.depth:
            raise error
        self._error = error


held = _Held()


def how_it_ended(status: int, together: bool = True) -> str:
    """Return how a process ended, from its exit status as a shell gives it, with all other ranks or alone."""
    if status - 128 in list(signal.Signals):
        name = signal.Signals(status - 128).name
        why = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
        return f"was ended by signal {status - 128}, {name}{why}"
    return f"ended with exit code {status}" + ("" if together else " before the other ranks")


def python(*words: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a program of this Python, with this rank0rl.

    It imports nothing from the working folder before the standard library: the folder may be anybody's.
    """
    root = Path(__file__).parents[2]
    paths = [] if root.is_relative_to(sys.prefix) else [str(root)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return [sys.executable, "-P", *words], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def printable(text: str) -> str:
    """Return a text whose names, perhaps somebody's, neither write to the terminal nor fill it."""
    if len(text) > _LONG:
        text = f"{text[: _LONG // 2]} ... {text[-_LONG // 4 :]}"
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def one_line(text: object) -> str:
    """Return a text with names, perhaps somebody's, that does not pretend to be several lines."""
    return printable(str(text)).replace("\n", r"\n")


def usage_error(message: str) -> int:
    """Print a message about wrong use; return the exit code."""
    print(f"error: {printable(message)}", file=sys.stderr)
    return WRONG_USE
