"""Files of a speedup study: speedup.md, .csv, .json and .png, predicted.csv, .json and .png, and its page.

Pictures are drawn from the rows of the .csv files: a study under way, and one of long ago, have a page too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from rank0rl.run import files
from rank0rl.run.folder import Array
from rank0rl.run.usage import PHASES
from rank0rl.tools import figures
from rank0rl.tools.figures import Finish, Series, chart, html, label, markdown, number, texts
from rank0rl.tools.speedup.cost_model import ALONE, BOUNDS, SAME, Predicted, Prediction
from rank0rl.tools.speedup.measured import Row, ranks

FILE = "speedup.csv"
"""The file of a speedup study, a row for each number of ranks."""

# Ranks -> steps per second. From mpi_util's README: one run each of 2000 episodes of Walker2d-v1, 20 a
# batch, on a machine of 6 cores and 12 threads, 2017.
_PUBLISHED = dict(
    enumerate((546, 1040, 1712, 2014, 1950, 2100, 2300, 2400, 2484, 2339, 2384, 2169), start=1)
)
_PHASES = [f"{phase}_s" for phase in PHASES]
_SECONDS = ("seconds", *_PHASES, "slowest_s", "fastest_s")
_TITLES = {
    "nprocs": "ranks",
    "seconds": "iteration",
    "slowest_s": "slowest rank",
    "fastest_s": "fastest rank",
}
_PREDICTED = {
    "nprocs": "ranks",
    "nodes": "nodes",
    "num_envs": "envs",
    "steps": "batch",
    "predicted": "steps / s",
    "measured": "measured",
    "speedup": "speedup",
    "experiment": "experiment",
    "bound": "limited by",
    "helps": "what helps",
}  # the last three are words

_Rows = Sequence[Mapping[str, Any]]
"""Rows of a .csv file, column -> text or number."""
_Chart = tuple[str, Sequence[Series], Finish]
"""Text for a screen reader, what to draw, and how the axis looks."""


def write(out: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Write the files of a study.

    Args:
        out: folder of the study.
        rows: its rows, from `compare`.
        about: its "command", "machine", "notes" and "settings".
    """
    table = [_columns(row) for row in rows]
    figures.write_csv(out / FILE, table)
    files.write(out / "speedup.json", (json.dumps(about, indent=1, default=str) + "\n").encode())
    files.write(out / "speedup.md", ("\n".join(_markdown(rows, about)) + "\n").encode())
    title = f"{about['settings']['env_id']}, {about['settings']['algo']}"
    _draw(out / "speedup.png", title, _speedup(table), _times(table))


def write_prediction(out: Path, prediction: Prediction, rows: Sequence[Row], title: str) -> None:
    """Append a prediction to speedup.md, and write its own files.

    Args:
        out: folder of the study.
        prediction: the prediction.
        rows: the measured rows.
        title: title of the picture.
    """
    asked = [_predicted_columns(each, rows) for each in prediction.rows]
    table = [_predicted_columns(each, rows) for each in prediction.curve]
    lines = ["", *_predicted_markdown(prediction, asked), ""]
    with files.append(out / "speedup.md") as file:
        file.write("\n".join(lines).encode())
    figures.write_csv(out / "predicted.csv", table)
    notes = {"title": title, "notes": prediction.notes}
    files.write(out / "predicted.json", (json.dumps(notes, indent=1) + "\n").encode())
    _draw(out / "predicted.png", title, _prediction(table))


def page(folder: Path) -> str:
    """Return the page of a speedup study, from its .csv and .json files. Only speedup.csv has to exist.

    Raises:
        ValueError: if the study has no row yet, or no matplotlib.
    """
    rows = files.read_table(folder / FILE, "study")
    if not rows:
        raise ValueError(f"{folder / FILE} has no rows: nothing has been measured yet")
    n = _column(rows, "nprocs")
    if not {"nprocs", "speedup"} <= rows[0].keys() or not ((n > 0) & np.isfinite(n)).all():
        raise ValueError(f"{folder / FILE} was not written by rank0rl")
    known, assumed = (
        files.read_json(path, "study") if path.exists() else {}
        for path in (folder / "speedup.json", folder / "predicted.json")
    )
    path = folder / "predicted.csv"
    predicted = files.read_table(path, "prediction") if path.exists() else []
    settings = known.get("settings", {})
    about = ", ".join(str(settings[n]) for n in ("env_id", "algo") if n in settings)
    seconds = [name for name in _SECONDS if name in rows[0]]
    others = [name for name in rows[0] if name not in ("nprocs", *seconds)]
    speedup = chart("speedup", *_speedup(rows), ranks)
    times: Markup | str = ""
    if any(np.nansum(_column(rows, name)) for name in _PHASES):
        caption = "Each phase of an iteration, on rank 0."
        times = chart("times", *_times(rows), lambda i: ranks(n[round(i)]), caption)
    return html.document(
        "Speedup by number of ranks" + (f": {about}" if about else ""),
        folder.resolve().name,
        html.section("Advice", html.items(known.get("notes", []))),
        html.section("Speedup", speedup, _across(rows, others)),
        html.section("Milliseconds of an iteration", times, _across(rows, seconds, 1000)),
        html.section(
            "Prediction",
            chart("prediction", *_prediction(predicted), ranks) if predicted else "",
            html.table(*_down(predicted), "words"),
            html.items(assumed.get("notes", [])),
        ),
        html.section("Machine", html.pairs(texts(known.get("machine", {})))),
        html.section("Command", html.code(known.get("command", ""))),
    )


