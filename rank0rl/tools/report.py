"""python -m rank0rl report RUN: write a run or a study as one self-contained HTML page.

Figures are SVG inside the page, in its light or dark colors. The page loads nothing and runs no
script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from markupsafe import Markup

from rank0rl.launch import one_line, usage_error
from rank0rl.run import files
from rank0rl.run.code import recorded
from rank0rl.run.folder import FOREIGN, Array, RunData, differing, read_run
from rank0rl.run.usage import PHASES
from rank0rl.tools.figures import (
    Finish,
    Series,
    by_steps,
    chart,
    duration,
    html,
    label,
    number,
    small_chart,
    texts,
)
from rank0rl.tools.speedup import outputs
from rank0rl.tools.study import results

_POINTS = 400  # most points of a curve; in longer runs, a point is the mean of several iterations
_LEAST_SHARE = 0.005  # of the time: a smaller phase would be invisible in the figure
_CHARTS = 40  # most columns of a run, by its own choice, that are drawn: each takes 0.15 s
_BESIDE = ("length_mean", "steps_per_s", "memory_mb")


@dataclass(frozen=True)
class Options:
    """Write one HTML page about a run, a study, or a speedup study."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, or of the study."""
    others: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of other runs. Their curves are laid over those of the run."""
    out: Path | None = None
    """File to write. None: report.html in the folder."""


@np.errstate(all="ignore")  # of numbers that no run has written
def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl report")
    out = given.out or given.folder / "report.html"
    try:
        files.write(out, _page(given.folder, given.others).encode())
    except (ValueError, OSError) as error:
        return usage_error(str(error))
    except FOREIGN as error:
        what = "holds what no run has written, or rank0rl has a bug"
        return usage_error(one_line(f"{given.folder} {what}: {error!r}"))
    print(one_line(out))
    return 0


def _page(folder: Path, others: Sequence[Path]) -> str:
    for one in (folder, *others):
        for file, page in ((outputs.FILE, outputs.page), (results.FILE, results.page)):
            if not (one / file).exists():
                continue
            if others:
                raise ValueError(
                    f"only runs can be laid over each other, and {one} is a study: name it alone"
                )
            return page(folder)
    return of_run(folder, others)


@dataclass(frozen=True)
class _Shown:
    """A run on the page."""

    run: RunData
    label: str
    color: int
    columns: Mapping[str, Array]  # numbers, shape (points,); NaN where there is no number


def of_run(folder: Path, others: Sequence[Path] = ()) -> str:
    """Return the page of a run, as far as it has come, with the curves of other runs laid over its own.

    Raises:
        ValueError: if a folder holds no run with at least one iteration, or no matplotlib.
    """
    each = [*_shown([folder, *others])]
    first, first_run = each[0], ", first run" if others else ""
    run, settings = first.run, first.run.settings
    names = list(run.rows[-1])
    # The agent's own columns come last.
    info, own = run.info_columns(), names[names.index("weights_sha256") + 1 :]
    left_out = max(0, len(info) + len(own) - _CHARTS)
    info, own = info[:_CHARTS], own[: max(0, _CHARTS - len(info))]
    summary = folder / "summary.json"
    values = files.read_json(summary, "summary") if summary.exists() else {}
    nothing = np.zeros(0)
    key = html.legend([Series(one.label, nothing, nothing, one.color) for one in each])
    beside = [*_small(each, [*info, *_BESIDE]), *_ranks(first)]
    recorded = [*_small(each, own)] or ""
    return html.document(
        f"{settings['env_id']}, {settings['algo']}, seed {settings['seed']}",
        f"{folder.resolve().name}: {run.column('iteration')[-1]:,.0f} iterations",
        html.pairs(_overview(run), "tiles"),
        html.section("Return", _returns(each)),
        html.section("Runs", _compared(each) if others else ""),
        html.section(f"Where the time goes{first_run}", _phases(first)),
        html.section("Episodes and speed, by steps", key, html.small(beside)),
        recorded and html.section("What the agent records, by steps", key, html.small(recorded)),
        html.paragraph(f"Columns of progress.csv that are not drawn: {left_out:,}.")
        if left_out
        else "",
        html.section(f"Settings{first_run}", html.pairs(texts(settings))),
        html.section(f"Summary{first_run}", html.pairs(texts(values))),
        html.section(f"Starts{first_run}", _starts(run.starts)),
    )


def _shown(folders: Sequence[Path]) -> Iterator[_Shown]:
    """Yield runs, labelled by the names of their folders, or by their paths if names are equal."""
    labels = [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [str(folder) for folder in folders]
    for i, (folder, text) in enumerate(zip(folders, labels, strict=True)):
        run = read_run(folder)
        names = [n for n in run.rows[-1] if not n.endswith("sha256") and _is_number(run, n)]
        yield _Shown(run, text, i % 10, _thinned(run, names))


def _is_number(run: RunData, column: str) -> bool:
    """Return False if a column holds words, such as settings, or what a hook has written."""
    try:
        run.column(column)
    except ValueError:
        return False
    return True


def _overview(run: RunData) -> dict[str, str]:
    """Return the most important numbers of a run, name -> text."""
    last, settings = run.rows[-1], run.settings
    steps, episodes = "steps", "episodes"
    if "num_episodes" in settings:
        episodes += f" of {settings['num_episodes']:,}"
    else:
        steps += f" of {settings['total_steps']:,}"
    seconds = float(last["seconds"])
    return {
        "mean return": number(last["return_mean"]),
        steps: number(last["steps"]),
        episodes: number(last["episodes"]),
        "time": duration(seconds),
        "steps / s": number(float(last["steps"]) / seconds),
        **({"ranks": _ranks_of(run.starts[-1])} if run.starts else {}),
    }


def _ranks_of(start: Mapping[str, Any]) -> str:
    each = start.get("ranks_per_env", 1)
    return f"{start['nprocs']}" + (f", of {each} processes" if each != 1 else "")


def _compared(each: Sequence[_Shown]) -> Markup:
    """Return a table with a row for each run: how far it came, and the settings that differ."""
    rows = []
    for one, own in zip(each, differing([one.run.settings for one in each]), strict=True):
        last = one.run.rows[-1]
        rows.append(
            {
                "run": one.label,
                **{name: number(last[name]) for name in ("return_mean", "steps", "episodes")},
                "time": duration(float(last["seconds"])),
                **({"ranks": str(one.run.starts[-1]["nprocs"])} if one.run.starts else {}),
                **texts(own),
            }
        )
    names = dict.fromkeys(name for row in rows for name in row)
    body = [[row.get(name, "") for name in names] for row in rows]
    return html.table([label(name) for name in names], body)


def _starts(starts: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a table with a column for each start of a run: when, where, with which versions."""
    texts = [" ".join(f"{path} {its}" for path, its in recorded(start).items()) for start in starts]
    flat = [
        {**start, **start.get("versions", {}), **({"code": text} if text else {})}
        for start, text in zip(starts, texts, strict=True)
    ]
    names = [name for name in dict.fromkeys(n for one in flat for n in one) if name != "versions"]
    rows = [[name, *(str(one.get(name, "")) for one in flat)] for name in names]
    return html.table(["", *(f"start {i + 1}" for i in range(len(flat)))], rows, "text")


