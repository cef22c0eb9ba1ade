"""The page of a run, with the curves of other runs laid over its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.run import files
from rank0rl.run import folder as run_data
from rank0rl.run.folder import Array, RunData
from rank0rl.run.timing import PHASES
from rank0rl.tools import chart, figures, page
from rank0rl.tools.readable import duration, label, number, percent, texts
from rank0rl.tools.series import Series

_POINTS = 400  # most points of a curve; in longer runs, a point is the mean of several iterations
_LEAST_SHARE = 0.005  # of the time: a smaller phase would be invisible in the figure
_BESIDE = ("length_mean", "steps_per_s", "memory_mb")

Columns = Mapping[str, Array]
"""Numbers by column name, shape (points,); NaN where there is no number."""


@dataclass(frozen=True)
class Shown:
    """A run on the page."""

    run: RunData
    columns: Columns
    label: str
    color: int


def of_run(folder: Path, others: Sequence[Path] = ()) -> str:
    """Return the page of a run, as far as the run has come.

    Args:
        folder: the run's folder.
        others: folders of runs whose curves are laid over those of the run.

    Raises:
        ValueError: if a folder holds no run with at least one iteration, or no matplotlib.
    """
    each = [*_shown([folder, *others])]
    first = each[0]
    run, settings = first.run, first.run.settings
    last = run.rows[-1]
    names = list(last)
    own = names[names.index("weights_sha256") + 1 :]  # the agent's own columns come last
    beside = [n for n in (*run.info_columns(), *_BESIDE) if n in first.columns]
    summary = folder / "summary.json"
    values = files.read_json(summary, "summary") if summary.exists() else {}
    key = page.legend([Series(one.label, *_EMPTY, one.color) for one in each]) * (len(each) > 1)
    alone = ", first run" * (len(each) > 1)
    return page.document(
        f"{settings['env_id']}, {settings['algo']}, seed {settings['seed']}",
        f"{folder.resolve().name}: {len(run.rows):,} iterations",
        page.pairs(_overview(run), "tiles"),
        page.section("Return", _returns(each)),
        page.section("Runs", _compared(each)),
        page.section(f"Where the time goes{alone}", _phases(first)),
        _charts(
            "Episodes and speed, by steps",
            key,
            [*(_small(each, n) for n in beside), *_ranks(first)],
        ),
        _charts(
            "What the agent records, by steps",
            key,
            [_small(each, n) for n in own if n in first.columns],
        ),
        page.section(f"Settings{alone}", page.pairs(texts(settings))),
        page.section(f"Summary{alone}", page.pairs(texts(values))),
        page.section(f"Starts{alone}", _starts(run.starts)),
    )


_EMPTY = np.zeros(0), np.zeros(0)


def _shown(folders: Sequence[Path]) -> Iterator[Shown]:
    """Yield runs, labelled by the names of their folders, or by their paths if names are equal."""
    labels = [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [str(folder) for folder in folders]
    for i, (folder, text) in enumerate(zip(folders, labels, strict=True)):
        run = run_data.read_run(folder)
        names = [n for n in run.rows[-1] if n != "settings" and not n.endswith("sha256")]
        yield Shown(run, _thinned(run, names), text, i % 10)


def _charts(heading: str, key: str, charts: Sequence[str]) -> str:
    return page.section(heading, key * bool(charts), page.small(charts))


def _overview(run: RunData) -> dict[str, str]:
    """Return the most important numbers of a run, name -> text."""
    last, settings = run.rows[-1], run.settings
    by_episodes = "num_episodes" in settings
    of_steps = "" if by_episodes else f" of {settings['total_steps']:,}"
    of_episodes = f" of {settings['num_episodes']:,}" if by_episodes else ""
    seconds = float(last["seconds"])
    return {
        "mean return": number(last["return_mean"]),
        f"steps{of_steps}": number(last["steps"]),
        f"episodes{of_episodes}": number(last["episodes"]),
        "time": duration(seconds),
        "steps / s": number(float(last["steps"]) / seconds),
        **({"ranks": str(run.starts[-1]["nprocs"])} if run.starts else {}),
    }


def _compared(each: Sequence[Shown]) -> str:
    """Return a table with a row for each run: how far it came, and the settings that differ."""
    if len(each) == 1:
        return ""
    settings = run_data.differing([one.run.settings for one in each])
    rows = []
    for one, own in zip(each, settings, strict=True):
        last = one.run.rows[-1]
        came = {name: number(last[name]) for name in ("return_mean", "steps", "episodes")}
        ranks = {"ranks": str(one.run.starts[-1]["nprocs"])} if one.run.starts else {}
        time = {"time": duration(float(last["seconds"]))}
        rows.append({"run": one.label} | came | time | ranks | texts(own))
    names = dict.fromkeys(name for row in rows for name in row)
    return page.table([*map(label, names)], [[row.get(n, "") for n in names] for row in rows])


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


def _note(each: Sequence[Shown]) -> str:
    blocks = sorted({_block(one.run) for one in each})
    several = " or ".join(map(str, blocks))
    return f" Each point is the mean of {several} iterations." * (blocks[-1] > 1)


def _seconds(run: RunData) -> Array:
    """Return the seconds of each iteration; differences of the column "seconds" would lose digits."""
    return np.diff(run.column("steps"), prepend=0.0) / run.column("steps_per_s")


def _returns(each: Sequence[Shown]) -> str:
    """Draw the learning curves; of a run alone, with the spread of its episodes."""
    series = [*_spread(each[0].columns)] if len(each) == 1 else []
    for one in each:
        x, alone = one.columns["steps"], len(each) == 1
        name = "mean" if alone else one.label
        series.append(Series(name, x, one.columns["return_mean"], one.color))
        evaluated = one.columns.get("eval_return", np.full(len(x), np.nan))
        if np.isfinite(evaluated).any():
            name = "evaluation" if alone else f"{one.label}, evaluation"
            series.append(Series(name, x, evaluated, 1 if alone else one.color, "sparse"))
    alt = f"Mean return by steps: {_course(each[0].columns['return_mean'])}"
    caption = "Return of the last 100 training episodes." + _note(each)
    return chart.chart("returns", alt, series, _by_steps(each, "return"), caption=caption)


def _spread(columns: Columns) -> Iterator[Series]:
    """Yield the bands of a learning curve whose columns are recorded."""
    steps, mean = columns["steps"], columns["return_mean"]
    if {"return_min", "return_max"} <= columns.keys():
        low, high = columns["return_min"], columns["return_max"]
        yield Series("lowest to highest", steps, high, 0, "wide", low)
    if "return_std" in columns:
        std = columns["return_std"]
        yield Series("standard deviation", steps, mean + std, 0, "band", mean - std)


def _phases(shown: Shown) -> str:
    """Draw each phase's share of the time of an iteration, stacked; the rest belongs to no phase."""
    run, columns = shown.run, shown.columns
    total = _seconds(run).sum()
    series, top = [], np.zeros(len(columns["steps"]))
    for color, phase in enumerate(PHASES):
        seconds = columns.get(f"{phase}_s")
        share = 0.0 if seconds is None else float(np.nansum(run.column(f"{phase}_s")) / total)
        if seconds is not None and share >= _LEAST_SHARE:
            low, top = top, top + np.nan_to_num(seconds / columns["seconds"])
            x, whole = columns["steps"], percent(share)
            series.append(Series(phase, x, top, color, "layer", low, percent, whole))

    def finish(axis: Any) -> None:
        _by_steps([shown], "share of time")(axis)
        axis.set_ylim(0, 1)
        axis.grid(visible=False)
        axis.yaxis.set_major_formatter("{x:.0%}")

    alt = "Share of time: " + ", ".join(f"{one.label} {one.whole}" for one in series)
    caption = (
        "Each phase's share of an iteration's time on rank 0. "
        "The legend gives its share of the whole run." + _note([shown])
    )
    return chart.chart("phases", alt, series, finish, caption=caption)


