"""python -m rank0rl speedup Walker2d --nprocs 1 2 4 8: how a run gets faster with ranks, and why not more.

Every figure is a run of its own; all numbers of ranks take turns, so that a drifting machine favours
none, and the first iteration, which warms up, does not count.
"""

from __future__ import annotations

import math
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tyro

from rank0rl.agent import check_ranges
from rank0rl.rollout import envs_of
from rank0rl.run import provenance
from rank0rl.run.logger import read_rows
from rank0rl.run.timing import PHASES
from rank0rl.scaling import _bare, advice, prediction, prediction_table, speedup_table
from rank0rl.scaling.advice import Row, Work
from rank0rl.scaling.model import Machines

About: TypeAlias = dict[str, Any]

_BARE_S = 2.0  # of bare stepping, for every number of ranks in every round


@dataclass(frozen=True)
class Options:
    """Train with several numbers of ranks in turn, and tell what bounds the speedup. All else on the command line, such as the environment, goes to the training script."""

    nprocs: tuple[int, ...] = (1, 2)
    """Numbers of ranks; the least is what the others are compared with."""
    updates: tuple[Literal["rank0", "allreduce"], ...] = ()
    """Ways to update that take turns as well, to compare them. Empty: as the settings of the run say."""
    repeats: int = 3
    """How often each number of ranks is run."""
    iterations: int = 10
    """Iterations that are timed in each run, after a first one that is not."""
    seconds: float | None = None
    """How long each run takes, in place of iterations; what counts is up to the last iteration that all have made."""
    script: Path = Path("train.py")
    """The training script; one of your own that calls rank0rl.cli.main will do."""
    out: Path | None = None
    """Folder of the study: speedup.md, .csv, .json and .png, and its runs. None: a new one under runs/."""
    predict: tuple[int, ...] = ()
    """Numbers of ranks to predict steps per second for, from what is measured; docs/scaling.md has the model."""
    nodes: int = 1
    """Of the prediction: nodes that its ranks are spread over evenly."""
    node_cores: int | None = None
    """Of the prediction: cores of a node. None: one for each of its ranks."""
    link_gbit: float = 10.0
    """Of the prediction: what the link of a node carries each way, in Gbit/s."""
    latency_us: float = 50.0
    """Of the prediction: between nodes, in microseconds."""


@dataclass(frozen=True)
class _Run:
    """One run, as its folder tells."""

    nprocs: int
    settings: dict[str, Any]
    """Of the run, as its config.toml has them."""
    rows: list[dict[str, str]]

    def until(self, last: int) -> _Run:
        """The same run, as far as this iteration."""
        return replace(self, rows=self.rows[:last])

    def mean(self, column: str) -> float:
        """Over all iterations but the first."""
        return statistics.mean(float(row[column]) for row in self.rows[1:])

    def most(self, column: str) -> float:
        return max(float(row[column]) for row in self.rows)

    def difference(self, column: str) -> float:
        """Between the end of the first iteration and that of the last."""
        return float(self.rows[-1][column]) - float(self.rows[0][column])

    @property
    def steps_per_s(self) -> float:
        return self.difference("steps") / self.difference("seconds")


class FailedError(Exception):
    """A run of the study has failed; the message has what it said."""


