"""The results of a study: tables of its agents and runs, learning curves, and a page with all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from rank0rl.launch import one_line
from rank0rl.run import files, settings
from rank0rl.run.folder import RunData
from rank0rl.tools import figures, plot
from rank0rl.tools.figures import html, number

FILE = "study.toml"
"""The file of a study's options, in its folder."""
TRIALS = "search.csv"
"""The trials of its search, a row for each, if it has one."""

Agents = Mapping[tuple[str, str], Sequence[RunData]]
"""Runs by environment and agent; those of an agent differ in their seeds."""


def _read(study: Path) -> Agents:
    """Return the runs in a study's folder that have ended; the others are named on stderr.

    Before the first has ended, return those that have a return.

    Raises:
        ValueError: if there is none.
    """
    folders = sorted(path.parent for path in study.glob("*/progress.csv"))
    runs = plot.read_runs(folders, "return_mean")
    going_on = [run.folder for run in runs if not ending(run.folder)]
    if len(going_on) < len(runs):
        for folder in going_on:
            print(one_line(f"left out: {folder} has not come to its end"), file=sys.stderr)
        runs = [run for run in runs if run.folder not in going_on]
    return plot.by_agent(runs)


def ending(run: Path) -> str:
    """Return the option by which the run in a folder has ended, "" if it has not come to its end."""
    path = run / "summary.json"
    return str(files.read_json(path, "summary").get("ended", "")) if path.exists() else ""


@np.errstate(all="ignore")  # of numbers that no run has written
def write(out: Path, minutes_to: Sequence[float] = (), notes: Sequence[str] = ()) -> str:
    """Write table.md, table.csv, runs.csv, learning.png and report.html of a study; return the table.

    `notes` are lines below the table.

    Raises:
        ValueError: if no run has a return, or no matplotlib.
    """
    agents = _read(out)
    rows = _of_agents(agents, minutes_to)
    figures.write_csv(out / "table.csv", rows)
    figures.write_csv(out / "runs.csv", _of_runs(agents, minutes_to, _grid(out)))
    groups = plot.curves_of(agents, to_longest=True)
    means = plot.interquartile_means(groups)
    with figures.style():
        figure = plot.draw(groups, "steps", means)
    files.write(out / "learning.png", figures.image(figure))
    cells = [[*map(_shown, row.values())] for row in rows]
    lines = figures.markdown([*rows[0]], cells, ("environment", "agent"))
    if means:
        lines += [
            "",
            "Interquartile mean of normalized returns over environments, 95 % from low to high:",
            "",
        ]
        cells = [
            [agent, *(f"{number:.3f}" for number in of_agent)] for agent, of_agent in means.items()
        ]
        lines += figures.markdown(["agent", "mean", "low", "high"], cells, ("agent",))
    lines += [line for note in notes for line in ("", note)]
    text = "\n".join(lines) + "\n"
    files.write(out / "table.md", text.encode())
    files.write(out / "report.html", page(out, agents).encode())
    return text


def _grid(study: Path) -> list[str]:
    """Return the names of the settings of a study's grid."""
    words = settings.load(study / FILE).get("grid", ()) if (study / FILE).exists() else ()
    return [str(word).partition("=")[0].replace("-", "_") for word in words]


def page(study: Path, agents: Agents | None = None) -> str:
    """Return the page of a study, as far as it has come; `agents` are its runs, if they have been read.

    Raises:
        ValueError: if no run has a row yet, or no matplotlib.
    """
    given = settings.load(study / FILE)
    agents = _read(study) if agents is None else agents
    minutes_to = given.get("minutes_to", [])
    if not isinstance(minutes_to, list) or not all(
        isinstance(at, int | float) for at in minutes_to
    ):
        raise ValueError(f"{study / FILE}: minutes_to must be numbers: got {minutes_to!r:.100}")
    groups = plot.curves_of(agents, to_longest=True)
    means = [
        [agent, f"{mean:.3f}", f"{low:.3f}", f"{high:.3f}"]
        for agent, (mean, low, high) in plot.interquartile_means(groups).items()
    ]
    env_ids = [*dict.fromkeys(env_id for env_id, _ in agents)]
    runs = [run for these in agents.values() for run in these]
    overview = {
        "runs": number(len(runs)),
        "agents": number(len({agent for _, agent in agents})),
        "environments": number(len(env_ids)),
        "time of all runs": figures.duration(sum(run.column("seconds")[-1] for run in runs)),
    }
    return html.document(
        ", ".join(env_ids),
        f"{study.resolve().name}: {len(runs)} runs",
        html.pairs(overview, "tiles"),
        html.section(
            "Mean return of the last 100 episodes",
            _table(_of_agents(agents, minutes_to)),
            html.paragraph(
                "return: mean over seeds. iqm: interquartile mean, with its 95 % interval from "
                "low to high."
            ),
        ),
        html.section(
            "Interquartile mean over environments",
            html.table(["agent", "normalized return", "low", "high"], means),
        ),
        *(html.section(env_id, _curves(env_id, groups, i)) for i, env_id in enumerate(env_ids)),
        html.section("Runs", _table(_of_runs(agents, minutes_to), but=("environment", "agent"))),
        html.section("Search", *_search(study, given)),
        html.section("Settings of the study", html.pairs(figures.texts(given))),
    )


