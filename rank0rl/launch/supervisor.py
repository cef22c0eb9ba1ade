"""Watch a job, find out why it has to end, and end it as a whole.

The supervisor is a plain process beside the ranks. It goes on while a rank hangs, and no rank can
take it down. It sees the exit status of every rank itself, because each launcher reports it in its own
way: a shell around every rank writes it to the job's folder (see mpiexec.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rank0rl.launch import (
    FAILURE,
    SUCCESS,
    WRONG_USE,
    exit_code_after,
    how_it_ended,
    job,
    processes,
    tree,
)
from rank0rl.launch.hosts import Host, SshSessions
from rank0rl.launch.streams import Relay

TURN_S = 0.05  # between two looks at the job
_GRACE_S = 8.0  # for rank 0 to write a checkpoint, between a signal or a failure and SIGKILL
_CLOSE_S = 6.0  # for ranks to close their environments; they end by themselves a second before
_DELIVERY_S = 3.0  # for the launcher to pass on the last words of a rank
_STUCK_S = 5.0  # how long ranks that cannot go on, or a stopped rank, are given
_LOST_S = 2.0  # a launcher may know that a host is gone, and end its ranks here, before ssh does
_SILENT_S = 16.0  # patience after a launcher that ended well: ssh notices a silent host after 15 s
_LOOK_S = 0.5  # between looks at what must last for seconds: they read a file of every rank
_REPORT_S = 2.0  # time for a rank to finish its report or to write its exit status


class Supervisor:
    """Watches the launcher of n ranks. A signal or a failure is passed to rank 0, then the job ends.

    Args:
        folder: folder of the job.
        nprocs: number of ranks.
        hosts: hosts of the ranks, this one first; none if all ranks are here.
        received: the signals that ask the job to end. Others come while it runs.
        start_timeout_s: seconds that a rank may take to start after others have, and the launcher until the first.
    """

    def __init__(
        self,
        folder: Path,
        nprocs: int,
        hosts: Sequence[Host],
        received: list[int],
        start_timeout_s: float,
    ) -> None:
        self._folder, self._nprocs, self._received = folder, nprocs, received
        self._ranks = processes.Ranks(folder, nprocs)
        self._ssh = SshSessions(hosts, folder)
        self._failures = _FailureDetector(folder, nprocs, self._ssh, self._listen, start_timeout_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = float("inf")
        self._begin = time.monotonic()
        self._begun = 0  # number of ranks whose shell has begun
        self._early = self._held = self._rest = b""
        self.lost: list[str] = []
        """Names of the hosts that are gone."""

    @property
    def output(self) -> str:
        """Output of the launcher before the first rank began."""
        return self._early.decode(errors="replace")

    @property
    def launcher(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        return self._process.poll() if self._process else None

    def run(self, command: list[str], env: dict[str, str]) -> int | None:
        """Run the launcher's command.

        Returns:
            The job's exit code, 128 + s after signal s; None if the launcher ended without having
            started a rank.

        Raises:
            WrongLaunch: if the launcher cannot be run.
        """
        relay = None
        before = set(tree.below(os.getpid()))
        tree.become_subreaper()
        try:
            with self._ssh:
                try:
                    self._process = subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        start_new_session=True,
                        preexec_fn=partial(_prepare_launcher, os.getpid()),  # noqa: PLW1509
                    )
                    (self._folder / "launcher").write_text(str(self._process.pid))
                    relay = Relay(self._process.stdout, self._folder)
                    started = tree.children(os.getpid())
                    while not self._is_over():
                        self._listen(TURN_S)
                        tree.bury(started)
                except OSError as error:
                    if self._process:
                        raise
                    why = f"{error.filename or command[0]} cannot be run: {error.strerror}"
                    raise job.WrongLaunch(why) from error
                finally:
                    self._end()
                    if relay:
                        relay.close(self._received, _GRACE_S)
                code = exit_code_after(self._received[0]) if self._received else self._failures.code
                self.lost = list(self._ssh.lost()) if code else []
            return code
        finally:
            # What has left its group, and has other variables. A connection of ssh may be shared with others.
            ssh = {each for each in tree.children(os.getpid()) if tree.program(each) == "ssh"}
            tree.kill_below(before | ssh)
            tree.become_subreaper(on=False)

    def _listen(self, seconds: float) -> bool:
        """Pass the ranks' stderr on; keep back what the launcher writes at first, before there are ranks.

        Returns:
            True if anything came within so many seconds.
        """
        assert self._process is not None
        assert self._process.stderr is not None
        pipe = self._process.stderr
        data = b""
        with contextlib.suppress(InterruptedError):
            if select.select([pipe], [], [], seconds)[0]:
                data = os.read(pipe.fileno(), 1 << 20)
                if not data and self.launcher is None:  # it has closed the pipe, and ends
                    time.sleep(min(seconds, TURN_S))
        words, self._rest = job.take_lines(self._folder, self._rest + data)
        if self._begun < self._nprocs:
            self._begun = len(list(self._folder.glob("shell.*")))
        if not self._begun:
            self._early += words
        self._held += words
        # While ranks are missing, the launcher may say why: that follows the supervisor's own words.
        known = self._begun == self._nprocs or self._received or self._failures.code is not None
        if self._held and (known or time.monotonic() - self._begin > _STUCK_S):
            _write(self._held)
            self._held = b""
        return bool(data)

    def _is_over(self) -> bool:
        """Return True if the job has ended, or has to end now. Rank 0 is told first, and given time to save."""
        if self._deadline < float("inf"):
            is_late = time.monotonic() > self._deadline
            return len(self._received) > 1 or is_late or not self._ranks.can_end(0)
        launcher = self.launcher
        if launcher is not None:
            self._drain()  # files from other hosts may be in it
        interrupted = self._folder / "interrupted"
        if not self._received and interrupted.exists() and not self._failures.find_lost():
            self._received.append(int(interrupted.read_text()))
        found = not self._received and self._failures.find(launcher)
        if self._failures.code == SUCCESS:
            return True
        if not self._received and not found:
            return launcher is not None
        asked = [s for s in self._received[:1] if s != signal.SIGHUP]
        sent = self._ranks.send(0, asked[0] if asked else signal.SIGTERM)
        self._deadline = time.monotonic() + (_GRACE_S if sent else 0)
        return False

    def _end(self) -> None:
        """End the launcher and every process of the job; remove MPI's files."""
        process = self._process
        if process is None:
            return
        self._drain()
        runs = process.poll() is None
        if runs:
            self._close()
            # The launcher first: it would write much about the end of its ranks.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if runs or self._failures.code != SUCCESS:
            processes.kill_all(self._folder)
        processes.remove_mpi_files(self._folder)

    def _close(self) -> None:
        """Let the ranks end in order, with their environments. Who asks twice is in a hurry."""
        job.write_once(self._folder / "ending", "")
        told = [rank for rank in self._ranks.leaders if self._ranks.send(rank, signal.SIGTERM)]
        end = time.monotonic() + _CLOSE_S
        while any(map(self._ranks.can_end, told)) and time.monotonic() < end:
            if len(self._received) > 1:
                break
            self._listen(TURN_S)

    def _drain(self) -> None:
        """Pass on what the ranks have written last, which launchers may take a while to deliver."""
        begin = time.monotonic()
        while (
            self.launcher is None
            and len(self._received) < 2  # who asks twice is in a hurry
            and self._ranks.words_under_way()
            and time.monotonic() < begin + _DELIVERY_S
        ):
            self._listen(TURN_S)
        begin = time.monotonic()
        while self._listen(0.2) and time.monotonic() < begin + 1:
            pass


