"""Predictions of steps per second on more ranks than were run, and their files."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rank0rl.tools import figures
from rank0rl.tools.speedup import calibration, cost_model
from rank0rl.tools.speedup.cost_model import Costs, Iteration, Machines, iteration, rate
from rank0rl.tools.speedup.measure import Row

SAME = "same experiment"
SAME_BATCH = "same batch, one env a rank"
LARGER_BATCH = "batch grows with ranks"


def grown(costs: Costs, num_envs: int, experiment: str) -> Costs:
    """Return the costs with more envs: the batch stays (`SAME_BATCH`) or grows with them (`LARGER_BATCH`)."""
    times = num_envs / costs.num_envs if experiment == LARGER_BATCH else 1.0
    return replace(_larger(costs, times), num_envs=num_envs)


def crossing(experiment: Callable[[int], Costs], most: int, machines: Machines) -> int | None:
    """Return the least number of ranks that collect faster than rank 0 does what it does alone.

    Args:
        experiment: number of ranks -> its costs.
        most: largest number of ranks to look at.
        machines: nodes and network. There are never more nodes than ranks.

    Returns:
        The number of ranks; None if there is none up to `most`.
    """
    for nprocs in range(1, most + 1):
        nodes = replace(machines, nodes=min(machines.nodes, nprocs))
        took = iteration(nprocs, experiment(nprocs), nodes)
        if took.rank0_alone > took.collect:
            return nprocs
    return None


def changes_that_help(nprocs: int, costs: Costs, machines: Machines) -> dict[str, float]:
    """Return the changes that would raise the steps per second, the best first: change -> factor, if 1.05 or more.

    A batch four times as large takes an update four times as long: it gains only on what is fixed.
    Overlap comes with the number of envs for rank 0 that makes the most of it.
    """
    changes: list[tuple[str, Costs]] = [
        ("batches of 4 times the steps", _larger(costs, 4.0)),
        ("--gather-parts 4", replace(costs, parts=4)),
    ]
    if nprocs > 1:
        name = "other --rank0-envs" if costs.overlap else "overlap"
        changes += [(name, each) for each in _overlapped(nprocs, costs)]
    now = rate(nprocs, costs, machines)
    gains: dict[str, float] = {}
    for name, changed in changes:
        gains[name] = max(gains.get(name, 0.0), rate(nprocs, changed, machines) / now)
    most = sorted(gains, key=lambda name: -gains[name])
    return {name: gains[name] for name in most if gains[name] >= 1.05}


def _overlapped(nprocs: int, costs: Costs) -> list[Costs]:
    """Return costs with overlap: an equal number of envs for rank 0, none, and as many as it has time for."""
    env = costs.steps / costs.num_envs * (costs.env_s + costs.wait_s)
    less = costs.update_s * (nprocs - 1) / env if env else 0.0
    fair = max(0, int((costs.num_envs - less) / nprocs))
    return [replace(costs, overlap=True, rank0_envs=envs) for envs in (None, 0, fair)]


def _larger(costs: Costs, times: float) -> Costs:
    return replace(
        costs,
        steps=costs.steps * times,
        update_s=costs.update_s * times,
        record_s=costs.record_s * times,
        longest=costs.longest / times,
    )


@dataclass(frozen=True)
class Predicted:
    """Predicted figures of one number of ranks."""

    nprocs: int
    nodes: int
    experiment: str
    """`SAME`, `SAME_BATCH` or `LARGER_BATCH`: what it keeps of the measured experiment."""
    costs: Costs
    iteration: Iteration
    speedup: float
    """Speedup over the first measured row."""
    helps: dict[str, float]
    """Changes that would raise the steps per second, as `what_if.helps` gives them."""

    @property
    def steps_per_s(self) -> float:
        """Steps per second of all ranks."""
        return self.costs.steps / self.iteration.seconds


@dataclass(frozen=True)
class Prediction:
    """All predicted rows, and what they follow from."""

    costs: Costs
    machines: Machines
    rows: list[Predicted]
    """Rows of the numbers of ranks that the user asked for."""
    curve: list[Predicted]
    """Rows of 1, 2, 4 ... ranks, up to the largest number."""
    notes: list[str]


def predict(
    counts: Sequence[int],
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    run: Path,
    machines: Machines,
    path: Path,
) -> Prediction:
    """Measure what is missing, and predict.

    Args:
        counts: numbers of ranks to predict.
        rows: rows of the study. All costs follow from the first one.
        settings: settings of its runs.
        run: folder of one of its runs.
        machines: nodes, cores and link. All else is measured here.
        path: folder in which the environment's module may be found.

    Raises:
        CannotMeasureError: if the environment, or ranks, cannot be started by themselves.
    """
    machines = calibration.measure_machines(machines, rows, max(counts))
    costs = calibration.measure_costs(rows[0], settings, run, path)
    return from_costs(counts, costs, machines, rows)


def from_costs(
    counts: Sequence[int], costs: Costs, machines: Machines, rows: Sequence[Row]
) -> Prediction:
    """Predict from known costs. The curve's measured numbers of ranks are on one node, as they were run."""
    most, first = max(counts), rows[0].steps_per_s
    here = replace(machines, nodes=1)
    one_node = max(row.nprocs for row in rows)
    curve = [2**i for i in range(math.ceil(math.log2(most)) + 1)]
    return Prediction(
        costs,
        machines,
        [each for n in sorted(set(counts)) for each in _each(n, costs, machines, first)],
        [
            each
            for n in sorted({*curve, *counts, min(costs.num_envs, most)})
            if n <= most
            for each in _each(n, costs, here if n <= one_node else machines, first)
        ],
        _notes(costs, machines, most),
    )


