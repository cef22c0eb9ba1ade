"""Exit codes, and the failures of a job: the supervisor notices them and reports one for the whole job.

A job has the same exit code under every MPI (docs/failures.md has the table for users):

0        success
1        an exception, or a failure that has no code of its own
2        wrong use, such as an unknown option
n        a rank has called sys.exit(n) or os._exit(n)
128 + s  signal s: 130 after Ctrl-C, 137 after SIGKILL, 143 after SIGTERM

The supervisor sees the exit status of every rank itself, because each launcher reports it in its own
way: a shell around every rank writes it to the job's folder (see mpiexec.py).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rank0rl.launch import job, processes
from rank0rl.launch.hosts import SshSessions

SUCCESS, FAILURE, WRONG_USE = 0, 1, 2  # exit codes

STUCK_S = 5.0  # how long ranks that cannot go on, or a stopped rank, are given
TURN_S = 0.05  # between two looks at the job
_LOST_S = 2.0  # a launcher may know that a host is gone, and end its ranks here, before ssh does
_SILENT_S = 16.0  # patience after a launcher that ended well: ssh notices a silent host after 15 s
_LOOK_S = 0.5  # between looks at what must last for seconds: they read a file of every rank
_REPORT_S = 2.0  # time for a rank to finish its report or to write its exit status


def exit_code_after(signum: int) -> int:
    """Return the exit code of a process or job that a signal has ended, as shells give it."""
    return 128 + signum


def usage_error(message: str) -> int:
    """Print a message about wrong use; return the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return WRONG_USE


