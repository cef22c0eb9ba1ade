"""Seconds per phase, measured where the phase runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
