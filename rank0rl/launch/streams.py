"""Standard streams that a run does not depend on: what nobody reads is dropped.

A run goes on when the terminal it was started from is gone, or the pipe that it writes to, or when
the disk of the file that it writes to is full. It waits for a reader that is slow or paused, but not to end.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank0rl.launch import job, waits_for_readers

_TURN_S = 0.2
_UNREAD = (errno.EPIPE, errno.EIO)  # of a pipe without a reader; of a terminal that is gone
_FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk without room, which later writes may find


def outlast_readers() -> None:
    """Let stdout and stderr lead to the null device if they are closed, or once nobody reads them.

    A closed stream's number is taken too: else the next file that is opened would get it, and all
    that libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            null = open(os.devnull, mode)  # noqa: SIM115 # it gets the lowest number that is free
            os.set_inheritable(null.fileno(), True)
            setattr(sys, name, null)
        elif mode == "w" and stream is getattr(sys, f"__{name}__") and sys.platform != "win32":
            stream.flush()
            setattr(sys, name, _like(stream))


def keep_lines_whole() -> None:
    """Let a rank write each line to stdout at once, as at a terminal, even where Python is unbuffered.

    An unbuffered `print` writes its arguments and the newline one by one. A launcher may then put
    what other ranks write between them. (After a text of several lines it still may, before the
    last newline.) An unfinished line shows when it is flushed, or on stderr, which stays as it is.
    """
    out = sys.stdout
    if job.world_size() is not None and isinstance(out, io.TextIOWrapper) and out.write_through:
        out.reconfigure(line_buffering=True, write_through=False)


def _like(stream: Any) -> io.TextIOWrapper:
    """Return a stream to the same file that drops what nobody reads and what finds no room."""
    raw = _Lasting(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type] # python -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Lasting(io.FileIO):
    gives_up = True  # once this process has been asked to end: what nobody reads then is dropped
    _told = False  # that there is no room

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        try:
            while rest:
                if self._takes():
                    rest = rest[super().write(rest[: select.PIPE_BUF]) or 0 :]
                elif self.gives_up and not waits_for_readers():
                    break
        except OSError as error:
            if error.errno in _FULL:
                self._tell(error)
            elif error.errno in _UNREAD:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            else:
                raise
        return size

    def _takes(self) -> bool:
        """Return True if so much as a pipe takes at once can be written without waiting for a reader."""
        return bool(select.select([], [self], [], _TURN_S)[1])

    def _tell(self, error: OSError) -> None:
        """Say once on stderr that words of this stream are missing."""
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                os.write(2, f"stream {self.fileno()} loses words: {error.strerror}\n".encode())


class Relay:
    """A thread that copies what a launcher writes to stdout, and goes on when nobody reads that.

    Launchers end their job when they cannot write.

    Args:
        source: pipe that the launcher writes to.
        folder: folder of the job, for the files that come as lines among the words.
    """

    def __init__(self, source: Any, folder: Path) -> None:
        self._source, self._folder, self._over = source, folder, threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self, received: Sequence[int], grace_s: float) -> None:
        """Copy the rest, while stdout takes it. Once a signal has been received, it has so many seconds."""
        self._over.set()
        while self._thread.is_alive() and not received:
            self._thread.join(_TURN_S)
        self._thread.join(grace_s)

    def _copy(self) -> None:
        out = _Lasting(1, "w", closefd=False)
        out.gives_up = False  # this thread holds up nothing
        rest = b""
        while True:
            if select.select([self._source], [], [], _TURN_S)[0]:
                data = os.read(self._source.fileno(), 1 << 16)
                words, rest = job.take_lines(self._folder, rest + data) if data else (rest, b"")
                with contextlib.suppress(OSError):  # no other failure ends the job either
                    out.write(words)
                if not data:
                    return
            elif self._over.is_set():  # another process still has the other end
                return
