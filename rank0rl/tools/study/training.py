"""Train the runs of a study on the cores of this machine.

When fewer runs are left, those with the most work left are stopped at a boundary, and go on with the
cores that have become free. That changes no curve.
"""

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
from pathlib import Path
from typing import Protocol

from rank0rl.launch.failures import exit_code_after
from rank0rl.launch.supervisor import end_with_parent
from rank0rl.tools.study.planned import Planned

Core = tuple[int, ...]
"""The CPUs of a core."""

_OUTPUT = "output.txt"
_ERROR = re.compile(r"error: |(\w+\.)*\w*(Error|Exception)\b")
_TAIL = 1 << 16  # bytes of a CSV file that hold its last row
SAVED = (exit_code_after(signal.SIGTERM), -signal.SIGTERM)
"""Exit codes of training that was told to end: it has saved, or not begun yet."""


class Training:
    """The processes that train a run, one rank for each core.

    Args:
        planned: the run.
        folder: folder of the study.
        cores: cores of its own.
    """

    def __init__(self, planned: Planned, folder: Path, cores: Sequence[Core]) -> None:
        """Start to train, from the last checkpoint if there is one."""
        self.planned, self.folder, self.cores = planned, folder / planned.name, [*cores]
        self.next_cores: list[Core] = []
        """Cores with which it goes on once it has saved; none if it is not to be stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rank0rl", "train", *planned.words]
        command += ["--run-dir", str(self.folder), "--resume", "auto", "--nprocs", str(len(cores))]
        self._begun, self._first = time.monotonic(), self.row()
        self._startup_s = float("nan")
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
        return last_row(self.folder / "progress.csv")

    @property
    def part(self) -> float:
        """The share of the run that is over."""
        row = self.row()
        return self.planned.part(row) if row else 0.0

    def times(self) -> tuple[float, float] | None:
        """Return the seconds that this start took until its first row, and those that are left.

        None if it is too early to tell.
        """
        row = self.row()
        before = self.planned.part(self._first) if self._first else 0.0
        if row is None or row == self._first:
            return None
        spent = time.monotonic() - self._begun
        if self._startup_s != self._startup_s:
            self._startup_s = spent
        done = self.planned.part(row) - before
        if done <= 0:  # no episode has ended yet, or what was lost is made again
            return None
        return self._startup_s, max(0.0, 1 - before - done) * spent / done


def complaint(folder: Path) -> str:
    """Return the last line that names an error in what a run's training has printed, else its last line.

    Args:
        folder: the run's folder.
    """
    with (folder / _OUTPUT).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").split("\n")]
    named = [line for line in lines if _ERROR.match(line)] or [line for line in lines if line]
    return named[-1] if named else "it has printed nothing"


def ended(planned: Planned, folder: Path) -> bool:
    """Return True if a run has ended by itself, and not because it was told to.

    Args:
        planned: the run.
        folder: folder of the study.
    """
    try:
        summary = json.loads((folder / planned.name / "summary.json").read_text())
        by = summary["ended"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(by) and planned.ends(by)


def last_row(path: Path) -> dict[str, str] | None:
    """Return the last complete row of a CSV file, column -> text; None if it has none, or is not there."""
    try:
        with path.open("rb") as file:
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


def spread(cores: int, left_s: Sequence[float], most: Sequence[int]) -> list[int]:
    """Give each core to the run that would end last with the cores that it has so far.

    Args:
        cores: number of cores, at least one for each run.
        left_s: seconds that each run would take on one core.
        most: most cores that each run can use.

    Returns:
        The number of cores of each run, at least 1.
    """
    each = [1] * len(left_s)
    for _ in range(cores - len(each)):
        may = [i for i in range(len(each)) if each[i] < most[i]]
        if not may:
            break
        each[max(may, key=lambda i: left_s[i] / each[i])] += 1
    return each


_TURN_S = 0.2
_WORTH = 2.0  # times the seconds of a start that more cores must save


class Runs(Protocol):
    """The runs that are to be trained, such as a list of them or a search."""

    def take(self) -> Planned | None:
        """Return the next run; None if there is none, now or ever."""

    def waits(self) -> bool:
        """Return True if there may be a next run later, because another machine has claimed it."""

    def stops(self, training: Training) -> bool:
        """Return True if a run need not be trained to its end."""

    def done(self, planned: Planned, code: int) -> None:
        """Take in that a run has ended, with this exit code of its training; 0 if it was stopped."""


class Schedule:
    """Trains runs until there are no more.

    Args:
        runs: the runs.
        folder: folder of the study.
        cores: the cores.
        show: is called again and again with the runs in training.
    """

    def __init__(
        self,
        runs: Runs,
        folder: Path,
        cores: Sequence[Core],
        show: Callable[[Sequence[Training]], None],
    ) -> None:
        """Start nothing yet."""
        self._runs, self._folder, self._show = runs, folder, show
        self._free = [*cores]
        self._training: list[Training] = []
        self._enough: set[str] = set()

    def run(self) -> None:
        """Train. However this is left, all training has saved and ended then."""
        try:
            self._fill()
            while self._training or self._runs.waits():
                time.sleep(_TURN_S)
                for training in [*self._training]:
                    self._look_at(training)
                self._fill()
                self._show(self._training)
        finally:
            for training in self._training:
                training.stop()
            for training in self._training:
                training.wait()

    def _look_at(self, training: Training) -> None:
        """Take back the cores of training that has ended, and let it go on if it was stopped for more."""
        name = training.planned.name
        code = training.poll()
        if code is None:
            if name not in self._enough and self._runs.stops(training):
                self._enough.add(name)
                training.stop()
            return
        self._training.remove(training)
        if code in SAVED and training.next_cores and name not in self._enough:
            self._training.append(Training(training.planned, self._folder, training.next_cores))
            return
        self._free += training.next_cores or training.cores
        self._runs.done(training.planned, 0 if name in self._enough and code in SAVED else code)

    def _fill(self) -> None:
        """Give free cores to runs that wait; if none does, to those that have the most work left."""
        starting: list[Planned] = []
        while len(starting) < len(self._free) and (planned := self._runs.take()):
            starting.append(planned)
        each = spread(len(self._free), [1.0] * len(starting), [p.most for p in starting])
        for planned, number in zip(starting, each, strict=True):
            self._training.append(Training(planned, self._folder, self._taken(number)))
        if self._free and not any(training.next_cores for training in self._training):
            self._widen()

    def _widen(self) -> None:
        """Stop the runs for which more cores are worth a new start."""
        known = [(training, times) for training in self._training if (times := training.times())]
        if len(known) < len(self._training):
            return  # it is too early to tell
        each = spread(
            len(self._free) + sum(len(training.cores) for training, _ in known),
            [left_s * len(training.cores) for training, (_, left_s) in known],
            [training.planned.most for training, _ in known],
        )
        for (training, (startup_s, left_s)), number in zip(known, each, strict=True):
            more = min(number - len(training.cores), len(self._free))
            if training.planned.name in self._enough:
                continue
            if more > 0 and left_s * more / number > _WORTH * startup_s:
                training.next_cores = [*training.cores, *self._taken(more)]
                training.stop()

    def _taken(self, number: int) -> list[Core]:
        """Take so many of the free cores."""
        taken, self._free = self._free[:number], self._free[number:]
        return taken
