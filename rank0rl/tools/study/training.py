"""Training of a study's runs: one run and its processes, the runs that wait, and the cores that they share.

When fewer runs are left, those with the most work left are stopped at a boundary, and go on with the
cores that have become free. That changes no curve.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from rank0rl.launch import exit_code_after, python
from rank0rl.launch.tree import end_with_parent
from rank0rl.run import files
from rank0rl.run.logger import short
from rank0rl.tools.figures import duration
from rank0rl.tools.study.planned import Planned

Core = tuple[int, ...]
"""The CPUs of a core."""

# Exit codes of training that was told to end: it has saved, or not begun yet.
_SAVED = (exit_code_after(signal.SIGTERM), -signal.SIGTERM)
_TURN_S = 0.2
_SHOW_S = 0.5  # between two tables
_WORTH = 2.0  # times the seconds of a start that more cores must save
_OUTPUT = "output.txt"
_ERROR = re.compile(r"error: |(\w+\.)*\w*(Error|Exception)\b")
_TAIL = 1 << 16  # bytes of a file that hold its first line, or its last one
_COUNT = re.compile(r"[0-9]{1,18}")


def claim(study: Path, name: str = "") -> Callable[[], None] | None:
    """Claim a folder for this process, at most while it lives. The folder is made if there is none.

    Args:
        study: folder of the study.
        name: name of the folder in it. "": the study's own.

    Returns:
        A function that gives the claim up; None if another process has claimed the folder.

    Raises:
        ValueError: if a link leads there.
        OSError: if the file system has no locks: two machines would train the same run.
    """
    folder = _make(study, name)
    try:
        file = files.lock(folder / "claim")
    except OSError as error:
        if error.filename:
            raise
        raise OSError(
            f"a study needs a folder on a file system with locks: {folder} has none ({error}); "
            f"choose another --out"
        ) from error
    return None if file is None else partial(os.close, file)


def _make(study: Path, name: str) -> Path:
    """Make a folder in a study, which may come from someone else; return its path.

    Raises:
        ValueError: if a link leads there.
    """
    folder = study
    for part in Path(name).parts:
        folder /= part
        if folder.is_symlink():
            raise ValueError(
                f"{folder} is a link, and a study writes into its own folder only: remove it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Training:
    """The processes that train a run of a study, one rank for each core. They go on from its last checkpoint.

    Raises:
        ValueError: if a link leads to the run's folder, or it holds one, or what should be a file.
    """

    def __init__(self, planned: Planned, study: Path, cores: Sequence[Core]) -> None:
        self.planned, self.folder, self.cores = planned, _make(study, planned.name), [*cores]
        files.check_folder(self.folder)
        self._is_told = False  # to end
        self.given_up = False  # True if it was stopped, and is not to go on
        # Cores with which it goes on once it has saved; none if it is not to be stopped.
        self.next_cores: list[Core] = []
        command, env = python("-m", "rank0rl", "train", *planned.words)
        command += ["--run-dir", str(self.folder), "--resume", "auto", "--nprocs", str(len(cores))]
        self._begun, self._first = time.monotonic(), self.row()
        self._startup_s: float | None = None
        cpus = {cpu for core in cores for cpu in core}
        with files.append(self.folder / _OUTPUT) as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C comes from the study only
                preexec_fn=partial(_prepare, os.getpid(), cpus),  # noqa: PLW1509
            )

    def poll(self) -> int | None:
        """Return the exit code; None while it trains. Note when its first row is there."""
        if self._startup_s is None and self.row() not in (None, self._first):
            self._startup_s = time.monotonic() - self._begun
        return self._process.poll()

    def stop(self) -> None:
        """Let it save and end. It goes on from there, exactly, when it is trained again."""
        if not self._is_told:  # a second signal would not let it save
            self._process.send_signal(signal.SIGTERM)
        self._is_told = True

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        return self._process.wait()

    def row(self) -> dict[str, str] | None:
        """Return the last complete row of its progress.csv, None if there is none yet."""
        return _last_row(self.folder)

    @property
    def part(self) -> float:
        """The share of the run that is over."""
        return self.planned.part(self.row())

    def times(self) -> tuple[float, float] | None:
        """Return the seconds that this start took until its first row, and those that are left.

        None if it is too early to tell.
        """
        if self._startup_s is None:
            return None
        spent, part = time.monotonic() - self._begun, self.part
        done = part - self.planned.part(self._first)
        if done <= 0:  # no episode has ended yet, or what was lost is made again
            return None
        return self._startup_s, max(0.0, 1 - part) * spent / done


class Runs:
    """The runs in the folder of a study that are not over yet."""

    name = "study"

    def __init__(self, runs: Sequence[Planned], folder: Path) -> None:
        self.folder, self.total = folder, len(runs)
        self._waiting = [run for run in runs if not run.ended(folder)]
        self._claims: dict[str, Callable[[], None]] = {}
        self.over = self.total - len(self._waiting)
        """Number of runs that are over."""
        self.failed: dict[str, str] = {}
        """Run -> why it has failed."""

    def take(self) -> Planned | None:
        """Claim the next run and return it; None if there is none, or other machines have claimed them."""
        for run in [*self._waiting]:
            release = claim(self.folder, run.name)
            if release is None:
                continue
            self._waiting.remove(run)
            if not run.ended(self.folder):
                self._claims[run.name] = release
                return run
            self.over += 1  # another machine has trained it
            release()
        return None

    def waits(self) -> bool:
        """Return True if other machines train, whose runs may have to be taken over."""
        return bool(self._waiting)

    def stops(self, training: Training) -> bool:
        """Return True if a run need not be trained to its end."""
        return False

    def done(self, planned: Planned, code: int) -> None:
        """Record the end of a run, with the exit code of its training; 0 if it was stopped early."""
        self.over += 1
        if code:
            self.failed[planned.name] = _complaint(self.folder / planned.name)
        self._claims.pop(planned.name)()


def train(runs: Runs, cores: Sequence[Core]) -> None:
    """Train runs on these cores until there are no more. However this is left, all has saved and ended then.

    A table shows the runs in training on a terminal. Elsewhere each run that ends has a line.
    """
    console = _Console(runs)
    try:
        _Schedule(runs, cores, console).run()
    finally:
        console.live.stop()


class _Console:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._console = Console(highlight=False)
        self.live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = 0.0
        if self._console.is_terminal:
            self.live.start()

    def show(self, trainings: Sequence[Training]) -> None:
        """Show how far the runs in training have come."""
        if not self.live.is_started or time.monotonic() < self._shown + _SHOW_S:
            return
        self._shown = time.monotonic()
        numbers = ("cores", "done", "return", "time left")
        table = Table("run", *(Column(name, justify="right") for name in numbers), box=None)
        for training in trainings:
            times = training.times()
            table.add_row(
                training.planned.name,
                str(len(training.cores)),
                f"{min(training.part, 1.0):.0%}",
                _return(training.row()),
                duration(times[1]) if times else "",
            )
        table.caption = f"{self._runs.name}: {self._runs.over} of {self._runs.total} runs are over"
        self.live.update(table, refresh=True)

    def over(self, planned: Planned, code: int) -> None:
        """Print that a run has ended, and its return, or why it has failed."""
        runs, folder = self._runs, self._runs.folder / planned.name
        said = f"failed: {_complaint(folder)}" if code else f"return {_return(_last_row(folder))}"
        line = f"{runs.name}, {runs.over} of {runs.total}: {planned.name}  {said}"
        self._console.print(line, soft_wrap=True, markup=False)


def _return(row: dict[str, str] | None) -> str:
    return short(float(row["return_mean"] or "nan")) if row else ""


class _Schedule:
    def __init__(self, runs: Runs, cores: Sequence[Core], console: _Console) -> None:
        self._runs, self._console = runs, console
        self._free = [*cores]
        self._training: list[Training] = []

    def run(self) -> None:
        try:
            self._fill()
            while self._training or self._runs.waits():
                time.sleep(_TURN_S)
                for training in [*self._training]:
                    self._look_at(training)
                self._fill()
                self._console.show(self._training)
        finally:
            for training in self._training:
                training.stop()
            for training in self._training:
                training.wait()

    def _look_at(self, training: Training) -> None:
        """Take back the cores of training that has ended, or start it again if it was stopped for more cores."""
        code = training.poll()
        if code is None:
            if not training.given_up and self._runs.stops(training):
                training.given_up = True
                training.stop()
            return
        self._training.remove(training)
        if code in _SAVED and training.next_cores and not training.given_up:
            self._start(training.planned, training.next_cores)
            return
        self._free += training.next_cores or training.cores
        if code in _SAVED and training.given_up:
            code = 0
        self._runs.done(training.planned, code)
        self._console.over(training.planned, code)

    def _fill(self) -> None:
        """Give free cores to runs that wait; if none waits, to those that have the most work left."""
        starting: list[Planned] = []
        while len(starting) < len(self._free) and (planned := self._runs.take()):
            starting.append(planned)
        each = _spread(len(self._free), [1.0] * len(starting), [p.most for p in starting])
        for planned, number in zip(starting, each, strict=True):
            self._start(planned, self._taken(number))
        if self._free and not any(training.next_cores for training in self._training):
            self._widen()

    def _widen(self) -> None:
        """Stop the runs for which more cores are worth a new start."""
        known = [(training, times) for training in self._training if (times := training.times())]
        if len(known) < len(self._training):
            return  # it is too early to tell
        each = _spread(
            len(self._free) + sum(len(training.cores) for training, _ in known),
            [left_s * len(training.cores) for training, (_, left_s) in known],
            [training.planned.most for training, _ in known],
        )
        for (training, (startup_s, left_s)), number in zip(known, each, strict=True):
            more = min(number - len(training.cores), len(self._free))
            if training.given_up or more <= 0:
                continue
            if left_s * more / number > _WORTH * startup_s:
                training.next_cores = [*training.cores, *self._taken(more)]
                training.stop()

    def _start(self, planned: Planned, cores: Sequence[Core]) -> None:
        self._training.append(Training(planned, self._runs.folder, cores))

    def _taken(self, number: int) -> list[Core]:
        taken, self._free = self._free[:number], self._free[number:]
        return taken


def _spread(cores: int, left_s: Sequence[float], most: Sequence[int]) -> list[int]:
    """Give each core to the run that would end last with the cores that it has; return how many each has.

    `left_s` are the seconds of each run on one core, and `most` is how many it can use. It has at least one.
    """
    each = [1] * len(left_s)
    for _ in range(cores - len(each)):
        may = [i for i in range(len(each)) if each[i] < most[i]]
        if not may:
            break
        each[max(may, key=lambda i: left_s[i] / each[i])] += 1
    return each


def _complaint(folder: Path) -> str:
    """Return the last line that names an error in the output.txt of a run, else its last line."""
    text = files.read(folder / _OUTPUT, "output", sys.maxsize, last=_TAIL).decode(errors="replace")
    lines = [line.strip() for line in text.split("\n")]
    named = [line for line in lines if _ERROR.match(line)] or [line for line in lines if line]
    return named[-1] if named else "it has printed nothing"


def _last_row(folder: Path) -> dict[str, str] | None:
    """Return the last complete row of a run's progress.csv, column -> text.

    None if there is none yet, or if it is not one of a run: resuming the run says what is wrong.
    """
    path = folder / "progress.csv"
    try:
        head, newline, _ = files.read(path, "record", sys.maxsize, first=_TAIL).partition(b"\n")
        tail = files.read(path, "record", sys.maxsize, last=_TAIL)
        lines = tail.rpartition(b"\n")[0].rpartition(b"\n")
        names, values = csv.reader([head.decode(), lines[2].decode()])
        row = dict(zip(names, values, strict=True))
        float(row["return_mean"] or "nan")
        is_row = newline and all(_COUNT.fullmatch(row[name]) for name in ("steps", "episodes"))
    except (ValueError, KeyError, csv.Error):
        return None
    return row if is_row else None


def _prepare(parent: int, cpus: Collection[int]) -> None:
    """Keep a new process to its CPUs, and let it end with its parent."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    end_with_parent(parent)
