"""Turn SIGINT and SIGTERM into an exception on rank 0, between two records and never within one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """Request to end the run. It is not an `Exception`, so that user code does not swallow it."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number, for the exit code."""
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Context in which SIGINT and SIGTERM raise `Interrupted` on this rank, or are ignored.

    Args:
        ignore: True on ranks other than 0. A terminal's Ctrl-C may reach every rank, and rank 0 needs
            time to write its checkpoint before it ends the job.
    """

    def __init__(self, ignore: bool) -> None:
        """Keep the signals as they are until the context is entered."""
        self._ignore = ignore
        self._held = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        """Take over the signals."""
        handler = signal.SIG_IGN if self._ignore else self._handle
        self._before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal that comes within the `with` block until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._pending = signum
        if not self._held:
            self._held = True  # a second signal must not cut short what the first one began
            raise Interrupted(signum)