def _columns(row: Row) -> dict[str, Any]:
    every = vars(row) | {f"{phase}_s": row.phases[phase] for phase in PHASES}
    del every["phases"], every["step_fractions"]
    return every


def _predicted_columns(each: Predicted, rows: Sequence[Row]) -> dict[str, Any]:
    same = each.experiment == SAME
    measured = [row.steps_per_s for row in rows if same and row.nprocs == each.nprocs]
    took = asdict(each.iteration)
    bound, seconds = each.iteration.largest, took.pop("seconds")
    helps = ", ".join(f"{name} ({times:.2g})" for name, times in [*each.helps.items()][:3])
    return {
        "nprocs": each.nprocs,
        "nodes": each.nodes,
        "experiment": each.experiment,
        "num_envs": each.costs.num_envs,
        "steps": each.costs.steps,
        "predicted": each.costs.steps / seconds,
        "measured": measured[0] if measured else "",
        "speedup": each.speedup,
        "bound": f"{BOUNDS[bound]} ({took[bound] / seconds:.0%})",
        "helps": helps or ("more ranks" if bound == "collect" else ""),
        "seconds": seconds,
        **{f"{name}_s": value for name, value in took.items()},
    }


def _markdown(rows: Sequence[Row], about: dict[str, Any]) -> Iterator[str]:
    settings = about["settings"]
    same_batches = settings["algo"] == "klppo" and settings.get("episodes_per_batch") == 20
    yield f"`{about['command']}`\n"
    yield ", ".join(f"{name} {value}" for name, value in about["machine"].items()) + "\n"
    head = ["ranks", "steps/s (min to max)", "speedup", "efficiency", "ceiling", "expected"]
    head += ["bare env.step", "return", "memory"]
    head += ["published 2017: steps/s", "speedup"] if same_batches else []
    yield from markdown(head, [_cells(row, same_batches) for row in rows])
    yield (
        "\nEfficiency is speedup per rank. The ceiling is the speedup that the first row's phases allow if "
        "every rank has a core to itself. Expected also accounts for processes that slow each other down "
        "here, as measured with bare env.step: as many processes that only step an environment, steps/s "
        "summed. Return is the mean of the last 100 episodes. Memory is the peak of all ranks together.\n"
    )
    yield "Milliseconds of an iteration on rank 0, and fractions of it:\n"
    phases = [phase for phase in PHASES if any(row.phases[phase] for row in rows)]
    times = []
    for row in rows:
        each = [f"{1000 * row.phases[p]:.1f} ({row.fraction(p):.0%})" for p in phases]
        iteration = f"{1000 * row.seconds:.1f}"
        times.append([str(row.nprocs), iteration, *each, f"{row.unaccounted:.1%}"])
    yield from markdown(["ranks", "iteration", *phases, "in no phase"], times)
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


def _predicted_markdown(prediction: Prediction, rows: _Rows) -> Iterator[str]:
    yield "Predicted from the measurements above:\n"
    yield from markdown(*_down(rows), [*_PREDICTED.values()][-3:])
    yield (
        f"\nThe measured experiment has {prediction.costs.num_envs} envs. More ranks than that need more envs, "
        f"which is another experiment: with the same batch in shorter fragments, or with a batch that grows. "
        f"What helps: in brackets, the factor by which it raises the steps per second. Overlap and larger "
        f"batches give another curve.\n"
    )
    yield from (f"- {note}" for note in prediction.notes)


def _across(rows: _Rows, names: Sequence[str], scale: float | None = None) -> Markup:
    """Return a table with a column for each number of ranks, which is narrow for few of them.

    Args:
        rows: rows of the study.
        names: columns of the study that are the table's rows.
        scale: factor of the numbers. None: text is shown as it is.
    """
    cells = {
        name: [row[name] for row in rows] if scale is None else scale * _column(rows, name)
        for name in names
    }
    body = [[_TITLES.get(name, label(name)), *map(number, cells[name])] for name in names]
    return html.table(["ranks", *(row["nprocs"] for row in rows)], body)


