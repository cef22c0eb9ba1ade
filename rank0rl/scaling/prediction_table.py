"""Files of a prediction: a table in speedup.md, predicted.csv, .json and .png."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rank0rl.scaling.prediction import Predicted, Prediction
from rank0rl.scaling.rows import Row
from rank0rl.scaling.what_if import LARGER_BATCH, SAME, SAME_BATCH
from rank0rl.tools import figures

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
