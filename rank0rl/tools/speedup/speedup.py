"""python -m rank0rl speedup Walker2d --nprocs 1 2 4 8: how much faster a run gets with more ranks, and what limits it.

Every figure is a run of its own. All numbers of ranks take turns, so that a machine whose speed drifts
favours none of them.
"""

from __future__ import annotations

import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from rank0rl import options
from rank0rl.envs.block import envs_of
from rank0rl.launch import exit_code_after, python, usage_error
from rank0rl.options import flag, option
from rank0rl.run.folder import RunData, read_run
from rank0rl.run.launch_options import Words
from rank0rl.run.logger import read_rows
from rank0rl.run.machine import available_cores
from rank0rl.run.signals import Interrupted
from rank0rl.run.usage import PHASES
from rank0rl.tools.speedup import cost_model, outputs, probes
from rank0rl.tools.speedup.measured import Row, advice, compare, ranks
from rank0rl.tools.speedup.probes import FailedError


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


_CHOSEN = {"run_dir", "keep_checkpoints", "stop_after_iterations", "stop_after_seconds"}
_BARE_S = 2.0  # seconds of bare stepping, for every number of ranks in every round


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, 1 if a run failed, 2 for a wrong use, 130 after Ctrl-C."""
    given, rest = tyro.cli(
        Options, args=argv, prog="python -m rank0rl speedup", return_unknown_args=True
    )
    try:
        _check(given, rest)
    except ValueError as error:
        return usage_error(str(error))
    name = f"speedup-{rest[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = given.out or Path("runs", name.replace("/", "-").replace(":", "-"))
    try:
        for rows, about in _rounds(given, rest, out):
            outputs.write(out, rows, about)
        if given.predict:
            _predict(given, rows, about, out)
    except FailedError as error:
        usage_error(str(error))
        return 1
    except Interrupted as stop:
        print(f"interrupted: the complete rounds are in {out}", file=sys.stderr)
        return exit_code_after(stop.signum)
    predicted = ", predicted.csv, .json, .png" if given.predict else ""
    print(f"{(out / 'speedup.md').read_text()}\nin {out}: speedup.md, .csv, .json, .png{predicted}")
    return 0


def _check(given: Options, rest: Sequence[str]) -> None:
    """Raise ValueError for wrong options, or if the script or the environment is missing."""
    options.check(given)
    if given.predict and min(given.predict) < given.nodes:
        raise ValueError(
            f"every node needs at least one rank: got --nodes {given.nodes} and --predict "
            f"{min(given.predict)}; use fewer nodes or more ranks"
        )
    if given.script and not given.script.is_file():
        raise ValueError(f"no training script {given.script}: set --script, or leave it out")
    if not rest or rest[0].startswith("-"):
        raise ValueError(
            "name an environment first, such as: python -m rank0rl speedup Walker2d --nprocs 1 2"
        )
    if chosen := sorted(Words(rest, {}).flags() & _CHOSEN):
        raise ValueError(
            f"speedup chooses folder, length and checkpoints of each run: leave out {', '.join(map(flag, chosen))}; see "
            f"--out, --iterations and --seconds"
        )


def _predict(given: Options, rows: Sequence[Row], about: dict[str, Any], out: Path) -> None:
    """Append a prediction to the study. All costs follow from its first row."""
    machines = cost_model.Machines(
        nodes=given.nodes,
        link_latency_s=1e-6 * given.latency_us,
        link_bandwidth=1e9 / 8 * given.link_gbit,
        cores=given.node_cores,
    )
    settings = about["settings"]
    found = probes.collect_costs(out / "runs" / f"{rows[0].nprocs}-1", given.folder)
    predicted = cost_model.predict(given.predict, machines, rows, settings, found)
    nodes = f"{given.nodes} node{'' if given.nodes == 1 else 's'}"
    title = f"{settings['env_id']}, {settings['algo']}, {nodes}"
    outputs.write_prediction(out, predicted, rows, title)


def _rounds(
    given: Options, rest: Sequence[str], out: Path
) -> Iterator[tuple[Sequence[Row], dict[str, Any]]]:
    """Train in rounds; yield after each a row for each number of ranks, and what `outputs.write` writes."""
    counts = sorted(set(given.nprocs))
    runs: dict[int, list[RunData]] = {n: [] for n in counts}
    bare: dict[int, list[float]] = {n: [] for n in counts}
    for repeat in range(1, given.repeats + 1):
        for n in reversed(counts):  # a wrong use often fails with the most ranks only
            run = _train(given, rest, n, out / "runs" / f"{n}-{repeat}")
            runs[n].append(run)
            bare[n].append(probes.bare_rate(run.settings, n, _BARE_S, given.folder))
            print(
                f"round {repeat} of {given.repeats}, {ranks(n)}: {_rate(run):,.0f} steps/s, "
                f"bare env.step {bare[n][-1]:,.0f}",
                flush=True,
            )
        every = [run for these in runs.values() for run in these]
        last = min(len(run.rows) for run in every)
        rows = compare([_row(runs[n], bare[n], last) for n in counts], run.settings)
        notes = [_same_curve(every, last), *advice(rows, run.settings)]
        if any(math.isnan(row.bare_steps_per_s) for row in rows):
            notes.append("env.step could not be measured alone: expected equals the ceiling")
        yield rows, _about(runs[counts[-1]][0], notes)


def _train(given: Options, rest: Sequence[str], nprocs: int, folder: Path) -> RunData:
    """Train one run. A FailedError says why it has failed, or ended before its second iteration."""
    stop = ["--stop-after-iterations", str(given.iterations + 1)]
    if given.seconds is not None:
        stop = ["--stop-after-seconds", str(given.seconds)]
    program, env = python("-m", "rank0rl", "train")
    if given.script:
        program = [sys.executable, str(given.script)]
    command = [*program, *rest, "--nprocs", str(nprocs)]
    command += [*stop, "--keep-checkpoints", "1", "--run-dir", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=env
    )
    if done.returncode:
        raise FailedError(f"{shlex.join(command)} failed:\n{done.stdout[-500:]}{done.stderr}")
    made = len(read_rows(folder))
    if made < 2:
        raise FailedError(
            f"a run made {made} iterations, and the first one is not timed: raise --seconds, "
            f"--iterations or --total-steps"
        )
    return read_run(folder)


def _about(run: RunData, notes: list[str]) -> dict[str, Any]:
    record = run.starts[0]
    machine = {name: record[name] for name in ("cpu", "machine", "mpi", "commit", "started")}
    return {
        "command": shlex.join(["python", "-m", "rank0rl", "speedup", *sys.argv[2:]]),
        "machine": {**machine, "cores": len(available_cores()), **record["versions"]},
        "notes": notes,
        "settings": run.settings,
    }


def _growth(run: RunData, column: str) -> float:
    """Return by how much a column grew in the timed iterations: the first one warms up."""
    return float(run.column(column)[-1] - run.column(column)[0])


def _rate(run: RunData) -> float:
    """Return the steps per second of the timed iterations."""
    return _growth(run, "steps") / _growth(run, "seconds")


def _row(runs: Sequence[RunData], bare: Sequence[float], last: int) -> Row:
    """Return the row of one number of ranks, from its repeats and their rates of bare stepping.

    All is from the run of the median rate, so that its phases add up. Iterations after the last do not count.
    """
    runs = sorted((replace(run, rows=run.rows[:last]) for run in runs), key=_rate)
    run = runs[(len(runs) - 1) // 2]
    nprocs, settings = run.starts[-1]["nprocs"], run.settings

    def mean(column: str) -> float:
        return float(run.column(column)[1:].mean())

    longest = None
    if "episodes_per_batch" in settings:
        longest = mean("longest") * (last - 1) / _growth(run, "steps")
    together = settings.get("agents", 1)
    of_rank0 = settings["rank0_envs"] // together if "rank0_envs" in settings else None
    num_envs = settings["num_envs"] // together
    envs = [len(envs_of(rank, nprocs, num_envs, of_rank0)) for rank in range(nprocs)]
    return Row(
        nprocs=nprocs,
        steps_per_s=_rate(run),
        steps_per_s_min=_rate(runs[0]),
        steps_per_s_max=_rate(runs[-1]),
        seconds=_growth(run, "seconds") / (last - 1),
        phases={phase: mean(f"{phase}_s") for phase in PHASES},
        slowest_s=mean("slowest_s"),
        fastest_s=mean("fastest_s"),
        bare_steps_per_s=statistics.median(bare),
        return_mean=float(run.rows[-1]["return_mean"]),
        memory_mb=float(run.column("memory_mb").max()),
        step_fractions=_step_fractions(nprocs, envs, longest),
        oversubscribed=nprocs * run.starts[-1].get("ranks_per_env", 1) > len(available_cores()),
    )


def _step_fractions(
    nprocs: int, envs: Sequence[int], longest_episode: float | None = None
) -> tuple[float, float]:
    """Return rank 0's fraction of an iteration's steps, and the largest fraction of another rank.

    Fixed-step batches spread as the `envs` of each rank. Ranks take whole episodes as they become free,
    but one rank has to make all of the longest episode, which is a fraction of the batch's steps.
    """
    if longest_episode is not None:
        least = max(1 / nprocs, min(1.0, longest_episode))
        return least, least
    return envs[0] / sum(envs), max(envs[1:], default=0) / sum(envs)


def _same_curve(runs: Sequence[RunData], last: int) -> str:
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
