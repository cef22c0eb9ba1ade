"""The page of a study: its table, its learning curves, and what each run came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from rank0rl.run import files, settings
from rank0rl.tools import figures, plot, results
from rank0rl.tools.page import Series, chart, html
from rank0rl.tools.plot import Groups, interquartile_means
from rank0rl.tools.readable import duration, number, texts

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
    minutes_to = given.get("minutes_to", ())
    groups = plot.curves_of(agents, to_longest=True)
    env_ids = [*dict.fromkeys(env_id for env_id, _ in agents)]
    runs = [run for these in agents.values() for run in these]
    rows = results.of_runs(agents, minutes_to)
    overview = {
        "runs": number(len(runs)),
        "agents": number(len({agent for _, agent in agents})),
        "environments": number(len(env_ids)),
        "time of all runs": duration(sum(run.column("seconds")[-1] for run in runs)),
    }
    return html.document(
        ", ".join(env_ids),
        f"{study.resolve().name}: {len(runs)} runs",
        html.pairs(overview, "tiles"),
        html.section(
            "Mean return of the last 100 episodes",
            _table(results.of_agents(agents, minutes_to)),
            html.paragraph(
                "return: mean over seeds. iqm: interquartile mean, with its 95 % interval from "
                "low to high."
            ),
        ),
        html.section("Interquartile mean over environments", _means(groups)),
        *(html.section(env_id, _curves(env_id, groups, i)) for i, env_id in enumerate(env_ids)),
        html.section("Runs", _table(rows, but=("environment", "agent"))),  # a run's name has both
        html.section("Search", *_search(study, given)),
        html.section("Settings of the study", html.pairs(texts(given))),
    )


def _search(study: Path, given: Mapping[str, Any]) -> Sequence[Markup]:
    """Return the trials of a search, the best first; nothing without one."""
    if not (study / TRIALS).exists():
        return ()
    rows = files.read_table(study / TRIALS, "search")
    rows.sort(key=lambda row: -float(row["value"] or "-inf"))
    about = (
        f"Trials have the seeds {given['search_seeds']}. The results above have other ones: "
        f"{given['seeds']}. A trial's value is its {given['objective']} return."
    )
    return html.paragraph(about), html.table(
        [*rows[0]], [[*map(number, row.values())] for row in rows]
    )


def _table(rows: Sequence[Mapping[str, Any]], but: Sequence[str] = ()) -> Markup:
    names = [name for name in rows[0] if name not in but]
    return html.table(names, [[_text(name, row[name]) for name in names] for row in rows])


def _text(name: str, value: Any) -> str:
    return str(value) if name in ("seed", "weights_sha256") else results.shown(value)


def _means(groups: Groups) -> Markup:
    rows = [
        [agent, f"{mean:.3f}", f"{low:.3f}", f"{high:.3f}"]
        for agent, (mean, low, high) in interquartile_means(groups).items()
    ]
    return html.table(["agent", "normalized return", "low", "high"], rows)


def _curves(env_id: str, groups: Groups, number_of_chart: int) -> Markup:
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
    return chart(f"returns-{number_of_chart}", alt, series, finish)