def _thinned(run: RunData, names: Sequence[str]) -> dict[str, Array]:
    """Return columns of at most _POINTS points, each the mean of a block of rows.

    "steps" is the number at the end of each block. "seconds" is the time of an iteration.
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
    """Return the seconds of each iteration that has a row; differences of the column "seconds" would lose digits."""
    steps, iterations = (np.diff(run.column(x), prepend=0.0) for x in ("steps", "iteration"))
    return steps / iterations / run.column("steps_per_s")


def _note(each: Sequence[_Shown]) -> str:
    """Return a sentence for a caption if points are means of iterations."""
    blocks = sorted({_block(one.run) for one in each})
    several = " or ".join(map(str, blocks))
    return f" Each point is the mean of {several} iterations." if blocks[-1] > 1 else ""


def _returns(each: Sequence[_Shown]) -> Markup:
    """Draw the learning curves; of a run alone, with the spread of its episodes."""
    is_alone = len(each) == 1
    series = [*_spread(each[0].columns)] if is_alone else []
    for one in each:
        steps, columns = one.columns["steps"], one.columns
        name = "mean" if is_alone else one.label
        series.append(Series(name, steps, columns["return_mean"], one.color))
        if np.isfinite(columns.get("eval_return", np.nan)).any():
            name = "evaluation" if is_alone else f"{one.label}, evaluation"
            color = 1 if is_alone else one.color
            series.append(Series(name, steps, columns["eval_return"], color, "sparse"))
    alt = f"Mean return by steps: {_course(each[0].columns['return_mean'])}"
    caption = "Return of the last 100 training episodes." + _note(each)
    return chart("returns", alt, series, _by_steps(each, "return"), caption=caption)


def _spread(columns: Mapping[str, Array]) -> Iterator[Series]:
    """Yield the bands of a learning curve whose columns are recorded."""
    steps, mean = columns["steps"], columns["return_mean"]
    if {"return_min", "return_max"} <= columns.keys():
        low, high = columns["return_min"], columns["return_max"]
        yield Series("lowest to highest", steps, high, 0, "wide", low)
    if "return_std" in columns:
        std = columns["return_std"]
        yield Series("standard deviation", steps, mean + std, 0, "band", mean - std)


def _phases(shown: _Shown) -> Markup:
    """Draw each phase's share of the time of an iteration, stacked; the rest belongs to no phase."""
    run, columns, percent = shown.run, shown.columns, "{:.0%}".format
    total = _seconds(run).sum()
    series, top = [], np.zeros(len(columns["steps"]))
    for color, phase in enumerate(PHASES):
        name = f"{phase}_s"
        share = float(np.nansum(run.column(name)) / total) if name in columns else 0.0
        if share >= _LEAST_SHARE:
            low, top = top, top + np.nan_to_num(columns[name] / columns["seconds"])
            whole = percent(share)
            series.append(Series(phase, columns["steps"], top, color, "layer", low, percent, whole))

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
    return chart("phases", alt, series, finish, caption=caption)


