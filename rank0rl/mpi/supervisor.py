"""Watch a job, end it as a whole when something is wrong with it, and say once what that was.

The supervisor is a plain process beside the ranks: it lives while a rank hangs, and no rank of it
can take it along. It sees the exit status of every rank itself, because launchers report it each in
their own way: a shell around every rank writes it down, and keeps the launcher from its own words.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rank0rl.mpi import job as jobs
from rank0rl.mpi.hosts import Contact

GRACE_S = 8.0  # for rank 0 to write a checkpoint, between a signal or a failure and SIGKILL
_STUCK_S = 5.0  # how long ranks that cannot go on, or a stopped rank, are given
_TURN_S = 0.05
_LOST_S = 2.0  # a launcher may know that a host is gone, and end its ranks here, before ssh does
_SILENT_S = 16.0  # the same where it ended as if all were well: ssh misses a silent host after 15 s
_LOOK_S = 0.5  # between looks at what takes seconds to be wrong, and reading time for every rank

# $RANK0RL_JOB: see job.py. In the background, because a shell has words of its own for a command in
# the foreground that a signal ends. On other hosts it does nothing. A rank that ended otherwise than
# together with all others stays, so that the launcher does not end the job before rank 0 has saved;
# the supervisor does. One that has not met the others waits for their end, because Open MPI takes
# its own for a failure. The sleep is short enough to leave nothing behind if that is gone.
_SHELL = """
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}}
exec 3>&2 2>/dev/null
"$@" 2>&3 3>&- &
wait $!
status=$?
if [ $status = 0 ] && [ -e "$RANK0RL_JOB/ended.$rank" ]; then
    [ -e "$RANK0RL_JOB/meets.$rank" ] && exit 0
    count() { set -- "$RANK0RL_JOB/$1".[0-9]*; echo $#; }
    while [ $(count ended) -lt $(count rank) ]; do sleep 0.05; done
    exit 0
fi
[ -e "$RANK0RL_JOB/rank.$rank" ] || exit $status
echo $status > "$RANK0RL_JOB/status.part.$rank" &&
    mv "$RANK0RL_JOB/status.part.$rank" "$RANK0RL_JOB/status.$rank" && sleep 30
exit $status
"""


def around(command: list[str]) -> list[str]:
    """A rank's command, in the shell that writes its exit status down."""
    return ["sh", "-c", _SHELL, "sh", *command]


class Supervisor:
    """Watches the launcher of n ranks: a signal or a failed rank first goes to rank 0, then ends all.

    Args:
        folder: of the job.
        nprocs: number of ranks.
        hosts: names of other hosts that have some of them.
    """

    def __init__(self, folder: Path, nprocs: int, hosts: Sequence[str] = ()) -> None:
        """Nothing is started yet."""
        self._folder, self._nprocs, self._hosts = folder, nprocs, hosts
        self.lost: list[str] = []
        """Hosts that are gone."""
        self._process: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._deadline = float("inf")
        self._begin = time.monotonic()
        self._early = b""
        self._since: dict[str, tuple[str, float]] = {}
        self._looked = 0.0
        self._code: int | None = None
        self.entered = False
        """Whether any rank has come to life."""

    def run(self, command: list[str], env: dict[str, str]) -> int:
        """Run the launcher's command; the job's exit code, 128 + s after signal s."""
        with Contact(self._hosts, self._folder) as self._contact:
            code = self._run(command, env)
            self.lost = list(self._contact.lost()) if code else []
        return code

    def _run(self, command: list[str], env: dict[str, str]) -> int:
        signals = [
            s
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(s) is not signal.SIG_IGN  # as nohup leaves it
        ]
        before = {s: signal.signal(s, self._handle) for s in signals}
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
            while self._process.poll() is None:
                self._listen(_TURN_S)
                self._watch()
            if self._process.returncode == 0 and not self._received:
                self._is_wrong()  # while its ranks, if it has left any, still live
        finally:
            self._end()
            for signum, handler in before.items():
                signal.signal(signum, handler)
        if self._received:
            return 128 + self._received[0]
        if self._code is None:
            self._is_wrong()
        if self._code is not None:
            return self._code
        code = self._process.returncode
        if code < 0 and self.entered:
            print(f"the launcher {_ending(128 - code, False)}: the job ends", file=sys.stderr)
        return 128 - code if code < 0 else code

    @property
    def interrupted(self) -> bool:
        """Whether the job was asked to end by a signal."""
        return bool(self._received)

    @property
    def said(self) -> str:
        """What the launcher said before any rank came to life."""
        return self._early.decode(errors="replace")

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._received.append(signum)

    def _listen(self, seconds: float) -> bool:
        """Pass the ranks' stderr on; hold back what the launcher says before there are ranks.

        Returns:
            Whether anything came within so many seconds.
        """
        assert self._process is not None
        assert self._process.stderr is not None
        pipe = self._process.stderr
        self.entered = (
            self.entered
            or any(self._folder.glob("[rf]*[0-9d]"))
            or time.monotonic() - self._begin > _STUCK_S  # the ranks may be on other hosts
        )
        data = b""
        with contextlib.suppress(InterruptedError):
            if select.select([pipe], [], [], seconds)[0]:
                data = os.read(pipe.fileno(), 1 << 20)
                if not data:  # the launcher has closed it, and ends
                    time.sleep(min(seconds, _TURN_S))
        self._early += data
        if self.entered and self._early:
            sys.stderr.buffer.write(self._early)
            sys.stderr.flush()
            self._early = b""
        return bool(data)

    def _watch(self) -> None:
        """Tell rank 0 once that the job is to end; end it when its time is over, or asked again."""
        if self._deadline == float("inf"):
            if self._received or self._is_wrong():
                interrupted = self._received[:1] == [signal.SIGINT]
                told = self._signal(0, signal.SIGINT if interrupted else signal.SIGTERM)
                self._deadline = time.monotonic() + (GRACE_S if told else 0)
        elif (
            len(self._received) > 1
            or time.monotonic() > self._deadline
            or not self._signal(0, 0)  # rank 0 has gone, and something waits for it
            or self._state(0) in ("T", "Z")  # it is stopped, and will not save anything
        ):
            self._end()

    def _is_wrong(self) -> bool:
        """Whether the job has to end; keeps its exit code, and says why if no rank has."""
        failed = self._folder / "failed"
        if failed.exists():
            self._code = int(failed.read_text() or 1)
            return True
        ends = list(self._folder.glob("status.[0-9]*"))
        launcher = self._process.poll() if self._process else None
        through = self._is_through()
        patience_s = _SILENT_S if launcher == 0 else _LOST_S if ends or launcher else 0
        lost = {} if through else self._contact.lost(patience_s)
        if lost:
            whys = [f"no connection to host {name}: {said}" for name, said in lost.items()]
            return self._wrong(1, "\n".join(whys))
        for file in ends:
            status = int(file.read_text())
            rank = file.suffix[1:]
            agreed = self._has("ended", int(rank))
            told = agreed and status == 2  # a wrong use, the same on all ranks
            return self._wrong(
                status or 1, "" if told else f"rank {rank} {_ending(status, agreed)}"
            )
        if launcher == 0 and not through:
            return self._wrong(1, "the launcher ended before its ranks")
        return self._is_wrong_for_long()

    def _is_through(self) -> bool:
        """Whether the launcher has ended well, after its ranks: Open MPI's says so of a lost host too."""
        if self._process is None or self._process.poll() != 0:
            return False
        ranks = range(self._nprocs)
        return all(self._has("ended", rank) for rank in ranks if self._has("rank", rank))

    def _is_wrong_for_long(self) -> bool:
        """The same for what has to last some seconds: ranks that are stopped, or cannot go on."""
        if time.monotonic() - self._looked < _LOOK_S:
            return False
        self._looked = time.monotonic()
        early = [
            r for r in range(self._nprocs) if self._has("ended", r) and not self._has("meets", r)
        ]
        left = [
            r for r in range(self._nprocs) if self._has("meets", r) and not self._has("ended", r)
        ]
        if self._lasts("early", repr((early, left)) if early and left else ""):
            return self._wrong(1, f"rank {early[0]} ended before the others, which wait for it")
        stopped = [rank for rank in range(self._nprocs) if self._state(rank) == "T"]
        if self._lasts("stopped", repr(stopped) if stopped else ""):
            return self._wrong(128 + signal.SIGSTOP, f"rank {stopped[0]} was stopped by a signal")
        places = [jobs.read_place(self._folder / f"place.{r}") for r in range(self._nprocs)]
        if self._lasts("stuck", repr(places) if jobs.stuck(places) else ""):
            return self._deadlock([place for place in places if place])
        return False

    def _deadlock(self, places: list[jobs.Place]) -> bool:
        """Ranks wait for what will not come; one that waits at its end goes on to its exit status."""
        reports = self._reports()
        jobs.write_once(self._folder / "failed", "1")
        left = [r for r, p in enumerate(places) if p.names.get(p.count) == jobs.END]
        codes = [self._status(rank) for rank in left]
        lines = [f"  {_place(rank, place)}" for rank, place in enumerate(places)]
        return self._wrong(
            max(codes, default=1) or 1, "\n".join(["the ranks cannot go on:", *lines]), reports
        )

    def _status(self, rank: int) -> int:
        """The exit status of a rank that is about to end."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                return int((self._folder / f"status.{rank}").read_text())
            time.sleep(_TURN_S)
        return 1

    def _lasts(self, what: str, state: str) -> bool:
        """Whether this state, "" if there is nothing wrong, has been the same for some seconds."""
        before, since = self._since.get(what, ("", 0.0))
        now = time.monotonic()
        if state != before:
            self._since[what] = (state, now)
            return False
        return bool(state) and now - since > _STUCK_S

    def _has(self, name: str, rank: int) -> bool:
        return (self._folder / f"{name}.{rank}").exists()

    def _wrong(self, code: int, why: str, reports: bool | None = None) -> bool:
        """Say why and keep the exit code, unless a rank is about to, whose word then counts."""
        reports = self._reports() if reports is None else reports
        jobs.write_once(self._folder / "failed", str(code))
        self._code = code if reports else int((self._folder / "failed").read_text() or code)
        if reports and why:
            print(f"{why}\nthe job ends", file=sys.stderr, flush=True)
        return True

    def _reports(self) -> bool:
        """Whether the supervisor is to say why the job fails, because no rank has begun to."""
        if jobs.write_once(self._folder / "reporter", "supervisor"):
            return True
        end = time.monotonic() + 2  # a rank that has begun may have been ended before its words
        while not (self._folder / "failed").exists() and time.monotonic() < end:
            self._listen(_TURN_S)
        begun = (self._folder / "reporter").read_text()
        return begun == "supervisor" or not (self._folder / "failed").exists()

    def _signal(self, rank: int, signum: int) -> bool:
        """Send a signal to a rank on this host; False if it is not there."""
        try:
            os.kill(int((self._folder / f"rank.{rank}").read_text()), signum)
        except (OSError, ValueError):
            return False
        return True

    def _state(self, rank: int) -> str:
        """The letter of a rank's state in Linux's /proc, "" if unknown."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            process_id = int((self._folder / f"rank.{rank}").read_text())
            return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        return ""

    def _end(self) -> None:
        """End the launcher and every process of the job. Some launchers give each rank a session."""
        process = self._process
        if process is None:
            return
        memory = {file for each in self._survivors() for file in jobs.shared_memory(each)}
        for told in self._folder.glob("memory.*"):  # of ranks that the launcher has killed, too
            memory |= {Path(line) for line in told.read_text().splitlines()}
        self._drain()
        if process.poll() is None:
            # The launcher first: it would have much to say about the end of its ranks.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elif self._is_through() and self._code is None:
            return
        end = time.monotonic() + 2
        while (survivors := self._survivors()) and time.monotonic() < end:
            for process_id in survivors:
                with contextlib.suppress(OSError):
                    if os.getpgid(process_id) != os.getpgrp():  # with what it has started itself
                        os.killpg(os.getpgid(process_id), signal.SIGKILL)
                    os.kill(process_id, signal.SIGKILL)
            time.sleep(0.01)
        for file in memory:  # that MPI would have removed in its own end
            with contextlib.suppress(OSError):
                file.unlink()

    def _drain(self) -> None:
        """Pass on what the ranks have said to the last, for which launchers take their time."""
        end = time.monotonic() + 1
        while self._listen(0.2) and time.monotonic() < end:
            pass

    def _survivors(self) -> list[int]:
        """Processes of this job on this host: by its folder in their environment, or its ranks."""
        token = f"{jobs.FOLDER}={self._folder}".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if token in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
        if not Path("/proc/self/environ").exists():
            for file in self._folder.glob("rank.*"):
                with contextlib.suppress(OSError, ValueError):
                    found.append(int(file.read_text()))
        return found


def _ending(status: int, agreed: bool) -> str:
    """What a shell's exit status says of a process that ended before the others, or with an error."""
    if status - 128 in list(signal.Signals):
        name = signal.Signals(status - 128).name
        why = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
        return f"was ended by signal {status - 128}, {name}{why}"
    return f"ended with exit code {status}" + ("" if agreed else " before the other ranks")


def _place(rank: int, place: jobs.Place) -> str:
    """One rank's line of the report."""
    name = place.names.get(place.count, "?")
    where = f", called at {place.where}" if place.where else ""
    return f"rank {rank} waits in its collective {place.count}, {name}{where}"


def _end_with_parent() -> None:
    """Let Linux end the launcher, and so the ranks, when the supervisor is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
