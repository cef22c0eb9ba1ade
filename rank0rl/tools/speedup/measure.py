"""Rounds of training runs with several numbers of ranks, the rows that they give, and advice from these.

An iteration on n ranks consists of what all ranks share (collecting and processing), and of what rank 0
does while the others sleep or, with overlap, collect. Envs and whole episodes cannot be cut in two, so
the largest fraction may be more than 1 / n.

Every figure is a run of its own. All numbers of ranks take turns, so that a machine whose speed drifts
favours none of them.
"""

from __future__ import annotations

import math
import shlex
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rank0rl import options
from rank0rl.envs.block import envs_of
from rank0rl.options import option
from rank0rl.run.logger import read_rows
from rank0rl.run.machine import available_cores
from rank0rl.run.timing import PHASES
from rank0rl.tools.speedup import _bare


@dataclass(frozen=True)
class Options:
    """Train with several numbers of ranks in turn, and print what limits the speedup. All other arguments, such as the environment, go to the training script."""

    nprocs: tuple[int, ...] = option((1, 2), "[1, inf)")
    """Numbers of ranks. The smallest one is what the others are compared with."""
    repeats: int = option(3, "[1, inf)")
    """Number of runs with each number of ranks."""
    iterations: int = option(10, "[1, inf)")
    """Iterations of each run that are timed. One more iteration comes first and is not timed."""
    seconds: float | None = option(None, "(0, inf)")
    """Length of each run in seconds, instead of --iterations. Only iterations that all runs have made are timed."""
    script: Path | None = None
    """Training script of your own, which calls rank0rl.cli.main. None: rank0rl's."""
    out: Path | None = None
    """Folder of the study: speedup.md, .csv, .json, .png and its runs. None: a new folder under runs/."""
    predict: tuple[int, ...] = option((), "[1, inf)")
    """Numbers of ranks whose steps per second are predicted from the measurements. The model is in docs/scaling.md."""
    nodes: int = option(1, "[1, inf)")
    """Prediction: nodes over which the ranks are spread evenly."""
    node_cores: int | None = option(None, "[1, inf)")
    """Prediction: cores of a node. None: one for each of its ranks."""
    link_gbit: float = option(10.0, "(0, inf)")
    """Prediction: bandwidth of a node's link each way, in Gbit/s."""
    latency_us: float = option(50.0, "[0, inf)")
    """Prediction: latency between nodes, in microseconds."""

    @property
    def folder(self) -> Path:
        """Folder in which modules of the user's are found."""
        return self.script.resolve().parent if self.script else Path.cwd()


def check_options(given: Options) -> None:
    """Check the options.

    Raises:
        ValueError: if a number is out of its range, or a node would have no rank.
    """
    options.check(given)
    if given.predict and min(given.predict) < given.nodes:
        raise ValueError(
            f"every node needs at least one rank: got --nodes {given.nodes} and --predict "
            f"{min(given.predict)}; use fewer nodes or more ranks"
        )


SHARED = ("collect", "process")
"""Phases that are spread over all ranks."""


@dataclass(frozen=True)
class Work:
    """The ways in which a run spreads its work over ranks."""

    overlap: bool = False
    """True if rank 0 updates while the other ranks collect."""
    rank0_envs: bool = False
    """True if the user chose how many envs rank 0 has."""
    episodes: bool = False
    """True if batches are whole episodes, which ranks take as they become free."""


@dataclass(frozen=True)
class Row:
    """Measured figures of one number of ranks."""

    nprocs: int
    steps_per_s: float
    steps_per_s_min: float
    steps_per_s_max: float
    seconds: float
    """Mean seconds of one iteration."""
    phases: Mapping[str, float]
    """Seconds of an iteration on rank 0, by phase."""
    slowest_s: float
    """Seconds of an iteration in which the slowest rank collects and processes."""
    fastest_s: float
    """The same for the fastest rank."""
    bare_steps_per_s: float
    """Steps per second of as many processes that only call `env.step`, summed; nan if unknown."""
    return_mean: float
    memory_mb: float
    """Peak memory of all ranks together, in MB."""
    step_fractions: tuple[float, float]
    """Fractions of an iteration's steps: rank 0's, and the largest that another rank has to make."""
    oversubscribed: bool = False
    """True if there are more ranks than cores."""
    columns: dict[str, float] = field(default_factory=dict)
    """Columns that `ceiling.compare` adds: "speedup", "efficiency", "ceiling", "expected"."""

    def fraction(self, *phases: str) -> float:
        """Return the fraction of the iteration that these phases take."""
        return sum(self.phases[phase] for phase in phases) / self.seconds