def _down(rows: _Rows) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of predictions, a row for each number of ranks and experiment."""
    names = [name for name in _PREDICTED if rows and name in rows[0]]
    return [_PREDICTED[name] for name in names], [[number(row[n]) for n in names] for row in rows]


def _column(rows: _Rows, name: str) -> Array:
    """Return the numbers of a column; NaN where there is none.

    Raises:
        ValueError: if it holds text.
    """
    try:
        return np.array([float(str(row.get(name, "")) or "nan") for row in rows])
    except ValueError as error:
        raise ValueError(f"the column {name} of the study must hold numbers: {error}") from None


def _draw(path: Path, title: str, *charts: _Chart) -> None:
    """Save charts side by side as a picture; print a line without matplotlib."""
    try:
        with figures.style() as figure_class:
            figure = figure_class(figsize=(1.5 + 4 * len(charts), 4), layout="constrained")
            figure.suptitle(title)
            axes = figure.subplots(1, len(charts), squeeze=False)[0]
            for axis, (_, series, finish) in zip(axes, charts, strict=True):
                for one in series:
                    one.draw(axis)
                finish(axis)
                axis.legend(fontsize="small")
        files.write(path, figures.image(figure))
    except ValueError as error:
        print(f"no picture: {error}", file=sys.stderr)


def _speedup(rows: _Rows) -> _Chart:
    """Draw the speedup beside the ideal and the ceilings."""
    n, speedup = _column(rows, "nprocs"), _column(rows, "speedup")
    rates = {name: _column(rows, f"steps_per_s{name}") for name in ("", "_min", "_max")}
    low, high = (speedup * rates[end] / rates[""] for end in ("_min", "_max"))
    series = [Series("ideal", n, n / n[0], 7, "dotted")]
    for name, color in (("ceiling", 4), ("expected", 2)):
        if name in rows[0]:
            series.append(Series(name, n, _column(rows, name), color, "dashed"))
    if np.isfinite(low).all() and (low < high).any():
        series.append(Series("slowest to fastest repeat", n, high, 0, "band", low))
    series.append(Series("measured", n, speedup, 0, "dots"))

    def finish(axis: Any) -> None:
        axis.set(xlabel="ranks", xticks=n)
        axis.set_title("speedup", loc="left")
        axis.set_ylim(bottom=0)

    return f"Speedup by number of ranks: {_course(n, speedup)}", series, finish


def _times(rows: _Rows) -> _Chart:
    """Draw the milliseconds of each phase of an iteration, stacked."""
    n = _column(rows, "nprocs")
    at = np.arange(len(n), dtype=float)
    series, top = [], np.zeros(len(rows))
    for color, name in enumerate(_PHASES):
        took = 1000 * np.nan_to_num(_column(rows, name))
        if took.any():
            low, top = top, top + took
            series.append(Series(label(name), at, top, color, "bar", low))

    def finish(axis: Any) -> None:
        axis.set(xlabel="ranks", xlim=(-0.6, len(n) - 0.4))
        axis.set_xticks(at, [f"{x:,.0f}" for x in n])
        axis.set_title("milliseconds", loc="left")
        axis.grid(visible=False, axis="x")

    return f"Milliseconds of an iteration by number of ranks: {_course(n, top)}", series, finish


def _course(n: Array, values: Array) -> str:
    return ", ".join(f"{number(y)} with {x:,.0f}" for x, y in zip(n, values, strict=True))


def _prediction(rows: _Rows) -> _Chart:
    """Draw the predicted steps per second, by experiment, and the measured and the ideal ones."""
    n, measured = _column(rows, "nprocs"), _column(rows, "measured")
    every = np.unique(n)
    alone = sum(_column(rows, f"{name}_s") for name in ALONE)
    crossed = n[alone > _column(rows, "collect_s")][:1]
    series = []
    for color, name in enumerate(dict.fromkeys(row["experiment"] for row in rows)):
        these = [row for row in rows if row["experiment"] == name]
        x, predicted = _column(these, "nprocs"), _column(these, "predicted")
        series.append(Series(f"predicted, {name}", x, predicted, color, "dots"))
    series.append(Series("measured", n, measured, 3, "dots"))
    for i in np.flatnonzero(np.isfinite(measured))[:1]:
        series.append(Series("ideal", every, measured[i] / n[i] * every, 7, "dotted"))

    def finish(axis: Any) -> None:
        axis.set(xlabel="ranks", yscale="log")
        axis.set_title("steps / s", loc="left")
        axis.set_xscale("log", base=2)
        axis.set_xticks(every, [f"{n:,.0f}" for n in every], fontsize="small")
        axis.xaxis.minorticks_off()
        figures.label_decades(axis.yaxis)
        for x in crossed:
            axis.axvline(x, color="C7", linewidth=0.8)
            said = " what rank 0 does alone\n takes longer than\n collecting"
            axis.text(x, axis.get_ylim()[0], said, fontsize="small", color="C7", va="bottom")

    alt = "Predicted steps per second by number of ranks: " + ", ".join(
        f"{number(row['predicted'])} with {row['nprocs']} ({row['experiment']})" for row in rows
    )
    return alt, series, finish
