"""python -m rank0rl plot RUN...: draw learning curves, one axis per environment, one color per agent.

Runs that differ only in their seed form one curve. Its line is their mean; its band reaches from
the lowest to the highest seed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from rank0rl.options import names
from rank0rl.run import folder as run_data
from rank0rl.run.agents import short_name
from rank0rl.run.folder import Array, RunData
from rank0rl.run.options import RunOptions
from rank0rl.tools import figures
from rank0rl.tools.curves import Curves, Groups, interquartile_means, on_grid

_RETURN = "return_mean"
_KINDS = (".png", ".svg", ".pdf")
# Runs that differ only in these settings form one curve, or are told apart by other means.
_SAME_CURVE = {
    *names(RunOptions, changes_curve=False),
    *("env_id", "algo", "seed", "max_replay_steps"),
}


@dataclass(frozen=True)
class Options:
    """Draw learning curves of runs, and print the return at the end of each curve."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs. Runs that differ only in their seed form one curve."""
    x: Literal["steps", "hours"] = "steps"
    """Horizontal axis: environment steps, or hours of training."""
    y: str = _RETURN
    """Vertical axis: a column of progress.csv, such as success_mean in a run with --info success."""
    out: Path = Path("learning.png")
    """File to write. Its suffix chooses the format: .png, .svg or .pdf."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl plot")
    try:
        if given.out.suffix not in _KINDS:
            raise ValueError(f"out must end in {' or '.join(_KINDS)}: got {given.out}")
        groups = group(given.runs, given.x, given.y)
        means = interquartile_means(groups) if given.y == _RETURN else {}
        with figures.style():
            draw(groups, given.x, means, given.y).savefig(given.out, dpi=120)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for (env_id, agent), curves in groups.items():
        ends = curves.ret[:, -1]
        print(
            f"{env_id}  {agent}: {ends.mean():.6g} (from {ends.min():.6g} to {ends.max():.6g}, seeds: "
            f"{len(ends)}) at {curves.x[-1]:,.6g} {given.x}"
        )
    for agent, (mean, low, high) in means.items():
        print(f"interquartile mean  {agent}: {mean:.3f} (95 % interval {low:.3f} to {high:.3f})")
    print(given.out)
    return 0


def group(
    folders: Sequence[Path], x: str = "steps", y: str = _RETURN
) -> dict[tuple[str, str], Curves]:
    """Group the curves of runs by environment and agent, sorted.

    A folder without a row is left out, with a note on stderr.

    An agent is named by its algorithm and by the settings in which the runs of this algorithm in
    this environment differ. With x="hours", the number of ranks is one of these settings.

    Args:
        folders: folders of the runs.
        x: "steps" or "hours".
        y: a column of their records.

    Returns:
        (environment, agent) -> curves.

    Raises:
        ValueError: if no folder holds a run with a row, a run has no return, or two runs have the
            same seed and settings.
    """
    if not folders:
        raise ValueError("name at least one run's folder, such as runs/Walker2d-v5-ppo-seed0-...")
    return curves_of(by_agent(read_runs(folders), x), x, y)


def curves_of(
    agents: Mapping[tuple[str, str], Sequence[RunData]],
    x: str = "steps",
    y: str = _RETURN,
    to_longest: bool = False,
) -> dict[tuple[str, str], Curves]:
    """Return the curves of runs that are grouped by environment and agent.

    Args:
        agents: runs from `by_agent`.
        x: "steps" or "hours".
        y: a column of their records.
        to_longest: see `on_grid`.

    Raises:
        ValueError: if a run has no such number, or the runs of a group cover no common range.
    """
    return {
        key: on_grid([_curve(run, x, y) for run in runs], to_longest)
        for key, runs in agents.items()
    }


def by_agent(runs: Sequence[RunData], x: str = "steps") -> dict[tuple[str, str], list[RunData]]:
    """Group runs by environment and agent, sorted; the runs of a group differ in their seeds.

    Args:
        runs: the runs.
        x: "steps" or "hours", as in `group`.

    Raises:
        ValueError: if two runs have the same seed and settings.
    """
    named: dict[tuple[str, str], list[RunData]] = {}
    for run in runs:
        name = run.settings["env_id"], short_name(run.settings["algo"])
        named.setdefault(name, []).append(run)
    seeds: dict[tuple[str, str], dict[int, list[RunData]]] = {}
    for (env_id, algo), these in named.items():
        settings = [_curve_settings(run, x) for run in these]
        for run, differing in zip(these, run_data.differing(settings), strict=True):
            agent = " ".join([algo, *(f"{name}={value}" for name, value in differing.items())])
            of_agent = seeds.setdefault((env_id, agent), {})
            of_agent.setdefault(run.settings["seed"], []).append(run)
    _refuse_equal([equal for of_agent in seeds.values() for equal in of_agent.values()])
    return {
        key: [run for _, (run,) in sorted(of_agent.items())]
        for key, of_agent in sorted(seeds.items())
    }


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read runs, but for those without a row, which are named on stderr.

    Raises:
        ValueError: if no run has a row.
    """
    runs, without = [], []
    for folder in folders:
        try:
            runs.append(run_data.read_run(folder))
        except run_data.NoRowsError as error:
            without.append(error)
    if not runs:
        raise without[0]
    for reason in without:
        print(f"left out: {reason}", file=sys.stderr)
    return runs


