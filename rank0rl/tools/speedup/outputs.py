"""Files of a speedup study: speedup.md, .csv, .json and .png, and predicted.csv, .json and .png."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rank0rl.run.usage import PHASES
from rank0rl.tools import figures
from rank0rl.tools.speedup.measured import Row
from rank0rl.tools.speedup.prediction import (
    LARGER_BATCH,
    SAME,
    SAME_BATCH,
    Predicted,
    Prediction,
)

# Ranks -> steps per second. From mpi_util's README: one run each of 2000 episodes of Walker2d-v1, 20 a
# batch, on a machine of 6 cores and 12 threads, 2017.
_PUBLISHED = dict(
    enumerate((546, 1040, 1712, 2014, 1950, 2100, 2300, 2400, 2484, 2339, 2384, 2169), start=1)
)
_LABELS = {
    SAME: "predicted, the same experiment",
    SAME_BATCH: "more envs, the same batch",
    LARGER_BATCH: "more envs, batch grows with the ranks",
}


def write(out: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Write the files of a study.

    Args:
        out: folder of the study.
        rows: its rows, from `compare`.
        about: its "command", "machine", "notes" and "settings".
    """
    _write_csv(out / "speedup.csv", [_columns(row) for row in rows])
    (out / "speedup.json").write_text(json.dumps(about, indent=1, default=str) + "\n")
    (out / "speedup.md").write_text("\n".join(_markdown(rows, about)) + "\n")
    title = f"{about['settings']['env_id']}, {about['settings']['algo']}"
    _draw(out / "speedup.png", (9, 3.6), lambda figure: _speedup(figure, rows, title))


def write_prediction(out: Path, prediction: Prediction, rows: Sequence[Row], title: str) -> None:
    """Append a prediction to speedup.md, and write its own files.

    Args:
        out: folder of the study.
        prediction: the prediction.
        rows: the measured rows.
        title: title of the picture.
    """
    with (out / "speedup.md").open("a") as file:
        file.write("\n" + "\n".join(_predicted_markdown(prediction)) + "\n")
    table = [_predicted_columns(each, rows) for each in prediction.curve]
    _write_csv(out / "predicted.csv", table)
    notes = {"title": title, "notes": prediction.notes}
    (out / "predicted.json").write_text(json.dumps(notes, indent=1) + "\n")
    _draw(
        out / "predicted.png",
        (7, 4.2),
        lambda figure: _curves(figure.subplots(), prediction, rows, title),
    )


