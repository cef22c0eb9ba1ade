"""Seconds and memory that an iteration takes on a rank, measured where they are spent."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PHASES = (
    "collect",
    "process",
    "wait",
    "gather",
    "hash",
    "update",
    "broadcast",
    "evaluate",
    "record",
)
"""Phases of an iteration on rank 0. The rest takes microseconds, so their seconds add up to the iteration's."""


class Phases:
    """Seconds of named phases, added up: ``with phases("collect"): ...``."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return phase -> seconds since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def peak_mb() -> float:
    """Return this process's peak memory in MB (2^20 bytes); 0 if the system does not tell.

    Pages that several processes share, such as torch's code, count once for all of them. The first
    call measures them, which takes 10 ms. All growth of the peak since then counts as this process's.
    """
    shared = _shared_mb()
    return max(_peak_resident_mb() - shared, 0.0)


@cache
def _shared_mb() -> float:
    """Return the share of the resident memory that counts for other processes, in MB, on Linux."""
    kb = _kb("/proc/self/smaps_rollup")
    return (kb["Rss"] - kb["Pss"]) / 1024 if kb else 0.0


def _peak_resident_mb() -> float:
    # getrusage only as a last resort: there a process begins with the peak of its parent.
    if kb := _kb("/proc/self/status"):
        return kb["VmHWM"] / 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _kb(path: str) -> dict[str, int]:
    """Return name -> number of the lines "name: number kB" of a file; {} if there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    fields = [line.replace(":", " ").split() for line in lines if line.endswith(" kB")]
    return {words[0]: int(words[1]) for words in fields}