def _refuse_equal(groups: Sequence[Sequence[RunData]]) -> None:
    """Raise ValueError if runs have the same seed and settings.

    Args:
        groups: runs by agent and seed.
    """
    equal = [[str(run.folder) for run in runs] for runs in groups if len(runs) > 1]
    if equal:
        which = "; ".join(" and ".join(folders) for folders in equal)
        out = ", ".join(folder for folders in equal for folder in folders[1:])
        raise ValueError(f"{which} have the same seed and the same settings: leave out {out}")


def draw(
    groups: Groups,
    x: str = "steps",
    means: Mapping[str, tuple[float, float, float]] | None = None,
    y: str = _RETURN,
) -> Any:
    """Draw the curves, and the interquartile means beside them; return the matplotlib figure.

    Args:
        groups: curves from `group`.
        x: label of the horizontal axis.
        means: results of `interquartile_means`.
        y: column that the curves show.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    env_ids = sorted({env_id for env_id, _ in groups})
    agents = sorted({agent for _, agent in groups})
    panels = len(env_ids) + bool(means)
    rows = math.ceil(panels / 4)
    columns = math.ceil(panels / rows)
    with figures.style() as figure_class:
        figure = figure_class(figsize=(3.3 * columns, 3.0 * rows), layout="constrained")
        axes = [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]
        lines = {}
        for (env_id, agent), curves in sorted(groups.items()):
            color = f"C{agents.index(agent) % 10}"
            lines[agent] = _draw_curves(axes[env_ids.index(env_id)], curves, color)
        for i, (axis, env_id) in enumerate(zip(axes, env_ids, strict=False)):
            axis.set(title=env_id, xlabel=x)
            if i % columns == 0:
                axis.set_ylabel("mean return, last 100 episodes" if y == _RETURN else y)
            if x == "steps":
                axis.xaxis.set_major_formatter(figures.short_numbers())
        if means:
            _draw_means(axes[-1], means, agents)
        several = any(len(curves.ret) > 1 for curves in groups.values())
        figure.legend(
            [lines[agent] for agent in agents],
            agents,
            loc="outside lower center",
            ncols=max(1, 50 * columns // (max(map(len, agents)) + 6)),  # about 50 letters per axis
            title="line: mean over seeds; band: lowest to highest seed" if several else None,
        )
    return figure


def _draw_curves(axis: Any, curves: Curves, color: str) -> Any:
    """Draw a line, with a band if there are several seeds; return the line."""
    (line,) = axis.plot(curves.x, curves.ret.mean(0), color=color)
    if len(curves.ret) > 1:
        low, high = curves.ret.min(0), curves.ret.max(0)
        axis.fill_between(curves.x, low, high, color=color, alpha=0.2, linewidth=0)
    return line


def _draw_means(
    axis: Any, means: Mapping[str, tuple[float, float, float]], agents: Sequence[str]
) -> None:
    for agent, (mean, low, high) in means.items():
        color, y = f"C{agents.index(agent) % 10}", -agents.index(agent)
        axis.plot([low, high], [y, y], color=color, linewidth=8, alpha=0.4, solid_capstyle="butt")
        axis.plot([mean], [y], "|", color=color, markersize=14, markeredgewidth=2)
    axis.set_yticks([-i for i in range(len(agents))], agents)
    axis.set(title="interquartile mean", xlabel="normalized return, 95 % interval")
    axis.set_ylim(0.6 - len(agents), 0.6)


def _curve_settings(run: RunData, x: str) -> dict[str, Any]:
    """Return the settings that tell this run's curve from the curves of other agents."""
    settings = {name: v for name, v in run.settings.items() if name not in _SAME_CURVE}
    return settings | ({"nprocs": run.starts[-1]["nprocs"]} if x == "hours" else {})


def _curve(run: RunData, x: str, y: str) -> tuple[Array, Array]:
    """Return steps or hours and a column's numbers at these points, without rows that have none."""
    if y not in run.rows[0]:
        raise ValueError(
            f"{run.folder} has no column {y!r}: choose one of {', '.join(run.rows[0])}"
        )
    ret = run.column(y)
    at = run.column("steps") if x == "steps" else run.column("seconds") / 3600
    known = np.isfinite(ret)
    if not known.any():
        nothing = "return yet: none of its episodes has ended" if y == _RETURN else f"number in {y}"
        raise ValueError(f"{run.folder} has no {nothing}")
    return at[known], ret[known]
