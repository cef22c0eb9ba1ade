"""python -m rank0rl plot RUN...: draw learning curves, one axis per environment, one color per agent.

Runs that differ only in their seed form one curve. Its line is their mean; its band reaches from
the lowest to the highest seed. Of several environments, the interquartile means are drawn too.
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

from rank0rl.launch import one_line, usage_error
from rank0rl.options import names
from rank0rl.run import code, files
from rank0rl.run.agents import short_name
from rank0rl.run.folder import FOREIGN, Array, NoRowsError, RunData, differing, read_run
from rank0rl.run.options import RunOptions
from rank0rl.tools import figures

_POINTS = 500  # points of a curve: more than the width of an axis in pixels
_RESAMPLES = 2000  # bootstrap samples of an interval
_RETURN = "return_mean"
_KINDS = (".png", ".svg", ".pdf")
# Runs that differ only in these settings form one curve, or are told apart by other means.
_SAME_CURVE = {
    *names(RunOptions, changes_curve=False),
    *("env_id", "algo", "seed"),
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


@np.errstate(all="ignore")  # of numbers that no run has written
def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    given = tyro.cli(Options, args=argv, prog="python -m rank0rl plot")
    try:
        if given.out.suffix not in _KINDS:
            raise ValueError(f"out must end in {' or '.join(_KINDS)}: got {given.out}")
        groups = group(given.runs, given.x, given.y)
        means = interquartile_means(groups) if given.y == _RETURN else {}
        with figures.style():
            figure = draw(groups, given.x, means, given.y)
        files.write(given.out, figures.image(figure, given.out.suffix[1:]))
    except (ValueError, OSError) as error:
        return usage_error(str(error))
    except FOREIGN as error:
        which = " or ".join(map(str, given.runs))
        return usage_error(
            one_line(f"{which} holds what no run has written, or rank0rl has a bug: {error!r}")
        )
    for (env_id, agent), curves in groups.items():
        ends = curves.ret[:, -1]
        print(
            f"{one_line(env_id)}  {one_line(agent)}: {ends.mean():.6g} (from {ends.min():.6g} to {ends.max():.6g}, seeds: "
            f"{len(ends)}) at {curves.x[-1]:,.6g} {given.x}"
        )
    for agent, (mean, low, high) in means.items():
        print(
            f"interquartile mean  {one_line(agent)}: {mean:.3f} (95 % interval {low:.3f} to {high:.3f})"
        )
    print(one_line(given.out))
    return 0


@dataclass(frozen=True)
class Curves:
    """The curves of all seeds of one agent in one environment, up to where every seed has come."""

    x: Array  # steps or hours, shape (P,)
    ret: Array  # mean returns at these points, shape (seeds, P)


Groups = Mapping[tuple[str, str], Curves]
"""Curves by environment and agent."""


def group(
    folders: Sequence[Path], x: str = "steps", y: str = _RETURN
) -> dict[tuple[str, str], Curves]:
    """Read the curves of runs, with `read_runs`, `by_agent` and `curves_of`; all may raise ValueError."""
    if x not in ("steps", "hours"):
        raise ValueError(f"x must be steps or hours: got {x!r}")
    if not folders:
        raise ValueError("name at least one run's folder, such as runs/Walker2d-v5-ppo-seed0-...")
    return curves_of(by_agent(read_runs(folders, y), x), x, y)


def curves_of(
    agents: Mapping[tuple[str, str], Sequence[RunData]],
    x: str = "steps",
    y: str = _RETURN,
    to_longest: bool = False,
) -> dict[tuple[str, str], Curves]:
    """Return the curves of the runs of each agent from `by_agent`, on a grid of `on_grid`.

    Raises:
        ValueError: if a run has no such column, or the runs of a group cover no common range.
    """
    return {
        key: on_grid([_curve(run, x, y) for run in runs], to_longest)
        for key, runs in agents.items()
    }


def on_grid(curves: Sequence[tuple[Array, Array]], to_longest: bool = False) -> Curves:
    """Interpolate curves at common points, spread evenly over the range that all curves cover.

    Args:
        curves: for each seed, steps or hours in increasing order and the returns there, shape (n,) each.
        to_longest: go on to the end of the longest curve; the others keep their last return.

    Raises:
        ValueError: if no range is covered by all curves.
    """
    ends = [x[-1] for x, _ in curves]
    low, high = max(x[0] for x, _ in curves), max(ends) if to_longest else min(ends)
    if low > high:
        raise ValueError(
            f"the seeds of one agent must overlap: one curve begins at {low:,.6g}, another ends at "
            f"{high:,.6g}; leave one out, or wait until the shorter run has come further"
        )
    x = np.linspace(low, high, _POINTS)
    return Curves(x, np.stack([np.interp(x, *curve) for curve in curves]))


def by_agent(runs: Sequence[RunData], x: str = "steps") -> dict[tuple[str, str], list[RunData]]:
    """Group runs by environment and agent, sorted; the runs of a group differ in their seeds.

    An agent is named by its algorithm and by the settings in which the runs of this algorithm in
    this environment differ. With x="hours", the number of ranks is one of these settings.

    Raises:
        ValueError: if two runs have the same seed and settings.
    """
    classes: dict[str, set[str]] = {}
    for algo in (run.settings["algo"] for run in runs):
        classes.setdefault(short_name(algo), set()).add(algo.partition(":")[2])
    named: dict[tuple[str, str], list[RunData]] = {}
    for run in runs:
        algo, of_file = short_name(run.settings["algo"]), run.settings["algo"].partition(":")[2]
        if of_file and len(classes[algo]) > 1:
            algo += f":{of_file}"
        named.setdefault((run.settings["env_id"], algo), []).append(run)
    keyed: dict[tuple[str, str, int], list[RunData]] = {}
    for (env_id, algo), these in named.items():
        settings = [
            {name: value for name, value in run.settings.items() if name not in _SAME_CURVE}
            | ({"nprocs": run.starts[-1]["nprocs"]} if x == "hours" else {})
            | code.label(run.starts)
            for run in these
        ]
        for run, own in zip(these, differing(settings), strict=True):
            agent = " ".join([algo, *(f"{name}={value}" for name, value in own.items())])
            keyed.setdefault((env_id, agent, run.settings["seed"]), []).append(run)
    equal = [[str(run.folder) for run in these] for these in keyed.values() if len(these) > 1]
    if equal:
        which = "; ".join(" and ".join(folders) for folders in equal)
        out = ", ".join(folder for folders in equal for folder in folders[1:])
        raise ValueError(f"{which} have the same seed and the same settings: leave out {out}")
    groups: dict[tuple[str, str], list[RunData]] = {}
    for (env_id, agent, _), (run,) in sorted(keyed.items()):
        groups.setdefault((env_id, agent), []).append(run)
    return groups


def read_runs(folders: Sequence[Path], y: str | None = None) -> list[RunData]:
    """Read runs, but for those without a row, or without a number in a column. They are named on stderr.

    Raises:
        ValueError: if no run is left.
    """
    runs, without = [], []
    for folder in folders:
        try:
            run = read_run(folder)
            if y in run.rows[0] and not np.isfinite(run.column(y)).any():
                nothing = f"number in {y}"
                if y == _RETURN:
                    nothing = "return yet: none of its episodes has ended"
                raise NoRowsError(f"{folder} has no {nothing}")
            runs.append(run)
        except NoRowsError as error:
            without.append(error)
    if not runs:
        raise without[0]
    for reason in without:
        print(one_line(f"left out: {reason}"), file=sys.stderr)
    return runs


def interquartile_means(groups: Groups) -> dict[str, tuple[float, float, float]]:
    """Compute each agent's interquartile mean of normalized scores, with a 95 % interval.

    The score of one seed in one environment is (final - start) / (best - start). "final" is the
    return at the end of its curve, "start" is the mean return at the beginning of all curves, and
    "best" is the highest mean of "final" over the agents. The interquartile mean is the mean of the
    middle half of all scores. Its interval comes from a bootstrap that draws seeds within each
    environment.

    An environment counts if every agent has two or more seeds there and the best agent has
    improved.

    Returns:
        Agent -> (mean, low end, high end); {} if fewer than two environments count.

    Source: Agarwal et al. 2021, arXiv:2108.13264, sections 4.1 and 4.3.
    """
    agents = sorted({agent for _, agent in groups})
    scores: dict[str, list[Array]] = {agent: [] for agent in agents}
    for env_id in sorted({env_id for env_id, _ in groups}):
        rets = {agent: groups[env_id, agent].ret for agent in agents if (env_id, agent) in groups}
        start = np.concatenate([ret[:, 0] for ret in rets.values()]).mean()
        gain = max(ret[:, -1].mean() for ret in rets.values()) - start
        if len(rets) == len(agents) and min(map(len, rets.values())) > 1 and gain > 0:
            for agent, ret in rets.items():
                scores[agent].append((ret[:, -1] - start) / gain)
    if len(scores[agents[0]]) < 2:
        return {}
    return {agent: interquartile_mean(of_agent) for agent, of_agent in scores.items()}


def interquartile_mean(scores: Sequence[Array]) -> tuple[float, float, float]:
    """Compute the interquartile mean of the scores of each environment's seeds, shape (seeds,), and its 95 % interval.

    Returns:
        (mean, low end, high end).
    """
    rng = np.random.default_rng(0)
    drawn = [s[rng.integers(len(s), size=(_RESAMPLES, len(s)))] for s in scores]
    low, high = np.percentile(_middle_mean(np.concatenate(drawn, axis=1)), [2.5, 97.5])
    return float(_middle_mean(np.concatenate(scores))), float(low), float(high)


def _middle_mean(scores: Array) -> Any:
    """Average the last axis without the lowest and the highest quarter, each rounded down."""
    cut = scores.shape[-1] // 4
    return np.sort(scores)[..., cut : scores.shape[-1] - cut].mean(-1)


def draw(
    groups: Groups,
    x: str = "steps",
    means: Mapping[str, tuple[float, float, float]] | None = None,
    y: str = _RETURN,
) -> Any:
    """Draw the curves, and the interquartile means beside them; return the matplotlib figure.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    env_ids = sorted({env_id for env_id, _ in groups})
    agents = sorted({agent for _, agent in groups})
    panels = len(env_ids) + bool(means)
    rows = math.ceil(panels / 4)
    columns = math.ceil(panels / rows)
    with figures.style() as figure_class:
        width = max(4.5, 3.3 * columns)  # the legend's title needs 4.5 inches
        figure = figure_class(figsize=(width, 3.0 * rows), layout="constrained")
        axes = [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]
        lines: dict[str, Any] = {}
        for i, (axis, env_id) in enumerate(zip(axes, env_ids, strict=False)):
            for one in series_of(groups, env_id):
                one.draw(axis)
            lines |= {str(line.get_label()): line for line in axis.lines}
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


def series_of(groups: Groups, env_id: str) -> list[figures.Series]:
    """Return what is drawn of the agents in an environment: their means, and bands from the lowest to the highest seed."""
    series = []
    agents = sorted({agent for _, agent in groups})
    for (env, agent), curves in sorted(groups.items()):
        color = agents.index(agent) % 10
        if env == env_id and len(curves.ret) > 1:
            low, high = curves.ret.min(0), curves.ret.max(0)
            series.append(figures.Series(f"{agent}, seeds", curves.x, high, color, "band", low))
        if env == env_id:
            series.append(figures.Series(agent, curves.x, curves.ret.mean(0), color))
    return series


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


def _curve(run: RunData, x: str, y: str) -> tuple[Array, Array]:
    """Return steps or hours and a column's numbers at these points, without rows that have none."""
    if y not in run.rows[0]:
        raise ValueError(
            f"{run.folder} has no column {y!r}: choose one of {', '.join(run.rows[0])}"
        )
    ret = run.column(y)
    at = run.column("steps") if x == "steps" else run.column("seconds") / 3600
    known = np.isfinite(ret)
    return at[known], ret[known]