def main(argv: list[str]) -> int:
    """Exit code: 0; 1 if a run failed; 2 for a wrong use."""
    given, rest = tyro.cli(
        Options, args=argv, prog="python -m rank0rl speedup", return_unknown_args=True
    )
    try:
        check_ranges(
            given, nprocs="[1, inf)", repeats="[1, inf)", iterations="[1, inf)", seconds="(0, inf)"
        )
        _check_prediction(given)
        if not given.script.is_file():
            raise ValueError(
                f"no training script {given.script}: start this where train.py is, or name --script"
            )
        if not rest or rest[0].startswith("-"):
            raise ValueError(
                "name an environment first, such as: python -m rank0rl speedup Walker2d --nprocs 1 2"
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = given.out or Path(
        "runs",
        f"speedup-{rest[0]}-{time.strftime('%Y%m%d-%H%M%S')}".replace("/", "-").replace(":", "-"),
    )
    try:
        for rows, about in study(given, rest, out):
            speedup_table.write(out, rows, about)
        if given.predict:
            _predict(given, rows, about["settings"], out)
    except (FailedError, prediction.CannotMeasureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: the rounds that were whole are in {out}", file=sys.stderr)
        return 130
    files = "speedup.md, .csv, .json, .png" + ", predicted.csv, .png" * bool(given.predict)
    print(f"{(out / 'speedup.md').read_text()}\nin {out}: {files}")
    return 0


def _check_prediction(given: Options) -> None:
    check_ranges(
        given,
        predict="[1, inf)",
        nodes="[1, inf)",
        node_cores="[1, inf)",
        link_gbit="(0, inf)",
        latency_us="[0, inf)",
    )
    if given.predict and min(given.predict) < given.nodes:
        raise ValueError(
            f"every node has a rank at the least: got --nodes {given.nodes}, and --predict "
            f"{min(given.predict)}; fewer nodes, or more ranks"
        )


def _predict(given: Options, rows: Sequence[Row], settings: dict[str, Any], out: Path) -> None:
    """Append what is predicted to the study.

    Raises:
        CannotMeasureError: if what it needs cannot be measured.
    """
    rows = [row for row in rows if row.update == "rank0"] or rows
    machines = Machines(
        *(0.0, 0.0, 1.0),  # measured there
        nodes=given.nodes,
        link_latency_s=1e-6 * given.latency_us,
        link_bandwidth=1e9 / 8 * given.link_gbit,
        cores=given.node_cores,
    )
    first = rows[0]
    run = out / "runs" / f"{first.nprocs}{first.update if given.updates else ''}-1"
    path = given.script.resolve().parent
    found = prediction.predict(given.predict, rows, settings, run, machines, path)
    title = f"{settings['env_id']}, {settings['algo']}, {given.nodes} node{'s' * (given.nodes > 1)}"
    prediction_table.write(out, found, rows, title)


def study(given: Options, rest: Sequence[str], out: Path) -> Iterator[tuple[list[Row], About]]:
    """Train, in rounds.

    Args:
        given: which runs.
        rest: of the command line, for the script.
        out: folder of the runs.

    Yields:
        After every round, a row for each number of ranks so far; and "command", "machine", "notes"
        and "settings".

    Raises:
        FailedError: if a run does.
    """
    counts = sorted(set(given.nprocs))
    updates: list[str] = [*dict.fromkeys(given.updates)] or [""]
    cases = [(update, n) for update in updates for n in counts]
    runs: dict[tuple[str, int], list[_Run]] = {case: [] for case in cases}
    bare: dict[int, list[float]] = {n: [] for n in counts}
    for repeat in range(1, given.repeats + 1):
        for update, n in reversed(cases):  # what cannot be is found out with the most ranks, first
            more = ["--update", update] if update else []
            run = _train(given, rest, n, out / "runs" / f"{n}{update}-{repeat}", *more)
            runs[update, n].append(run)
            if update == updates[-1]:
                bare[n].append(_bare.rate(run.settings, n, _BARE_S, given.script.resolve().parent))
            print(
                f"round {repeat} of {given.repeats}, {n} rank{'s' * (n > 1)}{', ' * bool(update)}"
                f"{update}: {run.steps_per_s:,.0f} steps/s, bare env.step {bare[n][-1]:,.0f}",
                flush=True,
            )
        settings = run.settings
        work = Work(
            bool(settings.get("overlap")),
            "rank0_envs" in settings,
            "episodes_per_batch" in settings,
        )
        every = [run for these in runs.values() for run in these]
        last = min(len(run.rows) for run in every)
        rows = [_row(runs[update, n], bare[n], last) for update, n in cases]
        advice.compare(rows, work)
        notes = [*_same_curve(every, last), *advice.advice(rows, work)]
        if repeat == given.repeats:
            by_rank0 = [row for row in rows if row.update == "rank0"]
            notes += _learner_threads(given, rest, by_rank0, last, out) if by_rank0 else ()
        if any(math.isnan(row.bare_steps_per_s) for row in rows):
            notes.append("env.step could not be measured alone: what is expected is the ceiling")
        record = runs[cases[-1]][0].settings["record"][0]
        machine = {name: record[name] for name in ("cpu", "machine", "mpi", "commit", "started")}
        yield (
            rows,
            {
                "command": shlex.join(["python", "-m", "rank0rl", "speedup", *sys.argv[2:]]),
                "machine": {**machine, "cores": provenance.cores(), **record["versions"]},
                "notes": notes,
                "settings": {k: v for k, v in settings.items() if k != "record"},
            },
        )


def _train(given: Options, rest: Sequence[str], nprocs: int, folder: Path, *more: str) -> _Run:
    """One run.

    Raises:
        FailedError: if it does, or is over before its second iteration.
    """
    stop = ["--stop-after-iterations", str(given.iterations + 1)]
    if given.seconds is not None:
        stop = ["--stop-after-seconds", str(given.seconds)]
    command = [sys.executable, str(given.script), *rest, *more, "--nprocs", str(nprocs)]
    command += [*stop, "--keep-checkpoints", "1", "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"{shlex.join(command)} failed:\n{done.stdout[-500:]}{done.stderr}")
    rows = read_rows(folder)
    if len(rows) < 2:
        raise FailedError(
            f"a run made {len(rows)} iterations, and the first does not count: more --seconds, "
            f"--iterations or --total-steps"
        )
    return _Run(nprocs, tomllib.loads((folder / "config.toml").read_text()), rows)


def _row(runs: Sequence[_Run], bare: Sequence[float], last: int) -> Row:
    """One number of ranks: all of the run of the median rate, so that its phases add up.

    Args:
        runs: the repeats.
        bare: rates of bare stepping beside them.
        last: iteration up to which is counted.
    """
    runs = sorted((run.until(last) for run in runs), key=lambda run: run.steps_per_s)
    run = runs[(len(runs) - 1) // 2]
    nprocs, settings = run.nprocs, run.settings
    longest = None
    if "episodes_per_batch" in settings:
        longest = run.mean("longest") * (last - 1) / run.difference("steps")
    lanes = [
        len(envs_of(rank, nprocs, settings["num_envs"], settings.get("rank0_envs")))
        for rank in range(nprocs)
    ]
    return Row(
        nprocs=nprocs,
        update=settings["update"],
        steps_per_s=run.steps_per_s,
        steps_per_s_min=runs[0].steps_per_s,
        steps_per_s_max=runs[-1].steps_per_s,
        seconds=run.difference("seconds") / (last - 1),
        phases={phase: run.mean(f"{phase}_s") for phase in PHASES},
        slowest_s=run.mean("slowest_s"),
        fastest_s=run.mean("fastest_s"),
        bare_steps_per_s=statistics.median(bare),
        return_mean=float(run.rows[-1]["return_mean"]),
        memory_mb=run.most("memory_mb"),
        shares=advice.shares(nprocs, lanes, longest),
        oversubscribed=nprocs > provenance.cores(),
    )


def _same_curve(runs: Sequence[_Run], last: int) -> Iterator[str]:
    """Whether all runs that should be are the same one, as far as all of them have come."""
    groups: dict[str, list[_Run]] = {}
    for run in runs:
        n, together = run.nprocs, run.settings["update"] == "allreduce"
        where = f" on {n} rank{'s' * (n > 1)} with --update allreduce" if together else ""
        groups.setdefault(where, []).append(run)
    for where, these in groups.items():
        hashes = {run.rows[last - 1]["weights_sha256"] for run in these}
        if len(hashes) == 1:
            all_of = f"the same in all {len(these)} runs" if len(these) > 1 else "of one run"
            yield (
                f"the curve is {all_of}{where}: weights {hashes.pop()} after {last} iterations, of "
                f"which the first is not timed"
            )
        else:
            yield (
                f"the curve is NOT the same in all runs{where}: {len(hashes)} different weights after "
                f"{last} iterations"
            )


def _learner_threads(
    given: Options, rest: Sequence[str], rows: Sequence[Row], last: int, out: Path
) -> Iterator[str]:
    """Whether more threads make the update of the most ranks within the cores shorter: one run more."""
    row = [row for row in rows if not row.oversubscribed or row is rows[0]][-1]
    threads = min(row.nprocs, provenance.cores())
    if threads == 1 or row.share("update") < 0.1 or any("learner" in word for word in rest):
        return
    more = ["--learner-threads", str(threads)]
    given = replace(given, seconds=None, iterations=last - 1)
    try:
        run = _train(given, rest, row.nprocs, out / "runs" / "threads", *more)
    except FailedError as error:
        yield f"--learner-threads {threads} could not be tried: {error}"
        return
    ratio = run.mean("update_s") / row.phases["update"]
    if ratio < 0.9:
        yield (
            f"--learner-threads {threads} makes the update {1 - ratio:.0%} shorter here (it changes "
            f"the last bits, the same for every nprocs)"
        )
    else:
        yield f"--learner-threads {threads} does not pay here: the update takes {ratio:.2f} times as long"
