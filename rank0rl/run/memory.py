"""How much memory a process has used, so that the ranks' figures add up."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path


def peak_mb() -> float:
    """The most that this process has had in memory, in MB (2^20 bytes); 0 where it cannot be known.

    Pages that several processes share, such as torch's code, count once for all of them: they are
    counted at the first call, which takes 10 ms; what the peak has grown by since is this process's.
    """
    shared = _shared_mb()
    return max(_peak_resident_mb() - shared, 0.0)


@cache
def _shared_mb() -> float:
    """How much of what is resident belongs to other processes, on Linux."""
    kb = _kb("/proc/self/smaps_rollup")
    return (kb["Rss"] - kb["Pss"]) / 1024 if kb else 0.0


def _peak_resident_mb() -> float:
    # Not getrusage where this is known: there a process begins with the peak of the one it is from.
    if kb := _kb("/proc/self/status"):
        return kb["VmHWM"] / 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _kb(path: str) -> dict[str, int]:
    """The lines "name: number kB" of a file; none if there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    fields = [line.replace(":", " ").split() for line in lines if line.endswith(" kB")]
    return {words[0]: int(words[1]) for words in fields}
