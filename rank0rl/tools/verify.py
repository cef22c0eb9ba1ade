"""python -m rank0rl verify RUN: train a run again from its settings, and compare it with its record.

Every column of progress.csv but times and memory must be the same, row by row. The first row that is
not ends the training. Each start of the run is repeated from the iteration that it went on from. With
--sample, only a few iterations are repeated, each time after a checkpoint that was kept.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from rank0rl.envs.make import FOLDERS
from rank0rl.launch import python, usage_error
from rank0rl.launch.tree import end_with_parent
from rank0rl.mpi import weights
from rank0rl.options import check, flag, names, option
from rank0rl.run import checkpoint, code, files, machine, settings
from rank0rl.run.logger import check_rows, read_rows
from rank0rl.run.options import RunOptions
from rank0rl.run.record import NOT_OF_THE_CURVE
from rank0rl.run.trust import FUNCTIONS, trusted
from rank0rl.tools.evaluate import RunToLoad

_SAY_S = 10.0  # seconds between two lines of progress
_LOOK_S = 0.5  # seconds between two looks at the record, which is read as a whole if it has changed
_SHARE = 0.05  # of the run's time, for a sample
_FOR_STEPS = 0.5  # share of that for iterations; the rest is for starting ranks
_MOST = 10  # iterations after a checkpoint: more of them prove little more
_START_S = 10.0  # seconds of iterations on one rank that are not worth the start of others
# Settings that a start may change although they change the curve, such as total_steps.
_OF_A_START = names(RunOptions, changes_curve=True, resume=True)
_CODE = {"algo", *FUNCTIONS}  # files, which may have moved
_NOT_IN_SUMMARY = {
    *("algo", "nprocs", "ranks_per_env", "seconds", "steps_per_s", "idle_of_ranks", "ended"),
    *("fingerprint", "updates"),
}
# What costs time, or is for another machine, and leaves the curve as it is.
_WITHOUT = (
    *("--quiet", "--trust", "--no-tensorboard", "--wandb", "None", "--video-every", "None"),
    *("--rank0-envs", "None", "--learner-threads", "None"),
    *("--stop-at-return", "None", "--patience", "None"),  # the last iteration is given
    *("--checkpoint-every", "1000000000", "--keep-checkpoints", "1"),
)


@dataclass(frozen=True)
class Options(RunToLoad):
    """Train a run again in a temporary folder, and compare every row with the run's progress.csv."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, with its config.toml and progress.csv. Nothing in it is changed."""
    nprocs: int | None = option(None, "[1, inf)")
    """Number of ranks. It changes how long this takes, and nothing else. None: as many as the run's, and at most one per core; one for a short --sample."""
    rows: int | None = option(None, "[1, inf)")
    """Verify this many iterations, the first ones. None: all."""
    sample: bool = False
    """Verify a few iterations after some of the checkpoints that were kept, until 5 % of the run's time is used. At least one checkpoint is taken, so a short run takes longer. See --keep-checkpoints spread:10."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0 if all is the same, 1 if not, 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl verify")
    try:
        check(given)
        if given.sample and given.rows:
            raise ValueError("--sample chooses the rows by itself: leave --rows or --sample out")
        record = _read(given.run, given.rows, given.trust)
        with tempfile.TemporaryDirectory(prefix="rank0rl-verify-") as folder:
            run = Path(folder, "run")
            try:
                print((_sample if given.sample else _whole)(record, run, given.nprocs))
            except _DifferentError as error:
                _say(error, run, given.run)
                return 1
    except ValueError as error:
        return usage_error(str(error))
    return 0


class _DifferentError(Exception):
    """A run that was made again differs: in the values of the lines `what`, with the record `start`."""

    def __init__(
        self, where: str, what: Sequence[str] = (), start: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(where)
        self.what, self.start = what, start


def _say(error: _DifferentError, run: Path, folder: Path) -> None:
    """Print what differs between the run in a folder and the one that has been trained again, and what may be the reason."""
    print(f"NOT the same: {error}")
    for line in error.what:
        print(f"  {line}")
    if error.start is None:
        return
    here = settings.starts(run / "config.toml")[-1]
    lines = machine.differences(error.start, here, "  {name}: {before} in the record, {now} here")
    if changed := code.difference(code.kept(folder, error.start), code.kept(run, here)):
        lines += ["  code has changed:", *(f"    {line}" for line in changed)]
    same = "versions and fingerprint are those of the record"
    print(*(["what else differs, and may be the reason:", *lines] if lines else [same]), sep="\n")


@dataclass(frozen=True)
class _Part:
    """The iterations that one start of a run has made."""

    after: int  # 0 in the first part
    until: int  # the last one
    start: dict[str, Any]  # its record: settings, versions, machine, command

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `_OF_A_START` that are not None."""
        return {n: value for n, value in self.start["settings"].items() if n in _OF_A_START}


