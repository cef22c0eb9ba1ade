"""Turn signals into an exception on rank 0, between two records and never within one.

A scheduler may signal every process of a job, or some. Rank 0 acts at once. Another rank keeps the
signal, and the next exchange of all ranks tells rank 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rank0rl.launch import job

received: list[int] = []
"""Signals that this rank has received since the run began, and leaves to rank 0."""


class Interrupted(BaseException):
    """Request to end the run. It is not an `Exception`, so that user code does not swallow it."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number, for the exit code."""
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Context in which SIGINT, SIGTERM and SIGUSR1 raise `Interrupted` on rank 0.

    Args:
        keep: True on ranks other than 0, which keep the signal for `received`. They ignore SIGINT: a
            terminal's Ctrl-C may reach every rank, and rank 0 too.
    """

    def __init__(self, keep: bool) -> None:
        """Keep the signals as they are until the context is entered."""
        self._keeps = keep
        self._held = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        """Take over the signals."""
        received.clear()
        handle = self._keep if self._keeps else self._handle
        handlers: dict[int, Any] = dict.fromkeys(job.END_SIGNALS, handle)
        handlers[signal.SIGINT] = signal.SIG_IGN if self._keeps else handle
        self._before = {s: signal.signal(s, handler) for s, handler in handlers.items()}
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

    def _keep(self, signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
