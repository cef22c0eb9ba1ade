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
from pathlib import Path
from types import FrameType

from rank0rl.mpi import processes
from rank0rl.mpi.diagnosis import STUCK_S, TURN_S, Diagnosis, ending
from rank0rl.mpi.hosts import Contact, Host
from rank0rl.mpi.streams import Relay

GRACE_S = 8.0  # for rank 0 to write a checkpoint, between a signal or a failure and SIGKILL


class Supervisor:
    """Watches the launcher of n ranks. A signal or a failure is passed to rank 0, then the job ends.

    Args:
        folder: folder of the job.
        nprocs: number of ranks.
        hosts: hosts of the ranks, this one first; none if all ranks are here.
    """

    def __init__(self, folder: Path, nprocs: int, hosts: Sequence[Host] = ()) -> None:
        """Start nothing yet."""
        self._folder = folder
        self._contact = Contact(hosts, folder)
        self._diagnosis = Diagnosis(folder, nprocs, self._contact, self._listen)
        self._process: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._deadline = float("inf")
        self._begin = time.monotonic()
        self._early = b""
        self.lost: list[str] = []
        """Names of the hosts that are gone."""
        self.entered = False
        """True once a rank has come to life."""

    def run(self, command: list[str], env: dict[str, str]) -> int:
        """Run the launcher's command; return the job's exit code, 128 + s after signal s."""
        with self._contact:
            code = self._run(command, env)
            self.lost = list(self._contact.lost()) if code else []
        return code

    @property
    def interrupted(self) -> bool:
        """True if a signal has asked the job to end."""
        return bool(self._received)

    @property
    def output(self) -> str:
        """Output of the launcher before any rank came to life."""
        return self._early.decode(errors="replace")

    def _run(self, command: list[str], env: dict[str, str]) -> int:
        signals = [
            s
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(s) is not signal.SIG_IGN  # nohup ignores SIGHUP
        ]
        before = {s: signal.signal(s, self._handle) for s in signals}
        relay = None
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
            relay = Relay(self._process.stdout)
            while self._process.poll() is None:
                self._listen(TURN_S)
                self._watch()
            if self._process.returncode == 0 and not self._received:
                self._is_wrong()  # while ranks that the launcher has left, if any, still live
        finally:
            self._end()
            if relay:
                relay.close(GRACE_S if self._received else None)
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return self._exit_code(self._process.returncode)

    def _exit_code(self, launcher: int) -> int:
        """Return the exit code of the job, given the launcher's."""
        if self._received:
            return 128 + self._received[0]
        if self._diagnosis.code is None:
            self._is_wrong()
        if self._diagnosis.code is not None:
            return self._diagnosis.code
        if launcher < 0 and self.entered:
            print(f"the launcher {ending(128 - launcher, False)}: the job ends", file=sys.stderr)
        return 128 - launcher if launcher < 0 else launcher

    def _is_wrong(self) -> bool:
        return self._diagnosis.find(self._process.poll() if self._process else None)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._received.append(signum)

    def _listen(self, seconds: float) -> bool:
        """Pass the ranks' stderr on; keep back what the launcher writes before there are ranks.

        Returns:
            True if anything came within so many seconds.
        """
        assert self._process is not None
        assert self._process.stderr is not None
        pipe = self._process.stderr
        self.entered = (
            self.entered
            or any(self._folder.glob("[rf]*[0-9d]"))
            or time.monotonic() - self._begin > STUCK_S  # the ranks may be on other hosts
        )
        data = b""
        with contextlib.suppress(InterruptedError):
            if select.select([pipe], [], [], seconds)[0]:
                data = os.read(pipe.fileno(), 1 << 20)
                if not data:  # the launcher has closed it, and ends
                    time.sleep(min(seconds, TURN_S))
        self._early += data
        if self.entered and self._early:
            sys.stderr.buffer.write(self._early)
            sys.stderr.flush()
            self._early = b""
        return bool(data)

    def _watch(self) -> None:
        """Tell rank 0 once that the job is to end; end it when its time is over or at a second signal."""
        if self._deadline == float("inf"):
            if self._received or self._is_wrong():
                interrupted = self._received[:1] == [signal.SIGINT]
                signum = signal.SIGINT if interrupted else signal.SIGTERM
                sent = processes.send(self._folder, 0, signum)
                self._deadline = time.monotonic() + (GRACE_S if sent else 0)
        elif (
            len(self._received) > 1
            or time.monotonic() > self._deadline
            or not processes.send(self._folder, 0, 0)  # rank 0 has gone, and something waits for it
            or processes.state(self._folder, 0) in ("T", "Z")  # it is stopped, and will not save
        ):
            self._end()

    def _end(self) -> None:
        """End the launcher and every process of the job; remove their shared memory."""
        process = self._process
        if process is None:
            return
        memory = processes.shared_memory(self._folder)
        self._drain()
        if process.poll() is None:
            # The launcher first: it would write much about the end of its ranks.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elif self._diagnosis.ended_well(process.poll()) and self._diagnosis.code is None:
            return
        processes.kill_all(self._folder)
        for file in memory:  # MPI would have removed it at its own end
            with contextlib.suppress(OSError):
                file.unlink()

    def _drain(self) -> None:
        """Pass on what the ranks have written last, which launchers may take a while to deliver."""
        end = time.monotonic() + 1
        while self._listen(0.2) and time.monotonic() < end:
            pass


def _end_with_parent() -> None:
    """Let Linux end the launcher, and so the ranks, when the supervisor is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
