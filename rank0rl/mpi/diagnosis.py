"""The diagnosis of a job that goes wrong: found by the supervisor, and reported once for the whole job.

The supervisor sees the exit status of every rank itself, because each launcher reports it in its own
way: a shell around every rank writes it to the job's folder (see launcher.py).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rank0rl.mpi import job, places, processes
from rank0rl.mpi.hosts import Contact

STUCK_S = 5.0  # how long ranks that cannot go on, or a stopped rank, are given
TURN_S = 0.05  # between two looks at the job
_LOST_S = 2.0  # a launcher may know that a host is gone, and end its ranks here, before ssh does
_SILENT_S = 16.0  # the same if the launcher ended well: ssh notices a silent host after 15 s
_LOOK_S = 0.5  # between looks at what must last for seconds: they read a file of every rank
_REPORT_S = 2.0  # time for a rank to finish its report or to write its exit status


class Diagnosis:
    """Finds out why a job has to end, and reports it unless a rank does.

    Args:
        folder: folder of the job.
        nprocs: number of ranks.
        contact: connections to the other hosts.
        listen: passes on the ranks' stderr for some seconds.
    """

    def __init__(
        self, folder: Path, nprocs: int, contact: Contact, listen: Callable[[float], object]
    ) -> None:
        """Begin with nothing found."""
        self._folder, self._nprocs, self._contact, self._listen = folder, nprocs, contact, listen
        self._since: dict[str, tuple[str, float]] = {}
        self._looked = 0.0
        self.code: int | None = None
        """Exit code of the job; None while nothing is wrong."""

    def find(self, launcher: int | None) -> bool:
        """Return True if the job has to end: keep its exit code, and report why unless a rank has.

        Args:
            launcher: exit code of the launcher, None while it runs.
        """
        failed = self._folder / "failed"
        if failed.exists():
            self.code = int(failed.read_text() or 1)
            return True
        ends = list(self._folder.glob("status.[0-9]*"))
        all_ended = self.ended_well(launcher)
        patience_s = _SILENT_S if launcher == 0 else _LOST_S if ends or launcher else 0
        lost = {} if all_ended else self._contact.lost(patience_s)
        if lost:
            lines = [f"no connection to host {name}: {why}" for name, why in lost.items()]
            return self.report(1, "\n".join(lines))
        for file in ends:
            status = int(file.read_text())
            rank = file.suffix[1:]
            together = self._has("ended", int(rank))
            said = together and status == 2  # wrong use, which rank 0 has reported for all
            return self.report(
                status or 1, "" if said else f"rank {rank} {ending(status, together)}"
            )
        if launcher == 0 and not all_ended:
            return self.report(1, "the launcher ended before its ranks")
        return self._find_lasting()

    def ended_well(self, launcher: int | None) -> bool:
        """Return True if the launcher and all ranks ended well. Open MPI's also does if a host is lost."""
        if launcher != 0:
            return False
        return all(
            self._has("ended", rank) for rank in range(self._nprocs) if self._has("rank", rank)
        )

    def report(self, code: int, why: str) -> bool:
        """Print why the job ends and keep the exit code; if a rank reports, its code counts.

        Returns:
            True.
        """
        return self._keep(code, why, self._claim())

    def _find_lasting(self) -> bool:
        """Look for what must last for some seconds to be wrong: ranks that are stopped or cannot go on."""
        if time.monotonic() - self._looked < _LOOK_S:
            return False
        self._looked = time.monotonic()
        ranks = range(self._nprocs)
        early = [r for r in ranks if self._has("ended", r) and not self._has("meets", r)]
        left = [r for r in ranks if self._has("meets", r) and not self._has("ended", r)]
        if self._lasts("early", repr((early, left)) if early and left else ""):
            return self.report(1, f"rank {early[0]} ended before the others, which wait for it")
        stopped = [rank for rank in ranks if processes.state(self._folder, rank) == "T"]
        if self._lasts("stopped", repr(stopped) if stopped else ""):
            return self.report(128 + signal.SIGSTOP, f"rank {stopped[0]} was stopped by a signal")
        now = [places.read(self._folder, rank) for rank in ranks]
        if self._lasts("stuck", repr(now) if places.stuck(now) else ""):
            return self._report_deadlock([place for place in now if place])
        return False

    def _report_deadlock(self, now: list[places.Place]) -> bool:
        """Report the place of every rank. A rank that waits at its end goes on to its exit status."""
        claimed = self._claim()
        job.write_once(self._folder / "failed", "1")
        at_end = [rank for rank, p in enumerate(now) if p.names.get(p.count) == places.END]
        codes = [self._status(rank) for rank in at_end]
        lines = [f"  {_line(rank, place)}" for rank, place in enumerate(now)]
        why = "\n".join(["the ranks cannot go on:", *lines])
        return self._keep(max(codes, default=1) or 1, why, claimed)

    def _status(self, rank: int) -> int:
        """Return the exit status of a rank that is about to end."""
        end = time.monotonic() + _REPORT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                return int((self._folder / f"status.{rank}").read_text())
            time.sleep(TURN_S)
        return 1

    def _lasts(self, what: str, state: str) -> bool:
        """Return True if this state has been the same for some seconds; "" if nothing is wrong."""
        before, since = self._since.get(what, ("", 0.0))
        now = time.monotonic()
        if state != before:
            self._since[what] = (state, now)
            return False
        return bool(state) and now - since > STUCK_S

    def _has(self, name: str, rank: int) -> bool:
        return (self._folder / f"{name}.{rank}").exists()

    def _keep(self, code: int, why: str, claimed: bool) -> bool:
        job.write_once(self._folder / "failed", str(code))
        self.code = code if claimed else int((self._folder / "failed").read_text() or code)
        if claimed and why:
            print(f"{why}\nthe job ends", file=sys.stderr, flush=True)
        return True

    def _claim(self) -> bool:
        """Claim the failure report; return True unless a rank has claimed it and finishes it."""
        if job.write_once(self._folder / "reporter", "supervisor"):
            return True
        end = time.monotonic() + _REPORT_S  # a rank that claimed it may have been ended before it
        while not (self._folder / "failed").exists() and time.monotonic() < end:
            self._listen(TURN_S)
        reporter = (self._folder / "reporter").read_text()
        return reporter == "supervisor" or not (self._folder / "failed").exists()


def ending(status: int, together: bool) -> str:
    """Return how a process ended, from its exit status as a shell gives it.

    Args:
        status: exit status; 128 + s after signal s.
        together: True if it ended together with all other ranks.
    """
    if status - 128 in list(signal.Signals):
        name = signal.Signals(status - 128).name
        why = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
        return f"was ended by signal {status - 128}, {name}{why}"
    return f"ended with exit code {status}" + ("" if together else " before the other ranks")


def _line(rank: int, place: places.Place) -> str:
    """Return one rank's line of the report on a deadlock."""
    name = place.names.get(place.count, "?")
    where = f", called at {place.where}" if place.where else ""
    return f"rank {rank} waits in its collective {place.count}, {name}{where}"