def step_fractions(
    nprocs: int, envs: Sequence[int], longest_episode: float | None = None
) -> tuple[float, float]:
    """Return rank 0's fraction of an iteration's steps, and the largest fraction of another rank.

    Args:
        nprocs: number of ranks.
        envs: number of envs of each rank.
        longest_episode: in whole-episode batches, the longest episode's fraction of the batch's steps.
            Ranks take episodes as they become free, but one rank has to make all of that episode.
    """
    if longest_episode is not None:
        least = max(1 / nprocs, min(1.0, longest_episode))
        return least, least
    return envs[0] / sum(envs), max(envs[1:], default=0) / sum(envs)


def within_cores(rows: Sequence[Row]) -> Row:
    """Return the row with the most ranks that do not outnumber the cores; else the first row."""
    return ([row for row in rows if not row.oversubscribed] or rows[:1])[-1]


@dataclass(frozen=True)
class TimedRun:
    """Record of one run. Its first iteration, which warms up, is not timed."""

    nprocs: int
    settings: dict[str, Any]
    """Settings of the run, as in its config.toml."""
    rows: list[dict[str, str]]
    """Rows of its progress.csv, one for each iteration."""

    def until(self, last: int) -> TimedRun:
        """Return the same run up to this iteration."""
        return replace(self, rows=self.rows[:last])

    def mean(self, column: str) -> float:
        """Return a column's mean over all timed iterations."""
        return statistics.mean(float(row[column]) for row in self.rows[1:])

    def most(self, column: str) -> float:
        """Return a column's maximum over all iterations."""
        return max(float(row[column]) for row in self.rows)

    def difference(self, column: str) -> float:
        """Return by how much a column grew in the timed iterations."""
        return float(self.rows[-1][column]) - float(self.rows[0][column])

    @property
    def steps_per_s(self) -> float:
        """Steps per second of the timed iterations."""
        return self.difference("steps") / self.difference("seconds")


class FailedError(Exception):
    """Failure of a run of the study. The message has the run's output."""


