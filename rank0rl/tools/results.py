"""The results of a study: a table of its agents, a row for each run, and learning curves."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl.run import files
from rank0rl.run.folder import Array, RunData
from rank0rl.tools import figures, plot
from rank0rl.tools.readable import known

Agents = Mapping[tuple[str, str], Sequence[RunData]]
"""Runs by environment and agent; those of an agent differ in their seeds."""


def of_study(study: Path) -> Agents:
    """Return the runs in a study's folder that have ended; before the first has, those that have a return.

    Raises:
        ValueError: if there is none.
    """
    runs = plot.read_runs(sorted(path.parent for path in study.glob("*/progress.csv")))
    with_return = [run for run in runs if np.isfinite(run.column("return_mean")).any()]
    over = [run for run in with_return if ending(run)]
    if not with_return:
        raise ValueError(f"no run in {study} has a return yet: none of their episodes has ended")
    return plot.by_agent(over or with_return)


def ending(run: RunData) -> str:
    """Return the option by which a run has ended, "" if it has not come to its end."""
    path = run.folder / "summary.json"
    return str(files.read_json(path, "summary").get("ended", "")) if path.exists() else ""


def of_agents(agents: Agents, minutes_to: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Return a row for each agent in each environment.

    "return" is the mean, over seeds, of the mean return of the last 100 episodes, "iqm" its
    interquartile mean, which lies between "low" and "high" with 95 %. "minutes" are those of training,
    the mean over seeds. "to 1000" is the median of minutes until a mean return of 1000, inf if most
    seeds have not reached it.
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
                "return": _mean(there),
                "iqm": iqm,
                "low": low,
                "high": high,
                "min": min(there, default=np.nan),
                "max": max(there, default=np.nan),
                "steps": _mean([run.column("steps")[-1] for run in runs]),
                "minutes": _mean([run.column("seconds")[-1] / 60 for run in runs]),
                **{
                    f"to {at:g}": float(np.median([_minutes_until(run, at) for run in runs]))
                    for at in minutes_to
                },
            }
        )
    return rows


def of_runs(agents: Agents, minutes_to: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Return a row for each run, with the hash of its last weights."""
    rows = [
        {
            "run": run.folder.name,
            "environment": env_id,
            "agent": agent,
            "seed": run.settings["seed"],
            "return": _final(run),
            **({"evaluated": _last(run, "eval_return")} if "eval_every" in run.settings else {}),
            "ended": ending(run),
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


def _final(run: RunData) -> float:
    """Return the mean return of a run's last 100 episodes."""
    return float(run.column("return_mean")[-1])


def _minutes_until(run: RunData, ret: float) -> float:
    """Return the minutes of training until a mean return of 100 episodes; inf if the run has not reached it."""
    reached = (run.column("return_mean") >= ret) & (run.column("episodes") >= 100)
    return float(run.column("seconds")[reached.argmax()] / 60) if reached.any() else np.inf


def write(out: Path, agents: Agents, minutes_to: Sequence[float] = ()) -> str:
    """Write table.md, table.csv, runs.csv and learning.png into a study's folder; return the table."""
    rows = of_agents(agents, minutes_to)
    _write_csv(out / "table.csv", rows)
    _write_csv(out / "runs.csv", of_runs(agents, minutes_to))
    groups = plot.curves_of(agents, to_longest=True)
    means = plot.interquartile_means(groups)
    with figures.style():
        plot.draw(groups, "steps", means).savefig(out / "learning.png", dpi=120)
    words = ("environment", "agent")
    rule = [":---" if name in words else "---:" for name in rows[0]]
    lines = [_line(rows[0]), f"|{'|'.join(rule)}|"]
    text = "\n".join([*lines, *(_line(row.values()) for row in rows)]) + "\n"
    if means:
        text += "\nInterquartile mean of normalized returns over environments:\n\n" + "".join(
            f"- {agent}: {mean:.3f} (95 % interval {low:.3f} to {high:.3f})\n"
            for agent, (mean, low, high) in means.items()
        )
    (out / "table.md").write_text(text, encoding="utf-8")
    return text


def _line(values: Any) -> str:
    return f"| {' | '.join(map(shown, values))} |"


def shown(value: Any) -> str:
    """Return a value of a row as text."""
    return "never" if value == np.inf else known(value)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )


def _last(run: RunData, name: str) -> float:
    """Return the last number of a column that has gaps; nan without one."""
    values = run.column(name) if name in run.rows[0] else np.zeros(0)
    known: Array = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