@dataclass(frozen=True)
class _Record:
    """The contents of a run's config.toml, progress.csv and summary.json."""

    folder: Path
    settings: dict[str, Any]  # all that are not None, but for those of the parts
    parts: list[_Part]  # in order, without iterations that a later start has made again
    rows: dict[int, dict[str, str]]  # by iteration; there may be fewer rows than iterations
    summary: dict[str, Any]  # {} if there is no summary.json
    made: int  # iterations that the run has made
    trust: bool  # the user trusts all code that the run names

    @property
    def last(self) -> int:
        """Number of iterations to verify."""
        return self.parts[-1].until

    @property
    def nprocs(self) -> int:
        """Number of ranks of the first start, 1 if it is not recorded."""
        return _integer(self.parts[0].start.get("nprocs", 1), self.folder / "config.toml")

    def part(self, point: int) -> _Part:
        """Return the part of the run that goes on from a checkpoint of iteration `point`."""
        return next(part for part in reversed(self.parts) if part.after <= point)


def _read(folder: Path, most: int | None, trust: bool) -> _Record:
    """Read what a run has recorded, up to iteration `most`."""
    path, file = folder / "progress.csv", folder / "config.toml"
    table = files.read_table(path, "record")
    try:
        rows = {int(row["iteration"]): row for row in table}
    except (KeyError, ValueError):
        rows = {}
    if not rows or [*rows] != sorted(rows) or len(rows) < len(table) or min(rows) < 1:
        raise ValueError(
            f"{path} must have a row for each iteration, or for some of them, in order: put the run's own file back"
        )
    given = trusted(settings.load(file), str(file), None, trust)
    there = (folder / "summary.json").exists()
    summary = files.read_json(folder / "summary.json", "summary") if there else {}
    last = max(*rows, _integer(summary.get("iterations", 0), folder / "summary.json"))
    if most is not None and most < min(rows):
        raise ValueError(f"the first row of {path} is of iteration {min(rows)}: got --rows {most}")
    parts = _parts(file, last if most is None else min(last, most))
    given = code.with_copies(given, folder, parts[0].start) if trust else given
    kept = {name: value for name, value in given.items() if name not in _OF_A_START}
    return _Record(folder, kept, parts, rows, summary, last, trust)


def _parts(file: Path, last: int) -> list[_Part]:
    """Return the parts of a run that still count, up to an iteration."""
    kept = settings.starts(file, that_count=True)
    ends = [*(start["iteration"] for start in kept[1:]), last][: len(kept)]
    parts = [
        _Part(start["iteration"], min(end, last), start)
        for start, end in zip(kept, ends, strict=True)
        if start["iteration"] < last
    ]
    if not parts or parts[0].after:
        raise ValueError(
            f"{file} must have a table [[record]] for each start of the run, the first one from iteration 0: put the run's own file back"
        )
    first = code.recorded(parts[0].start)
    for part in parts:
        if code.recorded(part.start) != first:
            raise ValueError(
                f"the code of this run was changed after iteration {part.after} (--changed-code): to verify it up to "
                f"there, put back what {file.parent / 'code'} has of its first start, and add --rows {part.after}"
            )
    return parts


def _integer(number: Any, file: Path) -> int:
    if type(number) is int:
        return number
    raise ValueError(f"{file}: expected a whole number, got {number!r}")


def _compare(
    where: str,
    recorded: Mapping[str, Any],
    again: Mapping[str, Any],
    but: Container[str],
    start: Mapping[str, Any],
) -> None:
    """Raise _DifferentError if a recorded value, but for those of some names, is another one now."""
    what = [
        f"{name}: recorded {value}, now {again.get(name, '') or 'absent'}"
        for name, value in recorded.items()
        if name not in but and str(value) != str(again.get(name, ""))
    ]
    if what:
        raise _DifferentError(f"{where} differs", what, start)