def _small(each: Sequence[Shown], name: str) -> str:
    """Draw one column by steps."""
    series = [
        Series(
            one.label if len(each) > 1 else label(name),
            one.columns["steps"],
            one.columns[name],
            one.color,
        )
        for one in each
        if name in one.columns
    ]
    alt = f"{label(name)} by steps: {_course(each[0].columns[name])}"
    return chart.small(label(name), alt, series, _by_steps(each))


def _ranks(shown: Shown) -> Iterator[str]:
    """Draw the seconds of the slowest and the fastest rank, if they are recorded."""
    steps, columns = shown.columns["steps"], shown.columns
    if {"slowest_s", "fastest_s"} <= columns.keys():
        series = [
            Series("slowest", steps, columns["slowest_s"], shown.color),
            Series("fastest", steps, columns["fastest_s"], shown.color, "dashed"),
        ]
        alt = f"seconds of the slowest rank by steps: {_course(columns['slowest_s'])}"
        yield chart.small("slowest and fastest (dashed) rank, s", alt, series, _by_steps([shown]))


def _by_steps(each: Sequence[Shown], y: str = "") -> Any:
    """Return a function that gives an axis the steps of these runs, and labels if y has one."""
    last = max(one.columns["steps"][-1] for one in each)

    def finish(axis: Any) -> None:
        axis.xaxis.set_major_formatter(figures.short_numbers())
        axis.set_xlim(0, last)
        if y:
            axis.set_xlabel("steps")
            axis.set_title(y, loc="left")

    return finish


def _course(values: Array) -> str:
    """Describe a curve in words."""
    known = values[np.isfinite(values)]
    if not len(known):
        return "no values"
    first, last, low, high = map(number, (known[0], known[-1], known.min(), known.max()))
    return f"first {first}, last {last}, lowest {low}, highest {high}"