def _write_csv(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def _draw(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Save what is drawn on a figure of this size, in inches; print a line without matplotlib."""
    try:
        with figures.style() as figure_class:
            figure = figure_class(figsize=size, layout="constrained")
            draw(figure)
            figure.savefig(path, dpi=120)
    except ValueError as error:
        print(f"no picture: {error}", file=sys.stderr)


def _columns(row: Row) -> dict[str, Any]:
    every = vars(row) | {f"{phase}_s": row.phases[phase] for phase in PHASES}
    del every["phases"], every["step_fractions"]
    return {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in every.items()}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def _markdown(rows: Sequence[Row], about: dict[str, Any]) -> Iterator[str]:
    settings = about["settings"]
    same_batches = settings["algo"] == "klppo" and settings.get("episodes_per_batch") == 20
    yield f"`{about['command']}`\n"
    yield ", ".join(f"{name} {value}" for name, value in about["machine"].items()) + "\n"
    head = ["ranks", "steps/s (min to max)", "speedup", "efficiency", "ceiling", "expected"]
    head += ["bare env.step", "return", "memory"]
    head += ["published 2017: steps/s", "speedup"] if same_batches else []
    yield from _table(head, [_cells(row, same_batches) for row in rows])
    yield (
        "\nEfficiency is speedup per rank. The ceiling is the speedup that the first row's phases allow if "
        "every rank has a core to itself. Expected also accounts for processes that slow each other down "
        "here, as measured with bare env.step: as many processes that only step an environment, steps/s "
        "summed. Return is the mean of the last 100 episodes. Memory is the peak of all ranks together.\n"
    )
    yield "Milliseconds of an iteration on rank 0, and fractions of it:\n"
    phases = _phases(rows)
    times = []
    for row in rows:
        each = [f"{1000 * row.phases[p]:.1f} ({row.fraction(p):.0%})" for p in phases]
        iteration = f"{1000 * row.seconds:.1f}"
        times.append([str(row.nprocs), iteration, *each, f"{row.unaccounted:.1%}"])
    yield from _table(["ranks", "iteration", *phases, "in no phase"], times)
    yield ""
    yield from (f"- {note}" for note in about["notes"])


def _cells(row: Row, published: bool) -> list[str]:
    """Return the first table's cells of a row, and the published figures if they are asked for."""
    low, high = row.steps_per_s_min, row.steps_per_s_max
    cells = [
        f"{row.nprocs}{' (more than cores)' if row.oversubscribed else ''}",
        f"{row.steps_per_s:,.0f}" + (f" ({low:,.0f} to {high:,.0f})" if low < high else ""),
        *(f"{x:.2f}" for x in (row.speedup, row.efficiency, row.ceiling, row.expected)),
        f"{row.bare_steps_per_s:,.0f}",
        f"{row.return_mean:.6g}",
        f"{row.memory_mb:,.0f} MB",
    ]
    if published:
        rate = _PUBLISHED.get(row.nprocs)
        cells += [f"{rate:,}", f"{rate / _PUBLISHED[1]:.2f}"] if rate else ["", ""]
    return cells


def _phases(rows: Sequence[Row]) -> list[str]:
    """Return the phases that took any time."""
    return [phase for phase in PHASES if any(row.phases[phase] for row in rows)]


def _speedup(figure: Any, rows: Sequence[Row], title: str) -> None:
    """Draw speedup beside the ideal and the ceilings, and the phases of an iteration."""
    left, right = figure.subplots(1, 2)
    n = [row.nprocs for row in rows]
    left.plot(n, [x / n[0] for x in n], color="0.7", linestyle=":", label="ideal")
    for name, style in (("ceiling", "--"), ("expected", "-.")):
        left.plot(n, [getattr(row, name) for row in rows], color="0.4", linestyle=style, label=name)
    first = rows[0].steps_per_s
    spread = [
        [(row.steps_per_s - row.steps_per_s_min) / first for row in rows],
        [(row.steps_per_s_max - row.steps_per_s) / first for row in rows],
    ]
    y = [row.speedup for row in rows]
    left.errorbar(n, y, spread, color="C0", marker="o", capsize=3, label="measured")
    left.set(xlabel="ranks", ylabel="speedup", title=title, xticks=n)
    left.legend()
    bottom = [0.0] * len(rows)
    for i, phase in enumerate(_phases(rows)):
        seconds = [row.phases[phase] for row in rows]
        right.bar([str(x) for x in n], seconds, bottom=bottom, color=f"C{i}", label=phase)
        bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
    right.set(xlabel="ranks", ylabel="seconds of an iteration, rank 0")
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _predicted_columns(each: Predicted, rows: Sequence[Row]) -> dict[str, str | int]:
    same = each.experiment == SAME
    measured = [row.steps_per_s for row in rows if same and row.nprocs == each.nprocs]
    seconds = asdict(each.iteration)
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
        "seconds": f"{seconds.pop('seconds'):.6g}",
        **{f"{name}_s": f"{value:.6g}" for name, value in seconds.items()},
    }


def _predicted_markdown(prediction: Prediction) -> Iterator[str]:
    yield "Predicted from the measurements above:\n"
    head = ["ranks", "nodes", "experiment", "envs", "batch", "steps/s", "speedup"]
    head += ["limited by", "what helps"]
    yield from _table(head, [_predicted_cells(each) for each in prediction.rows])
    yield (
        f"\nThe measured experiment has {prediction.costs.num_envs} envs. More ranks than that need more envs, "
        f"which is another experiment: with the same batch in shorter fragments, or with a batch that grows. "
        f"What helps: in brackets, the factor by which it raises the steps per second. Overlap and larger "
        f"batches give another curve.\n"
    )
    yield from (f"- {note}" for note in prediction.notes)


def _predicted_cells(each: Predicted) -> list[str]:
    took = each.iteration
    return [
        str(each.nprocs),
        str(each.nodes),
        each.experiment,
        f"{each.costs.num_envs:,}",
        f"{each.costs.steps:,.0f}",
        f"{each.steps_per_s:,.0f}",
        f"{each.speedup:.2f}",
        f"{took.bound} ({getattr(took, took.largest) / took.seconds:.0%})",
        _helps(each) or ("more ranks" if took.largest == "collect" else ""),
    ]


def _helps(each: Predicted) -> str:
    return ", ".join(f"{name} ({times:.2g})" for name, times in [*each.helps.items()][:3])


def _curves(axes: Any, prediction: Prediction, rows: Sequence[Row], title: str) -> None:
    """Draw steps per second by number of ranks, predicted and measured."""
    first, curve = rows[0], prediction.curve
    ranks = sorted({each.nprocs for each in curve})
    ideal = [n * first.steps_per_s / first.nprocs for n in ranks]
    axes.plot(ranks, ideal, color="0.7", linestyle=":", label="ideal")
    joint = [each for each in curve if each.experiment == SAME][-1:]
    for i, (name, label) in enumerate(_LABELS.items()):
        these = [each for each in curve if each.experiment == name]
        if these:
            these = these if name == SAME else [*joint, *these]
            x, y = [each.nprocs for each in these], [each.steps_per_s for each in these]
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
