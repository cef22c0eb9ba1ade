"""The page of a study: its table, its learning curves, and what each run came to."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.run import files, settings
from rank0rl.tools import chart, figures, page, plot, results
from rank0rl.tools.curves import Groups, interquartile_means
from rank0rl.tools.readable import duration, number, texts
from rank0rl.tools.results import Agents
from rank0rl.tools.series import Series

FILE = "study.toml"
"""The file of a study's options, in its folder."""
TRIALS = "search.csv"
"""The trials of its search, a row for each, if it has one."""


def of_study(study: Path) -> str:
    """Return the page of a study, as far as it has come.

    Args:
        study: folder of the study.

    Raises:
        ValueError: if no run has a row yet, or no matplotlib.
    """
    given = settings.load(study / FILE)
    agents = results.of_study(study)
    runs = [run for these in agents.values() for run in these]
    minutes_to = given.get("minutes_to", ())
    groups = plot.curves_of(agents, to_longest=True)
    seconds = sum(run.column("seconds")[-1] for run in runs)
    return page.document(
        ", ".join(dict.fromkeys(env_id for env_id, _ in agents)),
        f"{study.resolve().name}: {len(runs)} runs",
        page.pairs(
            {
                "runs": number(len(runs)),
                "agents": number(len({agent for _, agent in agents})),
                "environments": number(len({env_id for env_id, _ in agents})),
                "time of all runs": duration(seconds),
            },
            "tiles",
        ),
        page.section("Mean return of the last 100 episodes", _agents(agents, minutes_to)),
        page.section("Interquartile mean over environments", _means(groups)),
        *(
            page.section(env_id, _curves(env_id, groups, i))
            for i, env_id in enumerate(dict.fromkeys(env_id for env_id, _ in groups))
        ),
        page.section("Runs", _runs(agents, minutes_to)),
        page.section("Search", _search(study, given)),
        page.section("Settings of the study", page.pairs(texts(given))),
    )


def _agents(agents: Agents, minutes_to: Sequence[float]) -> str:
    rows = results.of_agents(agents, minutes_to)
    caption = (
        "return: mean over seeds. iqm: interquartile mean, with its 95 % interval from low to high."
    )
    return _table(rows) + f"<p>{caption}</p>"


def _runs(agents: Agents, minutes_to: Sequence[float]) -> str:
    rows = results.of_runs(agents, minutes_to)
    named = ("environment", "agent")  # the name of the run says them
    return _table([{k: v for k, v in row.items() if k not in named} for row in rows])


def _search(study: Path, given: Mapping[str, Any]) -> str:
    """Return the trials of a search, the best first; "" without one."""
    if not (study / TRIALS).exists():
        return ""
    rows = files.read_table(study / TRIALS, "search")
    rows.sort(key=lambda row: -float(row["value"] or "-inf"))
    said = (
        f"Trials have the seeds {given['search_seeds']}. The results above have other ones: "
        f"{given['seeds']}. A trial's value is its {given['objective']} return."
    )
    return f"<p>{html.escape(said)}</p>" + page.table(
        [*rows[0]], [[*map(number, row.values())] for row in rows]
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [[_text(name, value) for name, value in row.items()] for row in rows]
    return page.table([*rows[0]], body)


def _text(name: str, value: Any) -> str:
    return str(value) if name in ("seed", "weights_sha256") else results.shown(value)


def _means(groups: Groups) -> str:
    rows = [
        [agent, f"{mean:.3f}", f"{low:.3f}", f"{high:.3f}"]
        for agent, (mean, low, high) in interquartile_means(groups).items()
    ]
    return page.table(["agent", "normalized return", "low", "high"], rows) if rows else ""


def _curves(env_id: str, groups: Groups, number_of_chart: int) -> str:
    """Draw the curves of all agents in an environment: their means, and bands from the lowest to the highest seed."""
    series = []
    these = {agent: curves for (env, agent), curves in groups.items() if env == env_id}
    for i, (agent, curves) in enumerate(these.items()):
        if len(curves.ret) > 1:
            low, high = curves.ret.min(0), curves.ret.max(0)
            name = "lowest to highest seed" if len(these) == 1 else f"{agent}, seeds"
            series.append(Series(name, curves.x, high, i % 10, "band", low))
        series.append(Series(agent, curves.x, curves.ret.mean(0), i % 10))
    ends = ", ".join(f"{agent} {number(c.ret[:, -1].mean())}" for agent, c in these.items())

    def finish(axis: Any) -> None:
        axis.xaxis.set_major_formatter(figures.short_numbers())
        axis.set_xlim(0, max(np.max(curves.x) for curves in these.values()))
        axis.set_xlabel("steps")
        axis.set_title("return", loc="left")

    alt = f"Mean return by steps in {env_id}, at the end: {ends}"
    return chart.chart(f"returns-{number_of_chart}", alt, series, finish)
