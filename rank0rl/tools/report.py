"""python -m rank0rl report RUN: write a run, or a speedup study, as one self-contained HTML page.

Figures are SVG inside the page, in its light or dark colors. The page loads nothing and runs no
script.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from rank0rl.run import files, run_data
from rank0rl.run.run_data import Array, RunData
from rank0rl.tools import figures, page

_PICTURE = 1 << 24  # bytes
_POINTS = 400  # most points of a curve; in longer runs, a point is the mean of several iterations
_LEAST_SHARE = 0.005  # of the time: a smaller phase would be invisible in the figure
_RATES = ("steps_per_s", "bare_steps_per_s")  # end in _s, but are not seconds
_BESIDE = ("length_mean", "steps_per_s", "memory_mb")

Columns = Mapping[str, Array]
"""Numbers by column name, shape (points,); NaN where there is no number."""


@dataclass(frozen=True)
class Options:
    """Write one HTML page about a run, or about a speedup study."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, or of the study."""
    out: Path | None = None
    """File to write. None: report.html in the folder."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl report")
    out = given.out or given.folder / "report.html"
    try:
        is_study = (given.folder / "speedup.csv").exists()
        text = of_study(given.folder) if is_study else of_run(given.folder)
        out.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def of_run(folder: Path) -> str:
    """Return the page of a run, as far as the run has come.

    Raises:
        ValueError: if there is no run with at least one iteration, or no matplotlib.
    """
    run = run_data.read(folder)
    settings, last = run.settings, run.rows[-1]
    names = list(last)
    own = names[names.index("weights_sha256") + 1 :]  # the agent's own columns come last
    columns = _thinned(run, [n for n in names if n != "settings" and not n.endswith("sha256")])
    block = _block(run)
    note = f" Each point is the mean of {block} iterations." * (block > 1)
    with figures.style():
        curve = page.figure(_returns(columns), _RETURN_CAPTION + note)
        phases = page.figure(_phases(run, columns), _PHASES_CAPTION + note)
        beside = page.small(
            _small(columns, n) for n in (*run.info_columns(), *_BESIDE) if n in columns
        )
        metrics = page.small(_small(columns, name) for name in own)
    summary = folder / "summary.json"
    values = files.read_json(summary, "summary") if summary.exists() else {}
    return page.document(
        f"{settings['env_id']}, {settings['algo']}, seed {settings['seed']}",
        f"{folder.resolve().name}: {len(run.rows):,} iterations",
        page.pairs(_overview(run), "tiles"),
        page.section("Return", curve),
        page.section("Where the time goes", phases),
        page.section("Episodes and speed, by steps", beside),
        page.section("What the agent records, by steps", metrics),
        page.section("Settings", page.pairs(_texts(settings))),
        page.section("Summary", page.pairs(_texts(values))),
        page.section("Starts", _starts(run.starts)),
    )


_RETURN_CAPTION = "Return of the last 100 training episodes."
_PHASES_CAPTION = (
    "Each phase's share of an iteration's time on rank 0. "
    "The legend gives its share of the whole run."
)


def of_study(folder: Path) -> str:
    """Return the page of a speedup study, from its speedup.csv, speedup.json and speedup.png.

    Only speedup.csv has to exist.

    Raises:
        ValueError: if the study has no row yet.
    """
    rows = files.read_table(folder / "speedup.csv", "study")
    if not rows:
        raise ValueError(f"{folder / 'speedup.csv'} has no rows: nothing has been measured yet")
    if not {"nprocs", "speedup"} <= rows[0].keys():
        raise ValueError(f"{folder / 'speedup.csv'} was not written by rank0rl")
    about, picture = folder / "speedup.json", folder / "speedup.png"
    known = files.read_json(about, "study") if about.exists() else {}
    alt = "Speedup by number of ranks: " + ", ".join(
        f"{_number(row['speedup'])} with {row['nprocs']}" for row in rows
    )
    seconds = [name for name in rows[0] if name.endswith("_s") and name not in _RATES]
    others = [name for name in rows[0] if name not in seconds]
    return page.document(
        "Speedup by number of ranks",
        folder.resolve().name,
        page.section("Advice", page.items(known.get("notes", []))),
        page.section(
            "Speedup",
            page.image(files.read(picture, "picture", _PICTURE), alt) if picture.exists() else "",
        ),
        page.section("Figures", _study_table(rows, others)),
        page.section("Seconds of an iteration", _study_table(rows, ["nprocs", *seconds])),
        page.section("Machine", page.pairs(_texts(known.get("machine", {})))),
        page.section("Command", page.code(known["command"]) if "command" in known else ""),
    )


def _study_table(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    head = [_label(name) for name in names]
    return page.table(head, [[_number(row[name]) for name in names] for row in rows])


def _overview(run: RunData) -> dict[str, str]:
    """Return the most important numbers of a run, name -> text."""
    last, settings = run.rows[-1], run.settings
    by_episodes = "num_episodes" in settings
    of_steps = "" if by_episodes else f" of {settings['total_steps']:,}"
    of_episodes = f" of {settings['num_episodes']:,}" if by_episodes else ""
    seconds = float(last["seconds"])
    return {
        "mean return": _number(last["return_mean"]),
        f"steps{of_steps}": _number(last["steps"]),
        f"episodes{of_episodes}": _number(last["episodes"]),
        "time": _duration(seconds),
        "steps / s": _number(str(float(last["steps"]) / seconds)),
        **({"ranks": str(run.starts[-1]["nprocs"])} if run.starts else {}),
    }


def _duration(seconds: float) -> str:
    scales = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next(f"{seconds / n:.3g} {name}" for n, name in scales if seconds >= n or n == 1)


def _starts(starts: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a column for each start of a run: when, where, with which versions."""
    flat = [{**start, **start.get("versions", {})} for start in starts]
    names = [name for name in dict.fromkeys(n for one in flat for n in one) if name != "versions"]
    rows = [[name, *(str(one.get(name, "")) for one in flat)] for name in names]
    head = ["", *(f"start {i + 1}" for i in range(len(flat)))]
    return page.table(head, rows, "text") if flat else ""


