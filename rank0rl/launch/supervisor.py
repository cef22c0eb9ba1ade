"""Watch a job, and end it as a whole when something is wrong with it or a signal comes.

The supervisor is a plain process beside the ranks. It goes on while a rank hangs, and no rank can
take it down.
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
from functools import partial
from pathlib import Path
from types import FrameType

from rank0rl.launch import job, processes
from rank0rl.launch.failures import STUCK_S, SUCCESS, TURN_S, FailureDetector, exit_code_after
from rank0rl.launch.hosts import Host, SshSessions
from rank0rl.launch.streams import Relay

GRACE_S = 8.0  # for rank 0 to write a checkpoint, between a signal or a failure and SIGKILL
_DELIVERY_S = 3.0  # for the launcher to pass on the last words of a rank


class Signals:
    """The signals that ask a job to end, kept while entered."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Signals:
        """Keep signals from now on."""
        kept = [
            s
            for s in (signal.SIGINT, signal.SIGHUP, *job.END_SIGNALS)
            if signal.getsignal(s) is not signal.SIG_IGN  # nohup ignores SIGHUP
        ]
        self._before = {s: signal.signal(s, self._keep) for s in kept}
        return self

    def wait(self, seconds: float) -> None:
        """Wait for a signal, for so many seconds."""
        end = time.monotonic() + seconds
        while not self.received and time.monotonic() < end:
            time.sleep(TURN_S)

    def __exit__(self, *_: object) -> None:
        """Handle signals as before; once one has come, ignore others, which would change the exit code."""
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if self.received else handler)

    def _keep(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signum)


class Supervisor:
    """Watches the launcher of n ranks. A signal or a failure is passed to rank 0, then the job ends.

    This host is the first one of `hosts`, which are none if all ranks are here. A rank may take
    `start_timeout_s` to start after others have.
    """

    def __init__(
        self,
        folder: Path,
        nprocs: int,
        hosts: Sequence[Host],
        signals: Signals,
        start_timeout_s: float,
    ) -> None:
        self._folder, self._nprocs = folder, nprocs
        self._received = signals.received
        self._ssh = SshSessions(hosts, folder)
        self._failures = FailureDetector(folder, nprocs, self._ssh, self._listen, start_timeout_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = float("inf")
        self._begin = time.monotonic()
        self._begun = 0  # number of ranks whose shell has begun
        self._early = b""
        self._held = self._rest = b""
        self.lost: list[str] = []
        """Names of the hosts that are gone."""

    def run(self, command: list[str], env: dict[str, str]) -> int | None:
        """Run the launcher's command.

        Returns:
            The job's exit code, 128 + s after signal s; None if the launcher ended without having
            started a rank.
        """
        with self._ssh:
            code = self._run(command, env)
            self.lost = list(self._ssh.lost()) if code else []
        return code

    @property
    def output(self) -> str:
        """Output of the launcher before the first rank began."""
        return self._early.decode(errors="replace")

    @property
    def launcher(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        return self._process.poll() if self._process else None

    def _run(self, command: list[str], env: dict[str, str]) -> int | None:
        relay = None
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
            while not self._is_over():
                self._listen(TURN_S)
        finally:
            self._end()
            if relay:
                relay.close(GRACE_S if self._received else None)
        return exit_code_after(self._received[0]) if self._received else self._failures.code

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
        if self._held and (known or time.monotonic() - self._begin > STUCK_S):
            sys.stderr.buffer.write(self._held)
            sys.stderr.flush()
            self._held = b""
        return bool(data)

    def _is_over(self) -> bool:
        """Return True if the job has ended, or has to end now. Rank 0 is told first, and given time to save."""
        if self._deadline == float("inf"):
            launcher = self.launcher
            if launcher is not None:
                self._drain()  # files from other hosts may be in it
            if not self._received:
                self._received += job.interruption(self._folder)
            found = not self._received and self._failures.find(launcher)
            if self._failures.code == SUCCESS:
                return True
            if self._received or found:
                asked = [s for s in self._received[:1] if s != signal.SIGHUP]
                signum = asked[0] if asked else signal.SIGTERM
                sent = processes.send(self._folder, 0, signum)
                self._deadline = time.monotonic() + (GRACE_S if sent else 0)
                return False
            return launcher is not None
        is_late = time.monotonic() > self._deadline
        return len(self._received) > 1 or is_late or not self._rank0_can_save()

    def _rank0_can_save(self) -> bool:
        """Return True if rank 0 is there, and is neither stopped nor a zombie."""
        shell = processes.shell(self._folder, 0)
        stays = shell is not None and processes.state(shell.rank_id) in ("T", "Z")
        return processes.send(self._folder, 0, 0) and not stays

    def _end(self) -> None:
        """End the launcher and every process of the job; remove MPI's files."""
        process = self._process
        if process is None:
            return
        self._drain()
        if process.poll() is None:
            # The launcher first: it would write much about the end of its ranks.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            processes.kill_all(self._folder)
        elif self._failures.code != SUCCESS:
            processes.kill_all(self._folder)
        processes.remove_mpi_files(self._folder)

    def _drain(self) -> None:
        """Pass on what the ranks have written last, which launchers may take a while to deliver."""
        begin = time.monotonic()
        while (
            self.launcher is None
            and len(self._received) < 2  # who asks twice is in a hurry
            and processes.words_under_way(self._folder, self._nprocs)
            and time.monotonic() < begin + _DELIVERY_S
        ):
            self._listen(TURN_S)
        begin = time.monotonic()
        while self._listen(0.2) and time.monotonic() < begin + 1:
            pass


def _prepare_launcher(parent: int) -> None:
    """Let the launcher outlast what a batch system sends, until rank 0 has saved, but not its parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, job.END_SIGNALS)
    end_with_parent(parent, signal.SIGINT)


def end_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Let Linux end this process, such as the launcher, when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
