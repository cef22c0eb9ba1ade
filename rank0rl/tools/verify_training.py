"""Train a recorded run again by the command line, for `python -m rank0rl verify`."""

from __future__ import annotations

import csv
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from rank0rl.launch.supervisor import end_with_parent
from rank0rl.options import flag
from rank0rl.run import settings as config
from rank0rl.tools.verify_record import OF_A_START, Part, Record

_LOOK_S = 0.2  # seconds between two looks at the record: nothing beside an iteration's own work

# What costs time, or is for another machine, and leaves the curve as it is.
_WITHOUT = (
    *("--quiet", "--trust", "--no-tensorboard", "--wandb", "None", "--video-every", "None"),
    *("--rank0-envs", "None", "--learner-threads", "None"),
    *("--stop-at-return", "None", "--patience", "None"),  # the last iteration is given
    *("--checkpoint-every", "1000000000", "--keep-checkpoints", "1"),
)


def begin(record: Record, run: Path) -> list[str]:
    """Return the options that begin a recorded run again, in another folder."""
    settings = run.with_name("settings.toml")
    config.write(settings, {**record.settings, **record.parts[0].settings}, {})
    return ["--config", str(settings), "--run-dir", str(run)]


def resume(part: Part, run: Path) -> list[str]:
    """Return the options that go on with a run as one of its starts did."""
    its_own = [f"{flag(name)}={part.settings.get(name)}" for name in sorted(OF_A_START)]
    return ["--resume", str(run), *its_own]


def trained(
    words: Sequence[str], run: Path, until: int, nprocs: int
) -> Generator[dict[str, str], None, None]:
    """Train up to an iteration; yield the rows that this adds to the record, as soon as they are there.

    To close the generator ends the training.

    Args:
        words: options of training, from `begin` or `resume`.
        run: the folder of the training.
        until: the last iteration.
        nprocs: number of ranks.

    Raises:
        ValueError: if the training fails, with what it said.
    """
    given = [*words, *_WITHOUT, "--stop-after-iterations", str(until), "--nprocs", str(nprocs)]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        rows = _Follower(run / "progress.csv")
        process = subprocess.Popen(
            [sys.executable, "-m", "rank0rl", "train", *given],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes from here only
            preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509
        )
        try:
            ended = False
            while not ended:
                ended = process.poll() is not None
                yield from rows.more()
                time.sleep(0 if ended else _LOOK_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            said.seek(0)
            lines = said.read().strip().splitlines()
        if process.returncode:
            raise ValueError(_why(lines, process.returncode))
        for line in lines:  # such as that the episode of an environment cannot be repeated
            print(line)


def _why(lines: Sequence[str], code: int) -> str:
    """Return why a training has failed: its one line for a wrong use, else all that it has said."""
    _, error, wrong = "\n".join(lines).rpartition("error: ")
    if code == 2 and error:
        return f"the run cannot be trained again: {wrong}"
    return "\n".join([f"to train again failed with exit code {code}:", *lines])


class _Follower:
    """Reads a CSV file while it is written.

    Args:
        path: the file. Rows that it has already are not read.
    """

    def __init__(self, path: Path) -> None:
        """Begin after what there is."""
        self._path, self._names = path, list[str]()
        self._read = path.stat().st_size if path.exists() else 0

    def more(self) -> Iterator[dict[str, str]]:
        """Yield the rows that were completed since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if not self._names:
                header = file.readline()
                if not header.endswith(b"\n"):
                    return
                [self._names] = csv.reader([header.decode()])
                self._read = max(self._read, len(header))
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        for cells in csv.reader(new.decode().splitlines(keepends=True)):
            yield dict(zip(self._names, cells, strict=True))