def train(given: Options, rest: Sequence[str], nprocs: int, folder: Path, *more: str) -> TimedRun:
    """Train one run.

    Args:
        given: options of the study.
        rest: arguments for the training script.
        nprocs: number of ranks.
        folder: the run's folder.
        more: further arguments for the training script.

    Raises:
        FailedError: if the run fails, or ends before its second iteration.
    """
    stop = ["--stop-after-iterations", str(given.iterations + 1)]
    if given.seconds is not None:
        stop = ["--stop-after-seconds", str(given.seconds)]
    program = [str(given.script)] if given.script else ["-m", "rank0rl", "train"]
    command = [sys.executable, *program, *rest, *more, "--nprocs", str(nprocs)]
    command += [*stop, "--keep-checkpoints", "1", "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"{shlex.join(command)} failed:\n{done.stdout[-500:]}{done.stderr}")
    rows = read_rows(folder)
    if len(rows) < 2:
        raise FailedError(
            f"a run made {len(rows)} iterations, and the first one is not timed: raise --seconds, "
            f"--iterations or --total-steps"
        )
    return TimedRun(nprocs, tomllib.loads((folder / "config.toml").read_text()), rows)


def compare(rows: Sequence[Row], work: Work) -> None:
    """Fill in the columns of all rows. The other rows are compared with the first one.

    Speedup is the ratio of steps per second; efficiency is speedup per rank. The ceiling follows from
    the first row's phases and from the fractions of the steps. The expected speedup also accounts for
    processes that slow each other down, as measured with bare `env.step`.

    Args:
        rows: measured rows, in order of nprocs.
        work: how the runs spread their work.
    """
    first = rows[0]
    shared = first.slowest_s / max(first.step_fractions)
    alone = first.seconds * (1 - first.fraction(*SHARED, "wait"))
    total = _seconds(first, alone, shared, work)
    for row in rows:
        speedup = row.steps_per_s / first.steps_per_s
        row.columns.update(
            speedup=speedup,
            efficiency=speedup * first.nprocs / row.nprocs,
            ceiling=total / _seconds(row, alone, shared, work),
            expected=total / _seconds(row, alone, shared * slowdown(first, row), work),
        )


def slowdown(first: Row, row: Row) -> float:
    """Return how many times as long a bare `env.step` takes in the row's processes as in the first's.

    At least 1, and 1 if it was not measured.
    """
    pace = row.bare_steps_per_s / first.bare_steps_per_s * first.nprocs / row.nprocs
    return 1.0 if math.isnan(pace) else max(1.0, 1 / pace)


def _seconds(row: Row, alone: float, shared: float, work: Work) -> float:
    """Return the seconds of an iteration on the row's ranks.

    Args:
        row: the number of ranks, and their fractions of the steps.
        alone: seconds that rank 0 works alone.
        shared: seconds that one rank would need for what all ranks share.
        work: how the run spreads it.
    """
    mine, others = row.step_fractions
    if not work.overlap or row.nprocs == 1:
        return alone + shared * max(mine, others)
    if work.episodes and not work.rank0_envs:  # rank 0 takes only as many as it has time for
        return max((alone + shared) / row.nprocs, shared * others)
    return max(alone + shared * mine, shared * others)


About: TypeAlias = dict[str, Any]

_BARE_S = 2.0  # seconds of bare stepping, for every number of ranks in every round


def study(given: Options, rest: Sequence[str], out: Path) -> Iterator[tuple[list[Row], About]]:
    """Train in rounds.

    Args:
        given: options of the study.
        rest: arguments for the training script.
        out: folder of the study.

    Yields:
        After every round, a row for each number of ranks so far; and "command", "machine", "notes"
        and "settings".

    Raises:
        FailedError: if a run fails.
    """
    counts = sorted(set(given.nprocs))
    runs: dict[int, list[TimedRun]] = {n: [] for n in counts}
    bare: dict[int, list[float]] = {n: [] for n in counts}
    for repeat in range(1, given.repeats + 1):
        for n in reversed(
            counts
        ):  # a wrong use often fails with the most ranks only: find it first
            run = train(given, rest, n, out / "runs" / f"{n}-{repeat}")
            runs[n].append(run)
            bare[n].append(_bare.rate(run.settings, n, _BARE_S, given.folder))
            print(
                f"round {repeat} of {given.repeats}, {n} rank{'s' * (n > 1)}: "
                f"{run.steps_per_s:,.0f} steps/s, bare env.step {bare[n][-1]:,.0f}",
                flush=True,
            )
        work = _work(run.settings)
        every = [run for these in runs.values() for run in these]
        last = min(len(run.rows) for run in every)
        rows = [_row(runs[n], bare[n], last) for n in counts]
        compare(rows, work)
        notes = [_same_curve(every, last), *advice(rows, work)]
        if any(math.isnan(row.bare_steps_per_s) for row in rows):
            notes.append("env.step could not be measured alone: expected equals the ceiling")
        yield rows, _about(runs[counts[-1]][0].settings, notes)


def _about(settings: dict[str, Any], notes: list[str]) -> About:
    record = settings["record"][0]
    machine = {name: record[name] for name in ("cpu", "machine", "mpi", "commit", "started")}
    return {
        "command": shlex.join(["python", "-m", "rank0rl", "speedup", *sys.argv[2:]]),
        "machine": {**machine, "cores": len(available_cores()), **record["versions"]},
        "notes": notes,
        "settings": {k: v for k, v in settings.items() if k != "record"},
    }


def _work(settings: dict[str, Any]) -> Work:
    return Work(
        overlap=bool(settings.get("overlap")),
        rank0_envs="rank0_envs" in settings,
        episodes="episodes_per_batch" in settings,
    )


def _row(runs: Sequence[TimedRun], bare: Sequence[float], last: int) -> Row:
    """Return the row of one number of ranks. All is from the run of the median rate, so that its phases add up.

    Args:
        runs: the repeats.
        bare: rates of bare stepping, one for each repeat.
        last: last iteration that counts.
    """
    runs = sorted((run.until(last) for run in runs), key=lambda run: run.steps_per_s)
    run = runs[(len(runs) - 1) // 2]
    nprocs, settings = run.nprocs, run.settings
    longest = None
    if "episodes_per_batch" in settings:
        longest = run.mean("longest") * (last - 1) / run.difference("steps")
    together = settings.get("agents", 1)
    of_rank0 = settings["rank0_envs"] // together if "rank0_envs" in settings else None
    envs = [
        len(envs_of(rank, nprocs, settings["num_envs"] // together, of_rank0))
        for rank in range(nprocs)
    ]
    return Row(
        nprocs=nprocs,
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
        step_fractions=step_fractions(nprocs, envs, longest),
        oversubscribed=nprocs > len(available_cores()),
    )


def _same_curve(runs: Sequence[TimedRun], last: int) -> str:
    """Return a sentence that says if all runs have the same curve, as far as all of them have come."""
    hashes = {run.rows[last - 1]["weights_sha256"] for run in runs}
    if len(hashes) > 1:
        return (
            f"the curve is NOT the same in all runs: {len(hashes)} different weights after {last} "
            f"iterations"
        )
    which = f"the same in all {len(runs)} runs" if len(runs) > 1 else "of one run"
    return (
        f"the curve is {which}: weights {hashes.pop()} after {last} iterations, of which the first is "
        f"not timed"
    )


def advice(rows: Sequence[Row], work: Work) -> list[str]:
    """Return what limits the speedup and what would raise it, one text each, the largest first.

    Args:
        rows: measured rows, with the columns of `ceiling.compare`.
        work: how the runs spread their work.
    """
    row = within_cores(rows)
    found = [*_shared_badly(row, work), *_alone(row, work), *_disturbed(rows[0], row)]
    beyond = [other for other in rows if other.oversubscribed]
    if beyond and max(rows, key=lambda each: each.steps_per_s) not in beyond:
        found.append((0.0, f"more ranks than cores are not faster here: use at most {_ranks(row)}"))
    if not found:
        found.append((0.0, "nothing stands out: use more ranks if there are more cores"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def unaccounted(row: Row) -> float:
    """Return the fraction of the wall time that belongs to no phase."""
    return 1 - row.fraction(*PHASES)


def _disturbed(first: Row, row: Row) -> Iterator[tuple[float, str]]:
    """Yield a warning if the update's time differs, because it is the same work for any number of ranks."""
    times = row.phases["update"] / first.phases["update"] if first.phases["update"] else 1.0
    if not 0.8 < times < 1.25:
        yield (
            1.0,
            f"these figures are not reliable: the update took {times:.2f} times as long on "
            f"{_ranks(row)} as on {_ranks(first)}, but it is the same work. Stop other programs and "
            f"raise --repeats",
        )


def _shared_badly(row: Row, work: Work) -> Iterator[tuple[float, str]]:
    """Yield where ranks wait for each other: the fraction of the time that it costs, and a remedy."""
    even = 1 / row.nprocs
    uneven = max(row.step_fractions) - even
    if uneven > 0.1 * even and not work.rank0_envs:
        cost = row.fraction(*SHARED) * uneven / max(row.step_fractions)
        if work.episodes:
            yield (
                cost,
                "one episode is longer than a rank's equal share: raise --episodes-per-batch",
            )
        else:
            yield (
                cost,
                "the envs do not divide evenly: set --num-envs to a multiple of --nprocs",
            )
        return
    idle = (row.slowest_s - row.fastest_s) / row.seconds
    if idle > 0.1 and row.fastest_s < 0.8 * row.slowest_s and not work.overlap:
        remedy = "Use fewer ranks"
        if not work.episodes:
            remedy = (
                "Use batches of whole episodes (--episodes-per-batch), which ranks take as they "
                "become free, or fewer ranks"
            )
        yield (
            idle,
            f"imbalance: the slowest rank works {row.slowest_s / row.fastest_s:.1f} times as long as the "
            f"fastest, which waits. Its envs are slower, or it does not have a core to itself. {remedy}",
        )


def _alone(row: Row, work: Work) -> Iterator[tuple[float, str]]:
    """Yield where the other ranks wait for rank 0: the fraction of the time, and a remedy."""
    update, moving = row.fraction("update"), row.fraction("gather", "hash", "broadcast")
    if update > 0.15:
        other = (
            "--overlap with fewer --rank0-envs, so that the other ranks collect during the update"
        )
        if work.overlap:
            other = "fewer --rank0-envs, so that rank 0 has time for the update"
        yield (
            update,
            f"rank 0's update takes {update:.0%} of the time on {_ranks(row)}: use fewer epochs, larger "
            f"minibatches, more steps per batch, or {other}",
        )
    if moving > 0.1:
        yield (
            moving,
            f"moving data takes {moving:.0%} of the time: use fewer ranks or smaller observations",
        )


def _ranks(row: Row) -> str:
    return f"{row.nprocs} rank{'s' * (row.nprocs > 1)}"