def _thinned(run: RunData, names: Sequence[str]) -> Columns:
    """Return columns of at most _POINTS points, each the mean of a block of rows.

    "steps" is the number at the end of each block. "seconds" is the time of an iteration, not the
    time since the run's beginning.
    """
    each = {name: run.column(name) for name in names} | {"seconds": _seconds(run)}
    starts = np.arange(0, len(run.rows), _block(run))
    columns = {}
    for name, values in each.items():
        known = np.isfinite(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        counts = np.add.reduceat(known.astype(float), starts)
        columns[name] = np.divide(sums, counts, where=counts > 0, out=np.full(len(sums), np.nan))
    return columns | {"steps": each["steps"][[*(starts[1:] - 1), -1]]}


def _block(run: RunData) -> int:
    """Return the number of iterations of each point."""
    return -(-len(run.rows) // _POINTS)


def _seconds(run: RunData) -> Array:
    """Return the seconds of each iteration; differences of the column "seconds" would lose digits."""
    return np.diff(run.column("steps"), prepend=0.0) / run.column("steps_per_s")


def _returns(columns: Columns) -> str:
    """Draw the learning curve, with the spread of episodes and the evaluations if they are recorded."""
    steps, mean = columns["steps"], columns["return_mean"]
    figure, axis = _axis(8.6, 3.4, steps[-1])
    if {"return_min", "return_max"} <= columns.keys():
        low, high = columns["return_min"], columns["return_max"]
        axis.fill_between(steps, low, high, color="C0", alpha=0.12, label="lowest to highest")
    if "return_std" in columns:
        low, high = mean - columns["return_std"], mean + columns["return_std"]
        axis.fill_between(steps, low, high, color="C0", alpha=0.25, label="standard deviation")
    axis.plot(steps, mean, color="C0", label="mean", **_dot_if_alone(mean))
    evaluated = columns.get("eval_return", np.full(len(steps), np.nan))
    if (known := np.isfinite(evaluated)).any():
        axis.plot(
            steps[known], evaluated[known], "o-", color="C1", markersize=4, label="evaluation"
        )
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend()
    axis.set(xlabel="steps", ylabel="return")
    return figures.inline_svg(figure, "returns", f"Mean return by steps: {_course(mean)}")


def _phases(run: RunData, columns: Columns) -> str:
    """Draw each phase's share of the time of an iteration, stacked; the rest belongs to no phase."""
    total = _seconds(run).sum()
    names = [name for name in columns if name.endswith("_s") and name not in _RATES]
    whole = {name: float(np.nansum(run.column(name)) / total) for name in names}
    shown = {name: share for name, share in whole.items() if share >= _LEAST_SHARE}
    labels = [f"{_label(name)} {share:.0%}" for name, share in shown.items()]
    shares = [np.nan_to_num(columns[name] / columns["seconds"]) for name in shown]
    steps = np.concatenate([[0.0], columns["steps"]])  # a share belongs to the steps before it
    figure, axis = _axis(8.6, 3.0, steps[-1])
    stacked = axis.stackplot(
        steps, [np.concatenate([s[:1], s]) for s in shares], labels=labels, step="pre", alpha=0.85
    )
    for patch, name in zip(stacked, shown, strict=True):
        patch.set_color(f"C{names.index(name) % 10}")
        patch.set_linewidth(0)
    axis.set(ylim=(0, 1), xlabel="steps", ylabel="share of time")
    axis.grid(visible=False)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(reverse=True, loc="center left", bbox_to_anchor=(1, 0.5))
    return figures.inline_svg(figure, "phases", "Share of time: " + ", ".join(labels))


def _small(columns: Columns, name: str) -> str:
    """Draw one column by steps."""
    figure, axis = _axis(3.2, 1.8, columns["steps"][-1])
    axis.locator_params(nbins=4)
    axis.set_title(_label(name), loc="left")
    axis.plot(columns["steps"], columns[name], color="C0", **_dot_if_alone(columns[name]))
    alt = f"{_label(name)} by steps: {_course(columns[name])}"
    return page.figure(figures.inline_svg(figure, re.sub(r"\W", "-", name), alt))


def _axis(width: float, height: float, last: float) -> tuple[Any, Any]:
    """Make a figure of this size in inches, with an axis of steps from 0 to last."""
    with figures.style() as figure_class:
        figure = figure_class(figsize=(width, height), layout="constrained")
        axis = figure.add_subplot()
    axis.xaxis.set_major_formatter(figures.short_numbers())
    axis.set_xlim(0, last)
    return figure, axis


def _dot_if_alone(values: Array) -> dict[str, str]:
    """Ask for a marker if there is only one point, because a line of one point is invisible."""
    return {"marker": "o"} if np.isfinite(values).sum() == 1 else {}


def _course(values: Array) -> str:
    """Describe a curve in words."""
    known = values[np.isfinite(values)]
    if not len(known):
        return "no values"
    first, last, low, high = (
        _number(str(v)) for v in (known[0], known[-1], known.min(), known.max())
    )
    return f"first {first}, last {last}, lowest {low}, highest {high}"


def _label(name: str) -> str:
    """Return a column's name for readers: "steps_per_s" -> "steps / s", "update_s" -> "update"."""
    return name.replace("_per_", " / ").removesuffix("_s").replace("_", " ")


def _number(text: str) -> str:
    """Shorten a number from a CSV file; return other text unchanged."""
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:,.0f}" if abs(value) >= 1000 or value.is_integer() else f"{value:.4g}"


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text: strings unchanged, everything else as JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in values.items()}
