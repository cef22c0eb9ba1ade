"""Turn signals into an exception on rank 0, between two records and never within one.

A scheduler may signal every process of a job, or some. Rank 0 acts at once. Another rank keeps the
signal, and the next exchange of all ranks tells rank 0.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rank0rl.launch import FAILURE, exit_code_after, held, hurry, job
from rank0rl.mpi import comm

_STUCK_S = 5.0  # for the main thread to see a signal
_AGAIN_S = 0.01  # until a signal is sent again, after a `__del__`
_CLOSE_S = 5.0  # for environments to be closed after an error or a signal
_LAST_S = 7.0  # for hooks to be closed, and last words, after a signal; the supervisor gives it a second more

received: list[int] = []
"""Signals that this rank has received since the run began, and leaves to rank 0."""


class Interrupted(BaseException):
    """Request to end the run. It is not an `Exception`, so that user code does not swallow it."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number, for the exit code."""
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def closed(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` at the end. After an error or a signal it has some seconds, then this rank ends without."""
    try:
        yield
    except BaseException as error:
        limit = threading.Timer(_CLOSE_S, end, [error])
        limit.daemon = True
        limit.start()
        try:
            close()
        finally:
            limit.cancel()
        raise
    close()


def end(error: BaseException) -> None:
    """End this rank, and with it the job, with the report and the exit code that belong to an error."""
    code = FAILURE
    if isinstance(error, Interrupted):
        code = exit_code_after(error.signum)
        if not comm.get_rank():
            comm.stop(code)  # which is no failure
    elif isinstance(error, KeyboardInterrupt):
        code = exit_code_after(signal.SIGINT)
        job.fail(code, "interrupted")
        os._exit(code)  # what other ranks wait for will not come
    elif isinstance(error, SystemExit):  # some code of the user's ended this rank
        code = error.code if isinstance(error.code, int) and error.code else FAILURE
        job.fail(code, f"rank {comm.get_rank()} called sys.exit({error.code!r})")
    elif isinstance(error, job.Failure):
        job.fail(code, f"error: {error}")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    comm.abort(code)


class Interrupts:
    """Context in which SIGINT, SIGTERM and SIGUSR1 raise `Interrupted` on rank 0.

    With `stuck`, SIGTERM and SIGUSR1 do not end rank 0 after it either, before `give_back` is called: there are last
    words to say, whether a signal, an error or the end of the run was the reason. They have some seconds.

    Args:
        stuck: called with the signal if the main thread of rank 0 has not acted on it for some seconds, because
            it is in a call of C, or in a hook. It is to end the process.
        keep: True on ranks other than 0, which keep the signal for `received` until rank 0 has saved. They
            ignore SIGINT: a terminal's Ctrl-C may reach every rank, and rank 0 too.
    """

    def __init__(self, keep: bool, stuck: Callable[[int], None] | None = None) -> None:
        """Keep the signals as they are until the context is entered."""
        self._keeps, self._stuck = keep, stuck
        self._taken = self._hearing = False
        self._pending: int | None = None
        self._limit: threading.Timer | None = None
        self._originals: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Take over the signals."""
        received.clear()
        handle = self._keep if self._keeps else self._handle
        handlers: dict[int, Any] = dict.fromkeys(job.END_SIGNALS, handle)
        handlers[signal.SIGINT] = signal.SIG_IGN if self._keeps else handle
        self._report, sys.unraisablehook = sys.unraisablehook, self._hear
        self._before = {s: signal.signal(s, handler) for s, handler in handlers.items()}
        self._originals = self._before
        if self._stuck:
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._wakeup = theirs, signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=[ours, self._stuck], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Raise nothing any more. A second Ctrl-C ends this process."""
        if self._stuck:
            theirs, before = self._wakeup
            signal.set_wakeup_fd(before)
            theirs.close()  # the thread ends
        for signum, handler in self._before.items():
            lasts = self._stuck and signum in job.END_SIGNALS
            signal.signal(signum, self._late if lasts else handler)
        self._before = {}
        if sys.unraisablehook == self._hear:
            sys.unraisablehook = self._report

    def give_back(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Give the signals back after the last words. After `Interrupted`, the environments are closed first."""
        if self._limit:
            self._limit.cancel()
        if not isinstance(error, Interrupted):
            for signum, handler in self._originals.items():
                signal.signal(signum, handler)

    def _late(self, signum: int, _frame: FrameType | None) -> None:
        if self._limit is None:
            hurry()
            self._limit = threading.Timer(_LAST_S, end, [Interrupted(signum)])
            self._limit.daemon = True
            self._limit.start()

    def _watch(self, received: socket.socket, stuck: Callable[[int], None]) -> None:
        """Wait for signals in a thread, which C functions of the main thread do not hold up if they release the GIL."""
        with received:
            while signums := received.recv(1):
                if signums[0] in self._before:
                    time.sleep(_STUCK_S)
                    with held.claim:
                        unseen = self._pending is None and not held.depth
                        if self._before and (unseen or held.calls_user):
                            self._taken = True
                            stuck(signums[0])

    def _hear(self, dropped: Any) -> None:
        """Send a signal again that came in a `__del__`, where Python drops what is raised."""
        if isinstance(dropped.exc_value, Interrupted):
            self._hearing = True
            threading.Timer(_AGAIN_S, self._send_again, [dropped.exc_value.signum]).start()
            self._hearing = False
        else:
            self._report(dropped)

    def _send_again(self, signum: int) -> None:
        while self._hearing:  # what is raised there is dropped too
            time.sleep(_AGAIN_S)
        if self._before:  # else the run has ended meanwhile
            self._pending = None
            signal.pthread_kill(threading.main_thread().ident or 0, signum)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        while self._taken:  # the other thread saves, and ends this process
            time.sleep(_STUCK_S)
        hurry()
        received.append(signum)  # for the next exchange: user code may swallow what is raised
        first, self._pending = self._pending is None, signum
        if first:  # a second one must not cut short what the first one began
            held.interrupt(Interrupted(signum))

    def _keep(self, signum: int, _frame: FrameType | None) -> None:
        if job.is_ending():
            held.interrupt(Interrupted(signum))
        received.append(signum)
