"""The processes below this one, as Linux shows them in /proc: found, ended with their parent, and killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Set
from pathlib import Path

PROC = Path("/proc")
_LINUX = sys.platform == "linux"
_BECOMES_S = 3.0  # for a shell to become the rank that it starts
_KILL_S = 5.0  # time for killed processes to disappear
_REAPER = "rank0rl-reaper"  # at most 15 letters
_REAPER_S = 4.0  # for a reaper to end its command, once its rank is gone: see reaper.py


def stat(process_id: int | None) -> list[str]:
    """Return the fields of a process in /proc, from its state on; [] if there is no such process."""
    with contextlib.suppress(OSError):
        return (PROC / f"{process_id}/stat").read_text().rpartition(")")[2].split()
    return []


def state(process_id: int | None) -> str:
    """Return the letter of a process's state; "" if there is no such process."""
    return next(iter(stat(process_id)), "")


def program(process_id: int) -> str:
    """Return the name of a process's program; "?" if there is no such process."""
    with contextlib.suppress(OSError):
        return (PROC / f"{process_id}/comm").read_text().strip()
    return "?"


def children(process_id: int) -> set[int]:
    """Return the ids of the processes whose parent is this one."""
    found = set()
    for file in PROC.glob(f"{process_id}/task/*/children"):
        with contextlib.suppress(OSError):
            found |= {int(child) for child in file.read_text().split()}
    return found


def below(process_id: int, spare: Set[int | None] = frozenset()) -> Iterator[int]:
    """Yield what a process has started, and so on, without the processes to spare and what is below them."""
    for child in sorted(children(process_id)):
        if child not in spare:
            yield child
            yield from below(child, spare)


def other_programs() -> list[str]:
    """Return the names of other programs that this process's launcher has started on this host, where it can be known."""
    launcher = os.getppid()
    if not program(launcher).startswith("hydra_pmi"):
        contexts = os.environ.get("OMPI_APP_CTX_NUM_PROCS", "").split()  # Open MPI: one a program
        return [f"{len(contexts) - 1} more"] if len(contexts) > 1 else []
    # A rank may have ended, or may still be the launcher's fork, or a shell that is about to become it.
    none, until = ([""], _words(launcher), _words(os.getpid())), time.monotonic() + _BECOMES_S
    while True:
        others = {words[0] for words in map(_words, children(launcher)) if words not in none}
        if not others or time.monotonic() > until:
            return sorted(os.path.basename(other) for other in others)
        time.sleep(0.05)


def _words(process_id: int) -> list[str]:
    """Return the command line of a process; [""] if there is no such process."""
    with contextlib.suppress(OSError):
        return (PROC / f"{process_id}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return [""]


def end_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Let Linux send this process a signal when the thread that has started it ends, or its parent as a whole."""
    if _LINUX:
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper(on: bool = True) -> None:
    """Let this process become the parent of those below it whose own parent ends. Linux only."""
    if _LINUX:
        ctypes.CDLL(None).prctl(36, int(on))  # PR_SET_CHILD_SUBREAPER


def become_reaper() -> None:
    """Let this process end in its own time, with all below it, once its parent is gone."""
    become_subreaper()
    if _LINUX:
        ctypes.CDLL(None).prctl(15, _REAPER.encode())  # PR_SET_NAME


def kill_below(spare: Set[int | None] = frozenset()) -> None:
    """Kill what this process has started, and so on, also what has left its group and session, for a subreaper.

    Args:
        spare: children that stay, with all below them.
    """
    begin = time.monotonic()
    while ids := list(below(os.getpid(), spare)):
        since_s = time.monotonic() - begin
        if since_s > _KILL_S:
            break
        reapers = {each for each in ids if program(each) == _REAPER and since_s < _REAPER_S}
        theirs = {each for reaper in reapers for each in below(reaper)}
        for process_id in set(ids) - reapers - theirs:
            with contextlib.suppress(OSError):
                os.kill(process_id, signal.SIGKILL)
        bury(spare)
        time.sleep(0.002)


def bury(spare: Set[int | None] = frozenset()) -> None:
    """Remove the children of this process that have ended from the table of processes, without those to spare."""
    for child in children(os.getpid()) - spare:
        with contextlib.suppress(OSError):
            os.waitpid(child, os.WNOHANG)
