"""The place of every rank in the order of collectives: written by the rank, read by the supervisor."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rank0rl.mpi import job

END = "the end of the script"  # name of what a rank waits in when its script is over
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # rank0rl/, all of it
_SLOTS = 32  # last collectives of each rank that are kept
_SLOT = 160  # bytes of a collective's name and the line that called it
_HEAD = struct.Struct("<qq")  # number of collectives entered; 1 while it waits in the last one


@dataclass(frozen=True)
class Place:
    """A rank's place in the order of collectives, as the supervisor sees it."""

    count: int
    """Number of collectives that it has entered."""
    waits: bool
    """True while it waits in the last one."""
    names: Mapping[int, str]
    """Number -> name of the last collectives that it has entered."""
    where: str
    """File and line of the user's code that called the last one."""


class Recorder:
    """Records which collective this rank waits in: a write to memory, without a system call.

    Nothing is written for a collective that is over at once.
    """

    def __init__(self) -> None:
        """Map this rank's file, if there is a supervisor."""
        self._count = self._written = 0
        self._names = [""] * _SLOTS
        self._memory: mmap.mmap | None = None
        folder = job.folder()
        if folder:
            with (folder / f"place.{job.world_rank()}").open("wb+") as file:
                file.truncate(_HEAD.size + _SLOTS * _SLOT)
                self._memory = mmap.mmap(file.fileno(), 0)

    def begin(self, name: str) -> None:
        """Take in that the next collective begins."""
        self._count += 1
        self._names[self._count % _SLOTS] = name

    def wait(self) -> None:
        """Record that this rank waits in the collective that has begun, and which ones came before."""
        if self._memory is None or self._written == self._count:
            return
        for count in range(max(self._written, self._count - _SLOTS) + 1, self._count + 1):
            name, where = self._names[count % _SLOTS], _caller() if count == self._count else ""
            text = f"{count}\0{name}\0{where}".encode()[: _SLOT - 1] + b"\0"
            start = _HEAD.size + count % _SLOTS * _SLOT
            self._memory[start : start + len(text)] = text
        self._written = self._count
        _HEAD.pack_into(self._memory, 0, self._count, 1)

    def end(self) -> None:
        """Record that it is over, if it was recorded that this rank waits."""
        if self._memory is not None and self._written == self._count:
            _HEAD.pack_into(self._memory, 0, self._count, 0)


@cache
def recorder() -> Recorder:
    """Return the recorder of this process."""
    return Recorder()


def read(folder: Path, rank: int) -> Place | None:
    """Return the place of a rank; None if it has recorded none."""
    try:
        data = (folder / f"place.{rank}").read_bytes()
    except OSError:
        return None
    if len(data) != _HEAD.size + _SLOTS * _SLOT:
        return None
    count, waits = _HEAD.unpack_from(data)
    names, where = {}, ""
    for start in range(_HEAD.size, len(data), _SLOT):
        number, name, caller, *_ = data[start : start + _SLOT].split(b"\0")
        if number.isdigit():
            names[int(number)] = name.decode(errors="replace")
            where = caller.decode(errors="replace") if int(number) == count else where
    return Place(count, bool(waits), names, where)


def stuck(places: list[Place | None]) -> bool:
    """Return True if all ranks wait, and cannot all go on.

    A rank may be ahead of others in a collective that they have entered too, while bytes move.
    Nobody can go on if the next collective of those behind has another name on another rank.
    """
    known = [place for place in places if place is not None and place.waits]
    if len(known) < len(places):
        return False
    behind = min(place.count for place in known)
    return len({place.names.get(behind, known[0].names.get(behind)) for place in known}) > 1


def _caller() -> str:
    """Return file and line of the nearest caller outside of this package; "" if there is none."""
    frame = sys._getframe(1)
    with contextlib.suppress(AttributeError):
        while frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back  # type: ignore[assignment]
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""
