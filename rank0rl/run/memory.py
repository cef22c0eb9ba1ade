"""Peak memory of a process, measured so that the figures of the ranks add up."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path


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