class _FailureDetector:
    """Finds out why a job has to end, and reports it unless a rank does.

    Meanwhile it calls `listen(seconds)`, which passes on the ranks' stderr: a full pipe would stop them.
    """

    def __init__(
        self,
        folder: Path,
        nprocs: int,
        ssh: SshSessions,
        listen: Callable[[float], object],
        start_timeout_s: float = float("inf"),
    ) -> None:
        self._folder, self._ssh, self._listen = folder, ssh, listen
        self._ranks = processes.Ranks(folder, nprocs)
        self._start_timeout_s = start_timeout_s
        self._since: dict[str, tuple[object, float]] = {}
        self._looked = 0.0
        self.code: int | None = None
        """Exit code of the job; None while it goes on, and if no rank has begun."""

    def find(self, launcher: int | None) -> bool:
        """Return True if the job has to end: keep its exit code, and report why unless a rank has.

        `launcher` is the exit code of the launcher, None while it runs.
        """
        failed = self._folder / "failed"
        if failed.exists():
            self.code = int(failed.read_text() or FAILURE)
            return True
        return self._find_ended(launcher) or (launcher is None and self._find_lasting())

    def find_lost(self) -> bool:
        """Look at once for a rank whose end nobody waits for. Open MPI's launcher then ends all by SIGTERM."""
        why = self._lost()
        return bool(why) and self.report(FAILURE, why)

    def report(self, code: int, why: str) -> bool:
        """Print why the job ends and keep the exit code; if a rank reports, its code counts. Return True."""
        return self._keep(code, why, self._claim())

    def _find_ended(self, launcher: int | None) -> bool:
        """Look for the end of a rank, of a host and of the launcher."""
        ends, ranks = self._ranks.ends(), self._ranks
        well = {rank for rank, status in ends.items() if status == 0 and ranks.has("ended", rank)}
        if launcher is not None and len(well) == len(ranks.all):
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
        if bad and (self._folder / "interrupted").exists():
            return False  # rank 0 wrote this before it ended, and after the supervisor looked
        if bad:
            rank, status = bad[0], ends[bad[0]]
            together = ranks.has("ended", rank)
            said = together and status == WRONG_USE  # rank 0 has reported it for all
            why = "" if said else f"{self._name(rank)} {how_it_ended(status, together)}"
            return self.find_lost() or self.report(status or FAILURE, why)
        return launcher is not None and self._report_launcher(launcher)

    def _report_launcher(self, launcher: int) -> bool:
        """Report a launcher that ended too early, if any rank began. Open MPI's also does if a host is lost."""
        missing = [
            job.in_words(rank) for rank in self._ranks.all if not self._ranks.has("shell", rank)
        ]
        if len(missing) == len(self._ranks.all):
            return False
        late = f"{', '.join(missing)} began; python -m rank0rl doctor looks for the cause"
        how = f"the launcher ended with exit code {launcher} before "
        return self.report(FAILURE, how + (late if missing else "its ranks"))

    def _find_lasting(self) -> bool:
        """Look for what must last for some seconds to be wrong."""
        since_s = time.monotonic() - self._looked
        if since_s < _LOOK_S:
            return False
        if since_s > _STUCK_S:
            self._since.clear()  # this process itself was stopped, perhaps with all others
        self._looked = time.monotonic()
        if self._find_missing():
            return True
        over = all(map(self._ranks.is_over, self._ranks.all))
        if self._lasts("over", over):  # only launchers and shells are left, with nothing to do
            self.code = SUCCESS
            return True
        return not over and (self._find_stopped() or self._find_stuck())

    def _find_missing(self) -> bool:
        """Look for ranks that do not start, and for ranks whose end nobody waits for."""
        ranks = self._ranks
        late = [rank for rank in ranks.all if not ranks.has("rank", rank)]
        begun = [rank for rank in ranks.all if ranks.has("shell", rank)]
        # A script may take its time before its ranks meet.
        apart = late and not (len(begun) == len(late) == len(ranks.all)) and {"some": bool(begun)}
        if self._lasts("late", apart, self._start_timeout_s):
            shell = ranks.shell(late[0])
            what = f"on {shell.host} did not come" if shell else "was not started by the launcher"
            still = "it was still importing" if shell else "the launcher was waiting for something"
            return self.report(
                FAILURE,
                f"{job.in_words(late[0])} {what} within {self._start_timeout_s:g} s; raise the start timeout "
                f"if {still}",
            )
        # At once if the launcher was ended.
        return self._lasts("lost", self._lost(), 0) and self.find_lost()

    def _lost(self) -> str:
        """Return why nobody waits for the end of a rank on this host, "" if there is no such rank."""
        orphans = self._ranks.orphans()
        ends = self._ranks.ends()  # read later: a shell writes its rank's exit status first
        return next((why for rank, why in orphans.items() if rank not in ends), "")

    def _find_stopped(self) -> bool:
        """Look for processes that are stopped by a signal."""
        elsewhere = [
            int(f.suffix[1:]) for f in self._folder.glob("state.*") if f.read_text() == "T"
        ]
        stopped = [self._name(rank) for rank in elsewhere]
        stopped += [name for name, pid in self._ranks.named() if tree.state(pid) == "T"]
        return self._lasts("stopped", stopped) and self.report(
            exit_code_after(signal.SIGSTOP), f"{stopped[0]} was stopped by a signal"
        )

    def _find_stuck(self) -> bool:
        """Look for ranks that wait for others in vain."""
        has, ranks = self._ranks.has, self._ranks.all
        early = [rank for rank in ranks if has("ended", rank) and not has("meets", rank)]
        left = [rank for rank in ranks if has("meets", rank) and not has("ended", rank)]
        if self._lasts("early", (early, left) if early and left else None):
            why = f"{job.in_words(early[0])} ended before the others, which wait for it"
            return self.report(FAILURE, why)
        now = [job.RankCollectives.read(self._folder, rank) for rank in self._ranks.leaders]
        if self._lasts("deadlock", now if job.is_deadlock(now) else None):
            return self._report_deadlock([each for each in now if each])
        return False

    def _report_deadlock(self, now: list[job.RankCollectives]) -> bool:
        """Report where every rank waits. A rank that waits at its end goes on to its exit status."""
        claimed = self._claim()
        job.write_once(self._folder / "failed", str(FAILURE))
        size = job.group_size()
        at_end = [rank * size for rank, each in enumerate(now) if each.name == job.SCRIPT_END]
        codes = [self._status(rank) for rank in at_end]
        why = "the ranks cannot go on:"
        for rank, each in enumerate(now):
            where = f", called at {each.where}" if each.where else ""
            why += f"\n  rank {rank} waits in its collective {each.count}, {each.name}{where}"
        return self._keep(max(codes, default=0) or FAILURE, why, claimed)

    def _status(self, rank: int) -> int:
        """Return the exit status of a rank that is about to end."""
        end = time.monotonic() + _REPORT_S
        while time.monotonic() < end:
            if rank in (ends := self._ranks.ends()):
                return ends[rank]
            time.sleep(TURN_S)
        return FAILURE

    def _name(self, rank: int) -> str:
        """Return a rank's name, with its host if that is another one."""
        shell = self._ranks.shell(rank)
        name = job.in_words(rank)
        return f"{name}, on {shell.host}," if shell and not shell.shell_id else name

    def _wait(self, seconds: float) -> None:
        self._listen(0.0)
        time.sleep(seconds)

    def _lasts(self, what: str, state: object, limit_s: float = _STUCK_S) -> bool:
        """Return True if what is wrong has been the same for some seconds; a false state if nothing is."""
        before, since = self._since.get(what, (None, 0.0))
        now = time.monotonic()
        if state != before:
            self._since[what] = (state, now)
            return False
        return bool(state) and now - since > limit_s

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


def _write(text: bytes) -> None:
    """Write to stderr, which may be a stream of the script's own."""
    if hasattr(sys.stderr, "buffer"):
        sys.stderr.buffer.write(text)
    else:
        sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()


def _prepare_launcher(parent: int) -> None:
    """Let the launcher outlast what a batch system sends, until rank 0 has saved, but not its parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, job.END_SIGNALS)
    tree.end_with_parent(parent, signal.SIGINT)
