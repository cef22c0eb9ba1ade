"""Speedup study: rounds of runs with several numbers of ranks, the rows that they give, and what follows.

Every figure is a run of its own. All numbers of ranks take turns, so that a machine whose speed drifts
favours none of them.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rank0rl.envs.block import envs_of
from rank0rl.run.machine import available_cores
from rank0rl.run.timing import PHASES
from rank0rl.scaling import _bare, advice, ceiling
from rank0rl.scaling.rows import Row, Work, step_fractions
from rank0rl.scaling.runs import TimedRun, train
from rank0rl.scaling.speedup_options import Options

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
        ceiling.compare(rows, work)
        notes = [_same_curve(every, last), *advice.advice(rows, work)]
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