def _each(nprocs: int, costs: Costs, machines: Machines, first: float) -> list[Predicted]:
    """Return a row for each experiment that so many ranks can make."""
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    found = []
    for name in _experiments(nprocs, costs):
        these = costs if name == SAME else grown(costs, nprocs, name)
        took = cost_model.iteration(nprocs, these, machines)
        speedup = these.steps / took.seconds / first
        helps = changes_that_help(nprocs, these, machines)
        found.append(Predicted(nprocs, machines.nodes, name, these, took, speedup, helps))
    return found


def _experiments(nprocs: int, costs: Costs) -> list[str]:
    if nprocs <= costs.num_envs:
        return [SAME]
    if nprocs <= costs.steps:  # every env makes at least one step
        return [SAME_BATCH, LARGER_BATCH]
    return [LARGER_BATCH]


def _notes(costs: Costs, machines: Machines, most: int) -> list[str]:
    """Return sentences on where rank 0 becomes the limit, on the limits, and on what is assumed."""
    limits = []
    if machines.nodes > 1:
        limits.append(
            f"rank 0's link can receive at most {machines.link_bandwidth / costs.row_bytes:,.0f} steps/s "
            f"({8e-9 * machines.link_bandwidth:g} Gbit/s, {costs.row_bytes:.0f} bytes a step)"
        )
    if costs.update_s:
        limits.append(
            f"rank 0's update can process at most {costs.steps / costs.update_s:,.0f} steps/s"
        )
    return [_crossing(costs, machines, most), *limits, _assumed(machines)]


def _crossing(costs: Costs, machines: Machines, most: int) -> str:
    """Return a sentence on the number of ranks from which collecting no longer takes the longest."""

    def experiment(nprocs: int) -> Costs:
        return costs if nprocs <= costs.num_envs else grown(costs, nprocs, LARGER_BATCH)

    nprocs = crossing(experiment, most, machines)
    if nprocs is None:
        return f"up to {most:,} ranks, collecting takes longer than what rank 0 does alone"
    machines = replace(machines, nodes=min(machines.nodes, nprocs))
    took = cost_model.iteration(nprocs, experiment(nprocs), machines)
    alone = max(_ALONE, key=lambda name: getattr(took, name))
    which = f" ({LARGER_BATCH})" if nprocs > costs.num_envs else ""
    return (
        f"from {nprocs:,} rank{'s' * (nprocs > 1)} on{which}, what rank 0 does alone takes longer than "
        f"collecting; most of it is {_ALONE[alone]}"
    )


_ALONE = {
    "update": "its update",
    "gather": "the bandwidth into it",
    "messages": "the number of messages to it",
    "record": "its hash and record",
}


def _assumed(machines: Machines) -> str:
    cores = "a core for each of its ranks" if machines.cores is None else f"{machines.cores} cores"
    between = ""
    if machines.nodes > 1:
        between = (
            f". Given by --latency-us and --link-gbit: {1e6 * machines.link_latency_s:g} us and "
            f"{8e-9 * machines.link_bandwidth:g} Gbit/s between nodes"
        )
    return (
        f"assumed: every node is this machine, with {cores}, each as fast as here. Measured here: "
        f"{1e6 * machines.latency_s:.0f} us a collective, {1e6 * machines.message_s:.1f} us a "
        f"message, {machines.bandwidth / 1e9:.2f} GB/s into rank 0{between}"
    )


_LABELS = {
    SAME: "predicted, the same experiment",
    SAME_BATCH: "more envs, the same batch",
    LARGER_BATCH: "more envs, batch grows with the ranks",
}


def write(out: Path, prediction: Prediction, rows: Sequence[Row], title: str) -> None:
    """Append the table to speedup.md; make predicted.csv, .json and .png.

    Args:
        out: folder of the study.
        prediction: the predicted rows and notes.
        rows: the measured rows.
        title: title of the picture.
    """
    with (out / "speedup.md").open("a") as file:
        file.write("\n" + "\n".join(_markdown(prediction)) + "\n")
    with (out / "predicted.csv").open("w", newline="") as file:
        table = [_columns(each, rows) for each in prediction.curve]
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    notes = {"title": title, "notes": prediction.notes}
    (out / "predicted.json").write_text(json.dumps(notes, indent=1) + "\n")
    draw(out / "predicted.png", prediction, rows, title)