def _whole(record: _Record, run: Path, nprocs: int | None) -> str:
    """Train a run again in a folder, with all its starts; return what was verified."""
    nprocs = nprocs or min(record.nprocs, len(machine.available_cores()))
    found = _checked(record) if record.last == record.made else ()
    kept = {point: (file, weights.sha256_tensors(saved["weights"])) for point, file, saved in found}
    compared, said = 0, time.monotonic()
    for part in record.parts:
        own = [f"{flag(name)}={part.settings.get(name)}" for name in sorted(_OF_A_START)]
        words = ["--resume", str(run), *own] if part.after else _begin(record, run)
        for made in _repeated(record, part.start, words, run, (part.after, part.until), nprocs):
            compared += made in record.rows
            if time.monotonic() - said >= _SAY_S:
                said = time.monotonic()
                print(f"the same up to iteration {made} of {record.last}", flush=True)
    summary = files.read_json(run / "summary.json", "summary")
    if record.summary.get("iterations") == summary["iterations"]:
        where, start = f"summary.json, of iteration {record.last},", record.parts[-1].start
        _compare(where, record.summary, summary, _NOT_IN_SUMMARY, start)
    for row in read_rows(run):  # which has all of them
        file, sha256 = kept.get(int(row["iteration"]), (None, row["weights_sha256"]))
        if not sha256.startswith(row["weights_sha256"]):
            raise _DifferentError(f"{file} has other weights than the run, trained again")
    columns = {*record.rows[min(record.rows)]} - NOT_OF_THE_CURVE
    starts = f", over {len(record.parts)} starts" if len(record.parts) > 1 else ""
    return (
        f"verified to iteration {record.last} of {record.made}: {compared} rows, all {len(columns)} "
        f"columns but times and memory{f', and checkpoints: {len(kept)}' * bool(kept)}{starts}"
    )


def _sample(record: _Record, run: Path, nprocs: int | None) -> str:
    """Check the kept checkpoints, and repeat a few iterations after some; return what was verified."""
    begun = time.monotonic()
    if len(record.rows) < record.last or "seconds" not in record.rows[record.last]:
        raise ValueError(
            f"--sample resumes checkpoints, which needs the whole progress.csv: got {len(record.rows)} rows of {record.last} iterations; leave --sample out"
        )
    kept, points = _resumable(record)
    seconds = float(record.rows[record.last]["seconds"])
    length = min(max(int(record.last * _SHARE * _FOR_STEPS / len(points)), 1), _MOST)
    is_short = length * seconds / record.last * record.nprocs < _START_S
    cores = len(machine.available_cores())
    nprocs = nprocs or (1 if is_short else min(record.nprocs, cores))
    done = iterations = 0
    longest = 0.0
    for point in _far_apart(points):
        start = time.monotonic()
        if done and start + longest - begun > _SHARE * seconds:
            break
        part = record.part(point)
        shutil.rmtree(run, ignore_errors=True)
        words = _resume_copy(record, kept[point], run) if point else _begin(record, run)
        until = min(point + length, part.until)
        iterations += len([*_repeated(record, part.start, words, run, (point, until), nprocs)])
        done += 1
        longest = max(longest, time.monotonic() - start)
    took = time.monotonic() - begun
    return (
        f"verified a sample of {record.last} iterations: {len(kept)} checkpoints belong to the record, and {iterations} iterations "
        f"after {done} of them are the same; it took {took:.1f} s, {took / seconds:.1%} of the run's {seconds:.1f} s"
    )


def _checked(record: _Record) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """Check settings and weights of every numbered checkpoint of a whole record; yield iteration, file and contents of each."""
    starts = settings.starts(record.folder / "config.toml")
    for file in checkpoint.numbered(record.folder):
        if (point := int(file.stem)) > record.last:
            raise _DifferentError(f"{file} is of no iteration of the record")
        saved = settings.read_saved(file, trust=record.trust)
        # A start rewrites the checkpoint that it goes on from, with settings of its own.
        own = [start["settings"] for start in starts if start["iteration"] == point]
        each = [_differences(record, saved, s) for s in (record.part(point).settings, *own)]
        if all(each):
            raise _DifferentError(f"{file} has other settings than the run", each[0])
        known = record.rows.get(point, {}).get("weights_sha256", "")
        if not weights.sha256_tensors(saved["weights"]).startswith(known):
            raise _DifferentError(f"{file} has other weights than those of its row")
        yield point, file, saved


