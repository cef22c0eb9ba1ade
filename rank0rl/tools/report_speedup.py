"""The page of a speedup study, and of what it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from rank0rl.run import files
from rank0rl.run.folder import Array
from rank0rl.run.usage import PHASES
from rank0rl.tools import figures
from rank0rl.tools.page import Series, chart, html
from rank0rl.tools.readable import label, number, texts

FILE = "speedup.csv"
"""The file of a speedup study, a row for each number of ranks."""

_Rows = Sequence[Mapping[str, str]]

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


def of_speedup(folder: Path) -> str:
    """Return the page of a speedup study, from its .csv and .json files. Only speedup.csv has to exist.

    Raises:
        ValueError: if the study has no row yet, or no matplotlib.
    """
    rows = files.read_table(folder / FILE, "study")
    if not rows:
        raise ValueError(f"{folder / FILE} has no rows: nothing has been measured yet")
    if not {"nprocs", "speedup"} <= rows[0].keys():
        raise ValueError(f"{folder / FILE} was not written by rank0rl")
    known, assumed = (_json(folder / f"{name}.json") for name in ("speedup", "predicted"))
    path = folder / "predicted.csv"
    predicted = files.read_table(path, "prediction") if path.exists() else []
    settings = known.get("settings", {})
    about = ", ".join(str(settings[n]) for n in ("env_id", "algo") if n in settings)
    seconds = [name for name in _SECONDS if name in rows[0]]
    others = [name for name in rows[0] if name not in ("nprocs", *seconds)]
    return html.document(
        "Speedup by number of ranks" + (f": {about}" if about else ""),
        folder.resolve().name,
        html.section("Advice", html.items(known.get("notes", []))),
        html.section("Speedup", _speedup(rows), _across(rows, others)),
        html.section("Milliseconds of an iteration", _times(rows), _across(rows, seconds, 1000)),
        html.section(
            "Prediction",
            _prediction(predicted),
            _down(predicted),
            html.items(assumed.get("notes", [])),
        ),
        html.section("Machine", html.pairs(texts(known.get("machine", {})))),
        html.section("Command", html.code(known.get("command", ""))),
    )


def _json(path: Path) -> dict[str, Any]:
    return files.read_json(path, "study") if path.exists() else {}


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


def _down(rows: _Rows) -> Markup:
    """Return the table of predictions, a row for each number of ranks and experiment."""
    names = [name for name in _PREDICTED if rows and name in rows[0]]
    body = [[number(row[name]) for name in names] for row in rows]
    return html.table([_PREDICTED[name] for name in names], body, "words")


def _column(rows: _Rows, name: str) -> Array:
    """Return the numbers of a column; NaN where there is none.

    Raises:
        ValueError: if it holds text.
    """
    try:
        return np.array([float(row.get(name) or "nan") for row in rows])
    except ValueError as error:
        raise ValueError(f"the column {name} of the study must hold numbers: {error}") from None


def _ranks(value: float) -> str:
    return f"{value:,.0f} rank{'' if value == 1 else 's'}"


def _speedup(rows: _Rows) -> Markup:
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

    alt = "Speedup by number of ranks: " + ", ".join(
        f"{number(row['speedup'])} with {row['nprocs']}" for row in rows
    )
    return chart("speedup", alt, series, finish, _ranks)


def _times(rows: _Rows) -> Markup | str:
    """Draw the milliseconds of each phase of an iteration, stacked."""
    n = _column(rows, "nprocs")
    at = np.arange(len(n), dtype=float)
    series, top = [], np.zeros(len(rows))
    for color, name in enumerate(_PHASES):
        took = 1000 * np.nan_to_num(_column(rows, name))
        if took.any():
            low, top = top, top + took
            series.append(Series(label(name), at, top, color, "bar", low))
    if not series:
        return ""

    def finish(axis: Any) -> None:
        axis.set(xlabel="ranks", xlim=(-0.6, len(n) - 0.4))
        axis.set_xticks(at, [f"{x:,.0f}" for x in n])
        axis.set_title("milliseconds", loc="left")
        axis.grid(visible=False, axis="x")

    alt = "Milliseconds of an iteration by number of ranks: " + ", ".join(
        f"{number(all_of)} with {x:,.0f}" for x, all_of in zip(n, top, strict=True)
    )
    caption = "Each phase of an iteration, on rank 0."
    return chart("times", alt, series, finish, lambda i: _ranks(n[round(i)]), caption)


def _prediction(rows: _Rows) -> Markup | str:
    """Draw the predicted steps per second, by experiment, and the measured ones."""
    if not rows:
        return ""
    series = []
    for color, name in enumerate(dict.fromkeys(row["experiment"] for row in rows)):
        these = [row for row in rows if row["experiment"] == name]
        n, predicted = _column(these, "nprocs"), _column(these, "predicted")
        series.append(Series(f"predicted, {name}", n, predicted, color, "dots"))
    n = _column(rows, "nprocs")
    series.append(Series("measured", n, _column(rows, "measured"), 3, "dots"))
    ranks = sorted({*n})

    def finish(axis: Any) -> None:
        axis.set(xlabel="ranks", yscale="log")
        axis.set_title("steps / s", loc="left")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [f"{n:,.0f}" for n in ranks])
        axis.xaxis.minorticks_off()
        figures.label_decades(axis.yaxis)

    alt = "Predicted steps per second by number of ranks: " + ", ".join(
        f"{number(row['predicted'])} with {row['nprocs']} ({row['experiment']})" for row in rows
    )
    return chart("prediction", alt, series, finish, _ranks)