def _columns(each: Predicted, rows: Sequence[Row]) -> dict[str, str | int]:
    measured = [
        row.steps_per_s for row in rows if row.nprocs == each.nprocs and each.experiment == SAME
    ]
    seconds = {
        f"{name}_s": f"{value:.6g}"
        for name, value in asdict(each.iteration).items()
        if name not in ("overlap", "floor", "rank0_collect")
    }
    return {
        "nprocs": each.nprocs,
        "nodes": each.nodes,
        "experiment": each.experiment,
        "num_envs": each.costs.num_envs,
        "steps": f"{each.costs.steps:.6g}",
        "predicted": f"{each.steps_per_s:.6g}",
        "measured": f"{measured[0]:.6g}" if measured else "",
        "speedup": f"{each.speedup:.6g}",
        "bound": each.iteration.bound,
        "helps": _helps(each),
        "seconds": f"{each.iteration.seconds:.6g}",
        **seconds,
    }


def _markdown(prediction: Prediction) -> Iterator[str]:
    yield "Predicted from the measurements above:\n"
    yield "| ranks | nodes | experiment | envs | batch | steps/s | speedup | limited by | what helps |"
    yield f"|{'---|' * 9}"
    for each in prediction.rows:
        cells = [
            str(each.nprocs),
            str(each.nodes),
            each.experiment,
            f"{each.costs.num_envs:,}",
            f"{each.costs.steps:,.0f}",
            f"{each.steps_per_s:,.0f}",
            f"{each.speedup:.2f}",
            f"{each.iteration.bound} ({_fraction(each):.0%})",
            _helps(each) or "more ranks" * (each.iteration.largest == "collect"),
        ]
        yield f"| {' | '.join(cells)} |"
    yield (
        f"\nThe measured experiment has {prediction.costs.num_envs} envs. More ranks than that need more envs, "
        f"which is another experiment: with the same batch in shorter fragments, or with a batch that grows. "
        f"What helps: in brackets, the factor by which it raises the steps per second. Overlap and larger "
        f"batches give another curve.\n"
    )
    yield from (f"- {note}" for note in prediction.notes)


def _fraction(each: Predicted) -> float:
    """Return the fraction of an iteration's seconds in what takes the most."""
    return float(getattr(each.iteration, each.iteration.largest)) / each.iteration.seconds


def _helps(each: Predicted) -> str:
    return ", ".join(f"{name} ({times:.2g})" for name, times in [*each.helps.items()][:3])


def draw(path: Path, prediction: Prediction, rows: Sequence[Row], title: str) -> None:
    """Draw steps per second by number of ranks, predicted and measured; print a line without matplotlib."""
    try:
        with figures.style() as figure_class:
            figure = figure_class(figsize=(7, 4.2), layout="constrained")
            _curves(figure.subplots(), prediction, rows, title)
            figure.savefig(path, dpi=120)
    except ValueError as error:
        print(f"no picture: {error}", file=sys.stderr)


def _curves(axes: Any, prediction: Prediction, rows: Sequence[Row], title: str) -> None:
    first, curve = rows[0], prediction.curve
    ranks = sorted({each.nprocs for each in curve})
    ideal = [n * first.steps_per_s / first.nprocs for n in ranks]
    axes.plot(ranks, ideal, color="0.7", linestyle=":", label="ideal")
    joint = [each for each in curve if each.experiment == SAME][-1:]
    for i, (name, label) in enumerate(_LABELS.items()):
        these = [each for each in curve if each.experiment == name]
        if name != SAME and these:
            these = [*joint, *these]
        x, y = [each.nprocs for each in these], [each.steps_per_s for each in these]
        if these:
            axes.plot(x, y, color=f"C{i}", linestyle=("-", "--", "-.")[i], label=label)
    crowd = prediction.machines.cores is not None
    measured = [row for row in rows if crowd or not row.oversubscribed]
    x, y = [row.nprocs for row in measured], [row.steps_per_s for row in measured]
    axes.plot(x, y, "ko", markersize=4, label="measured here")
    rates = [each.steps_per_s for each in curve]
    crossed = [each for each in curve if each.iteration.rank0_alone > each.iteration.collect]
    if crossed:
        n = crossed[0].nprocs
        axes.axvline(n, color="0.5", linewidth=0.8)
        said = " what rank 0 does alone\n takes longer than\n collecting"
        axes.text(n, min(rates), said, fontsize="small", color="0.3", va="bottom")
    axes.set(xlabel="ranks", ylabel="steps per second", title=title, yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks], fontsize="small")
    figures.label_decades(axes.yaxis)
    axes.set_ylim(0.7 * min(rates), 5 * max(rates))
    axes.legend(fontsize="small", loc="upper left")