def _differences(record: _Record, saved: Any, of_start: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting of a checkpoint that is not that of the run and one of its starts."""
    own = {name: value for name, value in of_start.items() if name in _OF_A_START}
    claimed, its = {**record.settings, **own}, saved["settings"]

    def told(name: str, of: Mapping[str, Any]) -> str:
        text = json.dumps(of.get(name), sort_keys=True)  # where a tuple is a list, as in a file
        return re.sub(r'"[^"]*/', '"', text) if name in _CODE else text

    return [
        f"{name}: {told(name, claimed)} in config.toml, {told(name, its)} in it"
        for name in sorted({*claimed, *its} - (names(RunOptions, resume=True) - _OF_A_START))
        if told(name, claimed) != told(name, its)
    ]


def _resumable(record: _Record) -> tuple[dict[int, Path], list[int]]:
    """Check the checkpoints and the rows between them; return them by iteration, and the iterations from which the run can be repeated."""
    kept, points, before = {}, [], 0
    for point, file, saved in _checked(record):
        try:
            check_rows(record.folder, point, saved["rows_sha256"])
        except ValueError:
            raise _DifferentError(
                f"one of the rows {before + 1} to {point} of progress.csv is not what the run wrote, by the hash of its rows in {file}"
            ) from None
        kept[point], before, envs = file, point, saved["collector"].get("envs")
        # A run that is resumed begins new episodes in place of those that are too long to repeat.
        goes_on = not envs or "state" in envs or not (envs["kept"] < envs["steps"]).any()
        if point < record.last and (goes_on or record.part(point).after == point):
            points.append(point)
    if not points:
        raise ValueError(
            f"--sample needs checkpoints from before the run's end, without episodes longer than --max-replay-steps: "
            f"{record.folder} has none; leave --sample out, and train with --keep-checkpoints spread:10 the next time"
        )
    return kept, points


def _far_apart(points: Sequence[int]) -> Iterator[int]:
    """Yield points in an order in which the first few are always spread over all."""
    rest, done = [*points], [points[-1]]
    yield rest.pop()
    while rest:
        done.append(max(rest, key=lambda point: min(abs(point - other) for other in done)))
        rest.remove(done[-1])
        yield done[-1]


def _begin(record: _Record, run: Path) -> list[str]:
    """Return the options that begin a recorded run again, in a new folder."""
    file = run.with_name("settings.toml")
    settings.write(file, {**record.settings, **record.parts[0].settings}, {})
    return ["--config", str(file), "--run-dir", str(run)]


def _resume_copy(record: _Record, file: Path, run: Path) -> list[str]:
    """Copy a checkpoint and the rows up to it into a new folder; return the options that resume it."""
    (run / "checkpoints").mkdir(parents=True)
    checkpoint.copy(file, run / "checkpoints")
    rows = [*record.rows.values()][: int(file.stem)]
    with (run / "progress.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    algo = str(record.settings.get("algo", RunOptions.algo))  # a file may have moved
    return ["--resume", str(run), *(["--algo", algo] if ".py" in algo else [])]


def _repeated(
    record: _Record,
    start: Mapping[str, Any],
    words: Sequence[str],
    run: Path,
    between: tuple[int, int],
    nprocs: int,
) -> Iterator[int]:
    """Train from one iteration to another; yield each iteration whose row is the recorded one."""
    made, until = between
    each = _integer(start.get("ranks_per_env", 1), record.folder / "config.toml")
    if each > len(machine.available_cores()) and not record.trust:
        raise ValueError(
            f"the record asks for {each} processes for each environment, which is more than the cores here: give --trust to start them"
        )
    words = [*words, f"--ranks-per-env={each}"]
    words += ["--env-folders", str(run.with_name("folders"))] * bool(start.get("env_folders"))
    folders = code.folders_of_modules(record.folder)
    with closing(_trained(words, run, until, nprocs, folders)) as rows:
        for row in rows:
            made = int(row["iteration"])
            _compare(f"iteration {made}", record.rows.get(made, {}), row, NOT_OF_THE_CURVE, start)
            yield made
    if made < until:
        raise _DifferentError(f"the run went on to iteration {until}, and now it ends after {made}")


def _trained(
    words: Sequence[str], run: Path, until: int, nprocs: int, folders: Sequence[str]
) -> Generator[dict[str, str], None, None]:
    """Train up to an iteration, with modules in these folders too; yield the rows that this adds, at once. Closing ends the training."""
    given = [*words, *_WITHOUT, "--stop-after-iterations", str(until), "--nprocs", str(nprocs)]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        read = len(read_rows(run))  # these rows are there already
        command, env = python("-m", "rank0rl", "train", *given)
        process = subprocess.Popen(
            command,
            env={**env, FOLDERS: os.pathsep.join(folders)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes from here only
            preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509
        )
        try:
            ended, seen, took_s = False, list[tuple[int, int]](), 0.0
            while not ended:
                ended = process.poll() is not None
                about = (path.stat() for path in run.glob("progress.csv"))
                if (now := [(each.st_size, each.st_mtime_ns) for each in about]) != seen:
                    begun = time.monotonic()
                    rows, seen = read_rows(run), now
                    took_s = time.monotonic() - begun
                    yield from rows[read:]
                    read = len(rows)
                time.sleep(0 if ended else max(_LOOK_S, 20 * took_s))  # all rows are read each time
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            said.seek(0)
            lines = said.read().strip().splitlines()
        if process.returncode:
            _, error, wrong = "\n".join(lines).rpartition("error: ")
            if process.returncode == 2 and error:
                raise ValueError(f"the run cannot be trained again: {wrong}")
            failed = f"to train again failed with exit code {process.returncode}:"
            raise ValueError("\n".join([failed, *lines]))
        for line in lines:  # such as that the episode of an environment cannot be repeated
            print(line)
