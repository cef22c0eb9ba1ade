"""One run of a study: its claim by one machine, the processes that train it, and what they have written."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rank0rl.launch.failures import exit_code_after
from rank0rl.launch.supervisor import end_with_parent
from rank0rl.tools.study.planned import Planned

Core = tuple[int, ...]
"""The CPUs of a core."""
SAVED = (exit_code_after(signal.SIGTERM), -signal.SIGTERM)
"""Exit codes of training that was told to end: it has saved, or not begun yet."""

_OUTPUT = "output.txt"
_ERROR = re.compile(r"error: |(\w+\.)*\w*(Error|Exception)\b")
_TAIL = 1 << 16  # bytes of a file that hold its last line


def claim(folder: Path) -> Callable[[], None] | None:
    """Claim a folder for this process, at most while it lives. The folder is made if there is none.

    Returns:
        A function that gives the claim up; None if another process has claimed the folder.

    Raises:
        OSError: if the file system has no locks: two machines would train the same run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A file system that machines share knows the locks of files that are open for writing.
    file = os.open(folder / "claim", os.O_RDWR | os.O_CREAT)
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return None
            raise OSError(
                f"a study needs a folder on a file system with locks: {folder} has none ({error}); "
                f"choose another --out"
            ) from error
    return partial(os.close, file)


class Training:
    """The processes that train a run, one rank for each core. They go on from its last checkpoint.

    Args:
        planned: the run.
        folder: folder of the study.
        cores: cores of its own.
    """

    def __init__(self, planned: Planned, folder: Path, cores: Sequence[Core]) -> None:
        self.planned, self.folder, self.cores = planned, folder / planned.name, [*cores]
        self.given_up = False
        """True if it was stopped, and is not to go on."""
        self.next_cores: list[Core] = []
        """Cores with which it goes on once it has saved; none if it is not to be stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rank0rl", "train", *planned.words]
        command += ["--run-dir", str(self.folder), "--resume", "auto", "--nprocs", str(len(cores))]
        self._begun, self._first = time.monotonic(), self.row()
        self._startup_s: float | None = None
        with (self.folder / _OUTPUT).open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C comes from the study only
                preexec_fn=_prepared(self.cores),  # noqa: PLW1509
            )

    def poll(self) -> int | None:
        """Return the exit code; None while it trains."""
        return self._process.poll()

    def stop(self) -> None:
        """Let it save and end. It goes on from there, exactly, when it is trained again."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        return self._process.wait()

    def row(self) -> dict[str, str] | None:
        """Return the last complete row of its progress.csv, None if there is none yet."""
        return last_row(self.folder)

    @property
    def part(self) -> float:
        """The share of the run that is over."""
        return self._part(self.row())

    def _part(self, row: dict[str, str] | None) -> float:
        return self.planned.part(row) if row else 0.0

    def times(self) -> tuple[float, float] | None:
        """Return the seconds that this start took until its first row, and those that are left.

        None if it is too early to tell.
        """
        row = self.row()
        if row is None or row == self._first:
            return None
        spent = time.monotonic() - self._begun
        if self._startup_s is None:
            self._startup_s = spent
        part = self._part(row)
        done = part - self._part(self._first)
        if done <= 0:  # no episode has ended yet, or what was lost is made again
            return None
        return self._startup_s, max(0.0, 1 - part) * spent / done


def complaint(folder: Path) -> str:
    """Return the last line that names an error in the output.txt of a run, else its last line."""
    with (folder / _OUTPUT).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").split("\n")]
    named = [line for line in lines if _ERROR.match(line)] or [line for line in lines if line]
    return named[-1] if named else "it has printed nothing"


def ended(planned: Planned, study: Path) -> bool:
    """Return True if a run in the folder of a study has ended by itself, and not because it was told to."""
    try:
        by = json.loads((study / planned.name / "summary.json").read_text())["ended"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(by) and planned.ends(by)


def last_row(folder: Path) -> dict[str, str] | None:
    """Return the last complete row of a run's progress.csv, column -> text; None if there is none yet."""
    try:
        with (folder / "progress.csv").open("rb") as file:
            head = file.readline()
            file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - _TAIL))
            complete, newline, _ = file.read().rpartition(b"\n")
    except OSError:
        return None
    if not newline:
        return None
    names, values = csv.reader([head.decode(), complete.rpartition(b"\n")[2].decode()])
    return dict(zip(names, values, strict=True)) if len(names) == len(values) else None


def _prepared(cores: Sequence[Core]) -> Callable[[], None]:
    """Return what a new process does first: it keeps to its cores, and ends with this process."""
    parent = os.getpid()

    def prepare() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cpu for core in cores for cpu in core})
        end_with_parent(parent)

    return prepare
