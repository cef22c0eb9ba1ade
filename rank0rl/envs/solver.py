"""A program that an environment uses, on ranks of its own: started, talked to under a time limit, and ended in every case."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rank0rl.launch import how_it_ended, job, reaper
from rank0rl.launch.mpiexec import DEFAULT_VARIABLES, OPEN_MPI_FILES, find_mpiexec, vendor

LOG = "solver.log"
"""Name of the file in a solver's folder that gets what it prints and its environment does not read."""
_CLOSE_S = 5.0  # for a solver to end once its input is closed
_REAPED_S = 10.0  # for its reaper to end it
_TURN_S = 0.05  # between two looks at what is waited for; the first ones come sooner
_TOLD_LINES, _TOLD_BYTES = 20, 4000  # last ones of a solver, in an error
_MOST_UNREAD = 1 << 26  # bytes
# MPICH's mpiexec prints a box of lines on stdout about ranks that a signal has ended.
_END_OF_MPICH = b"\n" + b"=" * 60
_BOX_BYTES = 200  # of the box, and "BAD TERMINATION" is among them
_BEGUN_S = 0.5  # for the next piece of it, after an empty line or more


class SolverError(RuntimeError):
    """A solver has ended too early, or was ended because it took too long. The message has its last lines."""


class Solver:
    """A program on ranks of its own, for an environment, with which it ends at the latest.

    mpiexec starts it, or srun within an allocation of Slurm, without the variables of this job's launcher. A single
    rank is started without them. The program ends with this process too, however that ends, and with it all that it has
    started.

    Args:
        command: program and arguments, as a list, or as one text that is split as a shell does. A program that is
            not in `folder` is looked for in that of this process.
        ranks: number of its ranks.
        folder: its working folder, which gets its log. By default that of this process, and no log.
        timeout: seconds that a call of a method may take.
        pipes: True to talk by `write` and `readline`: rank 0 reads its standard input, and all ranks print. False to
            talk by files or a socket: then all that it prints is in the log.
        launcher: words before the command in place of mpiexec's, with the number of ranks, such as
            ["mpiexec", "-n", "4", "--bind-to", "core"].

    Raises:
        ValueError: if it needs mpiexec and there is none.
        OSError: if there is no such folder.
    """

    def __init__(
        self,
        command: str | Sequence[str | os.PathLike[str]],
        ranks: int = 1,
        folder: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        pipes: bool = True,
        launcher: Sequence[str] | None = None,
    ) -> None:
        words = (
            shlex.split(command)
            if isinstance(command, str)
            else [os.fspath(word) for word in command]
        )
        launcher = _launcher(ranks) if launcher is None else launcher
        if os.sep in words[0] and Path(words[0]).exists():
            words[0] = os.path.abspath(words[0])  # it starts in another folder
        words = [*launcher, *words]
        # Open MPI 5.0 does not pass on the end of the input: github.com/openpmix/openpmix/pull/4024
        self._mpi = vendor(launcher[0]) if launcher else ""
        self._hears_end = pipes and self._mpi != "Open MPI"
        self._timeout, self._said, self._over = timeout, b"", False
        self._name = f"the solver {shlex.join(words)}"
        self._control: int | None = None
        self._log: IO[bytes]
        self._log = Path(folder, LOG).open("a+b") if folder else tempfile.TemporaryFile()  # noqa: SIM115
        files = Path(tempfile.mkdtemp(prefix="rank0rl-solver-", dir=job.my_folder()))
        try:
            self._reaper, self._control = reaper.start(
                words,
                files,
                cwd=folder,
                env=_variables(files),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else self._log,
                stderr=self._log,
                bufsize=0,
            )
        except BaseException:
            self._log.close()
            files.rmdir()
            raise
        if self._reaper.stdin:
            os.set_blocking(self._reaper.stdin.fileno(), False)

    def write(self, text: str) -> None:
        """Write text, such as a line and its line break, to the standard input of rank 0.

        Raises:
            SolverError: if the solver has ended, or does not read in time.
            ValueError: without pipes.
        """
        self._need_pipes()
        data = text.encode()
        for _ in self._turns("read its input", writes=True):
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                data = data[os.write(self._reaper.stdin.fileno(), data) :]  # type: ignore[union-attr]
            if not data:
                return

    def readline(self) -> str:
        """Return the next line that the solver prints, without its line break.

        Raises:
            SolverError: if the solver has ended, or prints no line in time.
            ValueError: without pipes.
        """
        self._need_pipes()
        for _ in self._turns("print a line"):
            if self._mpi in ("MPICH", "Intel MPI") and self._is_end_of_mpich():
                continue
            line, end, rest = self._said.partition(b"\n")
            if end:
                self._said = rest
                return line.decode(errors="replace")
        raise AssertionError

    def _need_pipes(self) -> None:
        if self._reaper.stdin is None:
            raise ValueError(
                "a solver with pipes=False is neither written to nor read: use files or a socket"
            )

    def _is_end_of_mpich(self) -> bool:
        """Return True if what has been printed, but not read, is of mpiexec and not of the solver."""
        seen = b""
        while seen != self._said and len(self._said) < _BOX_BYTES:
            seen = self._said
            if not _END_OF_MPICH.startswith(seen[: len(_END_OF_MPICH)]):
                break
            self._listen(_BEGUN_S)  # it comes in pieces
        box = self._said[:_BOX_BYTES]
        return box.startswith(_END_OF_MPICH) and b"BAD TERMINATION" in box

    def wait_for(self, ready: Callable[[], Any]) -> None:
        """Wait until `ready` returns something true, such as that a file is there.

        Raises:
            SolverError: if the solver ends before, or it takes too long.
        """
        for _ in self._turns("get ready"):
            if ready():
                return

    def wait(self) -> None:
        """Wait until the solver has ended by itself.

        Raises:
            SolverError: if its exit code is not 0, or it takes too long.
        """
        for _ in self._turns("end", until_end=True):
            if self._over:
                if code := self._reaper.wait():
                    raise self._error(how_it_ended(code))
                return

    def close(self) -> None:
        """Close the solver's input, and end it if it goes on. If it has ended, nothing is done.

        One that does not hear of the end of its input, because it talks by files or is started by Open MPI, gets SIGTERM.

        Raises:
            SolverError: if it hears of it, and has not ended within 5 s.
        """
        if self._control is None:
            return
        late = False
        if self._hears_end and self._reaper.stdin and not self._over:
            self._reaper.stdin.close()
            end = time.monotonic() + _CLOSE_S
            while not self._over and not (late := time.monotonic() > end):
                self._listen(_TURN_S)
        error = (
            self._error(f"did not end within {_CLOSE_S:g} s after its input was closed")
            if late
            else None
        )
        self._end()
        if error:
            raise error

    def _turns(self, what: str, writes: bool = False, until_end: bool = False) -> Iterator[None]:
        """Yield again and again while the solver is waited for."""
        end, pause_s = time.monotonic() + self._timeout, 0.001
        if self._control is None:
            raise SolverError(f"{self._name} is closed: make a new one")
        while True:
            yield
            if self._over:
                raise self._error(how_it_ended(self._reaper.wait()))
            if time.monotonic() > end:
                raise self._error(f"did not {what} within {self._timeout:g} s, and was ended")
            self._listen(pause_s, writes)
            pause_s = min(2 * pause_s, _TURN_S)

    def _listen(self, seconds: float, writes: bool = False) -> None:
        """Keep what the solver says within so many seconds; return at once when it says anything, or can be written to."""
        out = self._reaper.stdout
        if out is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(seconds)
                self._over = True
            return
        poll = select.poll()
        poll.register(out, select.POLLIN)
        if writes and self._reaper.stdin:
            poll.register(self._reaper.stdin, select.POLLOUT)
        if out.fileno() in dict(poll.poll(1000 * seconds)):
            data = os.read(out.fileno(), 1 << 16)
            self._said += data
            self._over = not data
        if len(self._said) > _MOST_UNREAD:
            raise self._error(
                f"has printed {_MOST_UNREAD:,} bytes that nobody reads: use pipes=False"
            )

    def _error(self, why: str) -> SolverError:
        """End the solver; return the error that says why, with its last lines."""
        self._end()
        return SolverError("\n".join([f"{self._name} {why}", *self._told]))

    def _end(self) -> None:
        if self._control is None:
            return
        os.close(self._control)
        self._control = None
        with contextlib.suppress(OSError):
            os.killpg(self._reaper.pid, signal.SIGCONT)  # one of them may have been stopped
        try:
            self._reaper.wait(_REAPED_S)
        except subprocess.TimeoutExpired:  # it was stopped
            self._reaper.kill()
            self._reaper.wait()
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TOLD_BYTES))
        said = self._log.read() + self._said[-_TOLD_BYTES:]
        self._told = said.decode(errors="replace").splitlines()[-_TOLD_LINES:]
        for file in (self._log, self._reaper.stdin, self._reaper.stdout):
            if file:
                file.close()

    def __del__(self) -> None:
        """End the solver with the environment that has forgotten it."""
        control = getattr(self, "_control", None)
        if control is not None:
            os.close(control)


def _launcher(ranks: int) -> list[str]:
    """Return the words that start a program on so many ranks, on this host where they fit."""
    if ranks == 1:
        return []
    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        here = os.environ.get("SLURMD_NODENAME", platform.node())
        near = [f"--nodelist={here}", "--nodes=1"] if ranks <= (os.cpu_count() or 1) else []
        return ["srun", "--overlap", "--exact", *near, f"--ntasks={ranks}"]
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise ValueError(
            "a solver on several ranks needs mpiexec, and none was found beside this Python or on PATH: pip install "
            "mpich, or pass `launcher`"
        )
    return [mpiexec, "-n", str(ranks)]


def _variables(files: Path) -> dict[str, str]:
    """Return the variables of a solver, whose temporary files belong into a folder."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RANK0RL_")}
    own = {"TMPDIR": str(files), OPEN_MPI_FILES: str(files)}
    return {**DEFAULT_VARIABLES, **job.without_rank(ours), **own}