class FailureDetector:
    """Finds out why a job has to end, and reports it unless a rank does.

    Meanwhile it calls `listen(seconds)`, which passes on the ranks' stderr. A rank may take
    `start_timeout_s` to start after others have.
    """

    def __init__(
        self,
        folder: Path,
        nprocs: int,
        ssh: SshSessions,
        listen: Callable[[float], object],
        start_timeout_s: float = float("inf"),
    ) -> None:
        self._folder, self._nprocs, self._ssh, self._listen = folder, nprocs, ssh, listen
        self._start_timeout_s = start_timeout_s
        self._since: dict[str, tuple[str, float]] = {}
        self._looked = 0.0
        self.code: int | None = None
        """Exit code of the job; None while it goes on, and if no rank has begun."""

    def find(self, launcher: int | None) -> bool:
        """Return True if the job has to end: keep its exit code, and report why unless a rank has.

        Args:
            launcher: exit code of the launcher, None while it runs.
        """
        failed = self._folder / "failed"
        if failed.exists():
            self.code = int(failed.read_text() or FAILURE)
            return True
        return self._find_ended(launcher) or (launcher is None and self._find_lasting())

    def _find_ended(self, launcher: int | None) -> bool:
        """Look for the end of a rank, of a host and of the launcher."""
        ends = self._ends()
        well = self._well(ends)
        if launcher is not None and len(well) == self._nprocs:
            self.code = SUCCESS  # whatever the launcher says: each rank has said so itself
            return True
        bad = sorted(ends.keys() - well)
        patience_s = _SILENT_S if launcher == 0 else _LOST_S if bad or launcher else 0
        lost = self._ssh.lost(patience_s, self._wait)
        if lost:
            lines = [f"no connection to host {name}: {why}" for name, why in lost.items()]
            return self.report(FAILURE, "\n".join(lines))
        if launcher is not None and launcher < 0:  # the ranks ended because it did
            code = exit_code_after(-launcher)
            return self.report(code, f"the launcher {how_it_ended(code, True)}")
        if bad:
            return self._report_rank(bad[0], ends[bad[0]])
        return launcher is not None and self._report_launcher(launcher)

    def _report_rank(self, rank: int, status: int) -> bool:
        """Report a rank that was killed or ended otherwise than well."""
        together = self._has("ended", rank)
        said = together and status == WRONG_USE  # rank 0 has reported it for all
        why = "" if said else f"{self._name(rank)} {how_it_ended(status, together)}"
        return self.report(status or FAILURE, why)

    def _report_launcher(self, launcher: int) -> bool:
        """Report a launcher that ended too early, if any rank began. Open MPI's also does if a host is lost."""
        missing = [str(rank) for rank in range(self._nprocs) if not self._has("shell", rank)]
        if len(missing) == self._nprocs:
            return False
        late = f"rank {', '.join(missing)} began; python -m rank0rl doctor looks for the cause"
        how = f"the launcher ended with exit code {launcher} before "
        return self.report(FAILURE, how + (late if missing else "its ranks"))

    def report(self, code: int, why: str) -> bool:
        """Print why the job ends and keep the exit code; if a rank reports, its code counts.

        Returns:
            True.
        """
        return self._keep(code, why, self._claim())

    def _find_lasting(self) -> bool:
        """Look for what must last for some seconds to be wrong."""
        since_s = time.monotonic() - self._looked
        if since_s < _LOOK_S:
            return False
        if since_s > STUCK_S:
            self._since.clear()  # this process itself was stopped, perhaps with all others
        self._looked = time.monotonic()
        if self._find_missing():
            return True
        over = all(self._is_over(rank) for rank in range(self._nprocs))
        if self._lasts("over", "yes" if over else ""):
            self.code = (
                SUCCESS  # only launchers and shells are left, which have nothing to do any more
            )
            return True
        return not over and (self._find_stopped() or self._find_stuck())

    def _find_missing(self) -> bool:
        """Look for ranks that do not start, and for ranks whose end nobody waits for."""
        ranks = range(self._nprocs)
        late = [rank for rank in ranks if not self._has("rank", rank)]
        begun = [rank for rank in ranks if self._has("shell", rank)]
        apart = begun and late and not (len(begun) == len(late) == self._nprocs)
        if self._lasts("late", "yes" if apart else "", self._start_timeout_s):
            return self.report(FAILURE, self._late(late[0]))
        orphans = dict(processes.orphans(self._folder, self._nprocs))
        ends = self._ends()  # read later: a shell writes its rank's exit status first
        lost = [why for rank, why in orphans.items() if rank not in ends]
        if self._lasts("lost", repr(lost) if lost else "", 0):  # at once if the launcher was ended
            return self.report(FAILURE, lost[0])
        return False

    def _find_stopped(self) -> bool:
        """Look for processes that are stopped by a signal."""
        elsewhere = [
            int(f.suffix[1:]) for f in self._folder.glob("state.*") if f.read_text() == "T"
        ]
        here = processes.named(self._folder, self._nprocs)
        stopped = [self._name(rank) for rank in elsewhere]
        stopped += [name for name, process_id in here if processes.state(process_id) == "T"]
        if self._lasts("stopped", repr(stopped) if stopped else ""):
            return self.report(
                exit_code_after(signal.SIGSTOP), f"{stopped[0]} was stopped by a signal"
            )
        return False

    def _find_stuck(self) -> bool:
        """Look for ranks that wait for others in vain."""
        ranks = range(self._nprocs)
        early = [r for r in ranks if self._has("ended", r) and not self._has("meets", r)]
        left = [r for r in ranks if self._has("meets", r) and not self._has("ended", r)]
        if self._lasts("early", repr((early, left)) if early and left else ""):
            return self.report(
                FAILURE, f"rank {early[0]} ended before the others, which wait for it"
            )
        now = [job.read_collectives(self._folder, rank) for rank in ranks]
        if self._lasts("deadlock", repr(now) if job.is_deadlock(now) else ""):
            return self._report_deadlock([each for each in now if each])
        return False

    def _report_deadlock(self, now: list[job.RankCollectives]) -> bool:
        """Report where every rank waits. A rank that waits at its end goes on to its exit status."""
        claimed = self._claim()
        job.write_once(self._folder / "failed", str(FAILURE))
        at_end = [rank for rank, c in enumerate(now) if c.names.get(c.count) == job.SCRIPT_END]
        codes = [self._status(rank) for rank in at_end]
        lines = [f"  {_deadlock_line(rank, each)}" for rank, each in enumerate(now)]
        why = "\n".join(["the ranks cannot go on:", *lines])
        return self._keep(max(codes, default=0) or FAILURE, why, claimed)

    def _status(self, rank: int) -> int:
        """Return the exit status of a rank that is about to end."""
        end = time.monotonic() + _REPORT_S
        while time.monotonic() < end:
            if rank in (ends := self._ends()):
                return ends[rank]
            time.sleep(TURN_S)
        return FAILURE

    def _late(self, rank: int) -> str:
        """Return the message about a rank that has not started."""
        shell = processes.shell(self._folder, rank)
        what = f"on {shell.host} did not come" if shell else "was not started by the launcher"
        return (
            f"rank {rank} {what} within {self._start_timeout_s:g} s; raise the start timeout if it "
            f"was still importing"
        )

    def _name(self, rank: int) -> str:
        """Return a rank's name, with its host if that is another one."""
        shell = processes.shell(self._folder, rank)
        return f"rank {rank}, on {shell.host}," if shell and not shell.shell_id else f"rank {rank}"

    def _ends(self) -> dict[int, int]:
        """Return rank -> exit status, of the ranks that have ended."""
        ends = {}
        for file in self._folder.glob("status.[0-9]*"):
            with contextlib.suppress(ValueError):  # it is being written
                ends[int(file.suffix[1:])] = int(file.read_text())
        return ends

    def _well(self, ends: dict[int, int]) -> set[int]:
        """Return the ranks that ended well, of those that ended."""
        return {rank for rank, status in ends.items() if status == 0 and self._has("ended", rank)}

    def _wait(self, seconds: float) -> None:
        """Let time pass, and pass on what the ranks write: a full pipe would stop them."""
        self._listen(0.0)
        time.sleep(seconds)

    def _lasts(self, what: str, state: str, limit_s: float = STUCK_S) -> bool:
        """Return True if this state has been the same for some seconds; "" if nothing is wrong."""
        before, since = self._since.get(what, ("", 0.0))
        now = time.monotonic()
        if state != before:
            self._since[what] = (state, now)
            return False
        return bool(state) and now - since > limit_s

    def _is_over(self, rank: int) -> bool:
        """Return True if a rank has ended, and its process too if it is on this host."""
        shell = processes.shell(self._folder, rank)
        here = shell.rank_id if shell else None
        return self._has("ended", rank) and processes.state(here) in ("", "Z")

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


def how_it_ended(status: int, together: bool) -> str:
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


def _deadlock_line(rank: int, waits: job.RankCollectives) -> str:
    """Return one rank's line of the report on a deadlock."""
    name = waits.names.get(waits.count, "?")
    where = f", called at {waits.where}" if waits.where else ""
    return f"rank {rank} waits in its collective {waits.count}, {name}{where}"