def _small(each: Sequence[_Shown], names: Sequence[str]) -> Iterator[Markup]:
    """Yield a small chart by steps for each of these columns that the first run has."""
    for name in names:
        if name not in each[0].columns:
            continue
        series = []
        for one in each:
            if name in one.columns:
                its = one.label if len(each) > 1 else label(name)
                series.append(Series(its, one.columns["steps"], one.columns[name], one.color))
        alt = f"{label(name)} by steps: {_course(each[0].columns[name])}"
        yield small_chart(label(name), alt, series, _by_steps(each))


def _ranks(shown: _Shown) -> Iterator[Markup]:
    """Yield a small chart of the seconds of the slowest and the fastest rank, if they are recorded."""
    steps, columns = shown.columns["steps"], shown.columns
    if {"slowest_s", "fastest_s"} <= columns.keys():
        series = [
            Series("slowest", steps, columns["slowest_s"], shown.color),
            Series("fastest", steps, columns["fastest_s"], shown.color, "dashed"),
        ]
        alt = f"seconds of the slowest rank by steps: {_course(columns['slowest_s'])}"
        yield small_chart("slowest and fastest (dashed) rank, s", alt, series, _by_steps([shown]))


def _by_steps(each: Sequence[_Shown], y: str = "") -> Finish:
    return by_steps(max(one.columns["steps"][-1] for one in each), y)


def _course(values: Array) -> str:
    """Describe a curve in words."""
    known = values[np.isfinite(values)]
    if not len(known):
        return "no values"
    first, last, low, high = map(number, (known[0], known[-1], known.min(), known.max()))
    return f"first {first}, last {last}, lowest {low}, highest {high}"