def _of_agents(agents: Agents, minutes_to: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Return a row for each agent in each environment.

    "return" is the mean, over seeds, of the mean return of the last 100 episodes, "iqm" its
    interquartile mean, which lies between "low" and "high" with 95 %. "minutes" are those of training,
    the mean over seeds. "to 1000" is the median of minutes until a mean return of 1000, as in
    stop_at_return; inf if most seeds have not reached it.
    """
    rows = []
    for (env_id, agent), runs in agents.items():
        returns = np.array([_final(run) for run in runs])
        there = returns[np.isfinite(returns)]
        iqm, low, high = plot.interquartile_mean([there]) if len(there) > 1 else (np.nan,) * 3
        rows.append(
            {
                "environment": env_id,
                "agent": agent,
                "seeds": len(runs),
                "return": float(there.mean()) if len(there) else np.nan,
                "iqm": iqm,
                "low": low,
                "high": high,
                "min": min(there, default=np.nan),
                "max": max(there, default=np.nan),
                "steps": float(np.mean([run.column("steps")[-1] for run in runs])),
                "minutes": float(np.mean([run.column("seconds")[-1] / 60 for run in runs])),
                **{
                    f"to {at:g}": float(np.median([_minutes_until(run, at) for run in runs]))
                    for at in minutes_to
                },
            }
        )
    return rows


def _of_runs(
    agents: Agents, minutes_to: Sequence[float] = (), grid: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a row for each run, with its settings of a grid and the hash of its last weights."""
    rows = [
        {
            "run": run.folder.name,
            "environment": env_id,
            "agent": agent,
            **{name: _cell(run.settings.get(name, np.nan)) for name in grid},
            "seed": run.settings["seed"],
            "return": _final(run),
            **({"evaluated": _last(run, "eval_return")} if "eval_every" in run.settings else {}),
            "ended": ending(run.folder),
            "steps": int(run.rows[-1]["steps"]),
            "seconds": float(run.rows[-1]["seconds"]),
            **{f"minutes to {at:g}": _minutes_until(run, at) for at in minutes_to},
            "weights_sha256": run.rows[-1]["weights_sha256"],
        }
        for (env_id, agent), runs in agents.items()
        for run in runs
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, np.nan) for name in names} for row in rows]


def _cell(value: Any) -> Any:
    """Return the value of a setting as a cell of a table."""
    return value if isinstance(value, int | float | str) else json.dumps(value)


def _final(run: RunData) -> float:
    """Return the mean return of a run's last 100 episodes."""
    return float(run.column("return_mean")[-1])


def _minutes_until(run: RunData, ret: float) -> float:
    """Return the minutes of training until a mean return, as in stop_at_return; inf if the run has not reached it."""
    if "eval_every" in run.settings:
        reached = run.column("eval_return") >= ret
    else:
        reached = (run.column("return_mean") >= ret) & (run.column("episodes") >= 100)
    return float(run.column("seconds")[reached.argmax()] / 60) if reached.any() else np.inf


def _last(run: RunData, name: str) -> float:
    """Return the last number of a column that has gaps; nan without one."""
    values = run.column(name) if name in run.rows[0] else np.zeros(0)
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def _shown(value: Any) -> str:
    """Return a value of a row as text."""
    if value == np.inf:
        return "never"
    return "" if value != value else number(value)  # noqa: PLR0124 - nan


def _table(rows: Sequence[Mapping[str, Any]], but: Sequence[str] = ()) -> Markup:
    names = [name for name in rows[0] if name not in but]
    exact = ("seed", "weights_sha256")
    cells = [[str(r[n]) if n in exact else _shown(r[n]) for n in names] for r in rows]
    return html.table(names, cells)


def _curves(env_id: str, groups: plot.Groups, number_of_chart: int) -> Markup:
    these = {agent: curves for (env, agent), curves in groups.items() if env == env_id}
    ends = ", ".join(f"{agent} {number(c.ret[:, -1].mean())}" for agent, c in these.items())
    alt = f"Mean return by steps in {env_id}, at the end: {ends}"
    finish = figures.by_steps(max(np.max(curves.x) for curves in these.values()), "return")
    series = plot.series_of(groups, env_id)
    return figures.chart(f"returns-{number_of_chart}", alt, series, finish)


def _search(study: Path, given: Mapping[str, Any]) -> Sequence[Markup]:
    """Return the trials of a search, the best first; nothing without one."""
    if not (study / TRIALS).exists():
        return ()
    rows = files.read_table(study / TRIALS, "search")
    if not rows:
        return ()
    try:
        rows.sort(key=lambda row: -float(row["value"] or "-inf"))
    except (KeyError, ValueError):
        raise ValueError(f"{study / TRIALS} must have numbers in a column value") from None
    about = (
        f"Trials have the seeds {given['search_seeds']}. The results above have other ones: "
        f"{given['seeds']}. A trial's value is its {given['objective']} return."
    )
    cells = [[*map(number, row.values())] for row in rows]
    return html.paragraph(about), html.table([*rows[0]], cells)
