"""Write the tables of results of README.md and docs/, and docs/learning.svg: python docs/make/results.py --write.

Studies are in benchmarks/results/v5/, a folder for each column; the curves of other libraries are in
benchmarks/results/rivals/. Without --write, print the tables.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from committed_runs import RESULTS, RIVALS, STUDIES, Run, Runs, mujoco, other_tasks
from theme import DOCS, save_plot

from rank0rl.tools import figures
from rank0rl.tools.plot import interquartile_mean, on_grid

BESIDE = ("PPO", "PPO, tuned", "TRPO", *RIVALS.values())
"""Columns of the first table."""
COMPARED = ("PPO", "PPO, tuned", "TRPO")
"""Columns that are compared with other libraries: with as many steps."""
LONGER = {"PPO, tuned, 3M steps": "3M steps", "PPO, tuned, 10M steps": "10M steps"}
"""Columns of the table of longer runs -> their titles."""
FIRST = ("Walker2d", "HalfCheetah", "Hopper", "Ant", "Swimmer")
"""Tasks of the README."""
OLDER = "38bd75f"  # has the settings of all runs that were recorded with files that were not committed yet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write the tables into their pages, and the picture"
    )
    args = parser.parse_args()
    runs, others = mujoco(), other_tasks()
    tables = {
        "first returns": first_returns(runs),
        "returns": returns(runs),
        "searches": searches(),
        "reppo": reppo(runs),
        "longer": longer(runs),
        "improvement": improvement(runs),
        "durations": durations(),
        "others": of_others(runs, others),
        "hashes": hashes(runs | others),
        "machines": machines(),
    }
    print("\n\n".join(tables.values()))
    if args.write:
        pages = (DOCS.parent / "README.md", DOCS / "results.md", DOCS / "quick-start.md")
        for page in pages:
            text = page.read_text()
            for name, table in tables.items():
                begin = f"<!-- {name}: written by docs/make/results.py -->"
                end = f" *<!-- end of {name} -->"
                text = re.sub(f"({begin}).*?({end})", rf"\1\n{table}\n\2", text, flags=re.S)
            page.write_text(text)
        draw(runs)


def first_returns(runs: Runs) -> str:
    """Return the table of the README: what `python train.py TASK` reaches, and how seed 0 ends."""
    lines = ["| task | mean return (lowest to highest seed) | SHA-256, seed 0 |", "|---|---|---|"]
    for task in FIRST:
        these = of_column(runs[task], "PPO, tuned")
        final = [run.last for run in these]
        mean, low, high = (number(value) for value in (np.mean(final), min(final), max(final)))
        lines.append(f"| {task} | {mean} ({low} to {high}) | `{these[0].sha256[:16]}` |")
    return "\n".join(lines)


def returns(runs: Runs) -> str:
    """Return the table of mean returns, with the interval of their interquartile mean."""
    columns = [name for name in shown(runs) if name in BESIDE]
    lines = [f"| task | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for task, of_task in runs.items():
        cells = [cell([run.last for run in of_task.get(name, ())]) for name in columns]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(runs: Runs) -> list[str]:
    """Return the columns that have a run."""
    there = {name for of_task in runs.values() for name in of_task}
    return [name for name in (*STUDIES.values(), *RIVALS.values()) if name in there]


def cell(final: Sequence[float]) -> str:
    """Return mean, interval of the interquartile mean, and number of seeds."""
    if not final:
        return ""
    _, low, high = interquartile_mean([np.array(final)])
    mean, low, high = (number(value) for value in (np.mean(final), low, high))
    return f"**{mean}** ({low} to {high}; {len(final)})"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def searches() -> str:
    """Return the table of the runs with which PPO's settings were chosen."""
    tried: dict[tuple[str, str, str], dict[str, float]] = {}
    with (RESULTS / "searches" / "ppo.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["task"], row["settings"], row["steps"])
            tried.setdefault(key, {})[row["seed"]] = float(row["return"])
    lines = ["| task | settings | steps | returns, by seed | mean |", "|---|---|---|---|---|"]
    for key in sorted(tried, key=itemgetter(0)):  # by task, and then in the order of the file
        (task, settings, steps), of_seed = key, tried[key]
        reached = ", ".join(f"{seed}: {number(last)}" for seed, last in of_seed.items())
        mean = number(float(np.mean([*of_seed.values()])))
        lines.append(f"| {task} | `{settings}` | {int(steps):,} | {reached} | {mean} |")
    return "\n".join(f"    {line}" for line in lines)


def reppo(runs: Runs) -> str:
    """Return the table of the best prototype of REPPO on each task, beside the best column of PPO."""
    best: dict[str, float] = {}
    with (RESULTS / "searches" / "reppo.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            best[row["task"]] = max(best.get(row["task"], -np.inf), float(row["return"]))
    lines = ["| task | REPPO | PPO |", "|---|---|---|"]
    for task, reached in sorted(best.items()):
        columns = [[run.last for run in runs[task].get(name, ())] for name in COMPARED[:2]]
        mean = max(float(np.mean(final)) for final in columns if final)
        lines.append(f"| {task} | {number(reached)} | {number(mean)} |")
    return "\n".join(lines)


def longer(runs: Runs) -> str:
    """Return the table of longer runs, with their minutes, beside what other libraries have published."""
    published: dict[str, list[str]] = {}
    with (RESULTS / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            told = (
                f"{row['library']} {number(float(row['return']))} ({float(row['steps']) / 1e6:g}M)"
            )
            published.setdefault(row["task"], []).append(told)
    titles = [title for name in LONGER.values() for title in (name, "minutes")]
    lines = [f"| task | {' | '.join(titles)} | published |", "|---" * (len(titles) + 2) + "|"]
    for task, of_task in runs.items():
        cells = []
        for name in LONGER:
            these = of_task.get(name, [])
            minutes = [run.seconds[-1] / 60 for run in these]
            cells += [
                cell([run.last for run in these]),
                f"{np.median(minutes):.1f}" if these else "",
            ]
        if any(cells):
            lines.append(f"| {task} | {' | '.join(cells)} | {', '.join(published[task])} |")
    return "\n".join(lines)


def improvement(runs: Runs) -> str:
    """Return, for each pair of a column and a rival, how probably a run of the column is better.

    Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.3.
    """
    rivals = [name for name in shown(runs) if name in RIVALS.values()]
    if not rivals:
        return "Not trained yet."
    lines = [f"| | {' | '.join(rivals)} |", "|---" * (len(rivals) + 1) + "|"]
    for column in shown(runs):
        if column in COMPARED:
            cells = [probability(runs, column, rival) for rival in rivals]
            lines.append(f"| {column} | {' | '.join(cells)} |")
    return "\n".join(lines)


def probability(runs: Runs, column: str, rival: str) -> str:
    """Return the mean over tasks of P(X > Y), its 95 % interval, and on how many tasks the mean is higher."""
    pairs = [
        tuple(np.array([run.last for run in of_column(of_task, name)]) for name in (column, rival))
        for of_task in runs.values()
        if of_column(of_task, column) and rival in of_task
    ]
    if not pairs:
        return ""
    rng = np.random.default_rng(0)
    drawn = [
        np.mean([above(rng.choice(x, len(x)), rng.choice(y, len(y))) for x, y in pairs])
        for _ in range(2000)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    better = sum(x.mean() >= y.mean() for x, y in pairs)
    mean = np.mean([above(x, y) for x, y in pairs])
    return f"{mean:.2f} ({low:.2f} to {high:.2f}); higher mean on {better} of {len(pairs)} tasks"


def of_column(of_task: dict[str, list[Run]], column: str) -> list[Run]:
    """Return the runs of a column; those with the defaults if a task has no tuned settings."""
    return of_task.get(column) or (of_task.get("PPO", []) if column == "PPO, tuned" else [])


def above(x: np.ndarray, y: np.ndarray) -> float:
    """Return the fraction of pairs in which x is greater; equal ones count half."""
    return float(np.mean((x[:, None] > y) + 0.5 * (x[:, None] == y)))


def durations() -> str:
    """Return the table of the minutes for 1M steps, from benchmarks/minutes.py."""
    rows: dict[str, list[str]] = {}
    with (RESULTS / "minutes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            median, low, high = (float(row[name]) for name in ("median", "min", "max"))
            digits = 2 if median < 10 else 1
            cell = f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
            rows.setdefault(row["title"].split(",")[0], []).append(cell)
    lines = ["| task | rank0rl, 2 ranks | stable-baselines3 | ratio |", "|---|---|---|---|"]
    lines += [f"| {task} | {' | '.join(cells)} |" for task, cells in rows.items()]
    return "\n".join(lines)


def of_others(runs: Runs, others: Runs) -> str:
    """Return the table of the other agents, numbers of steps and tasks."""
    lines = ["| task | agent | steps | mean return |", "|---|---|---|---|"]
    for task, of_task in (runs | others).items():
        for column, these in of_task.items():
            if column not in (*BESIDE, *LONGER) or task in others:
                steps = f"{these[0].steps[-1]:,.0f}"
                final = cell([run.last for run in these])
                lines.append(f"| {task} | {column.split(',')[0]} | {steps} | {final} |")
    return "\n".join(lines)


def hashes(runs: Runs) -> str:
    """Return the command of seed 0 of each row, its commit, and the hash with which it ends."""
    lines = ["| command | commit | SHA-256 of the last weights |", "|---|---|---|"]
    for of_task in runs.values():
        for name, (first, *_) in of_task.items():
            if name not in RIVALS.values():
                commit = OLDER if "--cpu avx2" in first.command else first.commit[:7]
                cells = (first.command, commit, first.sha256[:16])
                lines.append("| " + " | ".join(f"`{each}`" for each in cells) + " |")
    return "\n".join(lines)


def machines() -> str:
    """Return the table of fresh systems, from benchmarks/machines.py."""
    lines = ["| system | packages | first training | tests | versions |", "|---|---|---|---|---|"]
    with (RESULTS / "machines.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            trained = f"{clock(row['train_s'])}, `{row['weights'][:8]}`"
            ends = row["tests"].partition(" skipped")
            tested = f"{''.join(ends[:2])}, {clock(row['test_s'])}" if row["tests"] else ""
            cells = (row["system"], row["packages"], trained, tested, row["versions"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def clock(seconds: str) -> str:
    """Return 2:18 for 138 seconds."""
    return "{}:{:02}".format(*divmod(int(seconds), 60))


def draw(runs: Runs) -> None:
    """Draw the curves of all runs, and the mean of each column."""
    columns = shown(runs)
    with figures.style() as figure_class:
        figure = figure_class(figsize=(5.8, 2.0 * -(-len(runs) // 2)), layout="constrained")
        lines = {}
        for i, (task, of_task) in enumerate(runs.items()):
            axis = figure.add_subplot(-(-len(runs) // 2), 2, i + 1)
            axis.set(title=task)
            axis.xaxis.set_major_formatter(figures.short_numbers())
            for name, these in of_task.items():
                color = f"C{columns.index(name)}"
                curves = [(run.steps[run.known], run.ret[run.known]) for run in these]
                axis.plot(*thinned(curves, 9), color=color, alpha=0.3, linewidth=0.6)
                mean = on_grid(curves)
                (lines[name],) = axis.plot(mean.x[::10], mean.ret.mean(0)[::10], color=color)
        figure.legend(
            [lines[name] for name in columns],
            columns,
            loc="outside lower center",
            ncols=2,
            title="mean return of the last 100 episodes over steps; thin lines: each seed",
        )
        save_plot("learning", figure, f"Learning curves on {', '.join(runs)}")


def thinned(curves: Sequence[tuple[np.ndarray, np.ndarray]], points: int) -> list[np.ndarray]:
    """Return x and y of all curves as one line with gaps, each with so many points: a small file."""
    line = []
    for curve in curves:
        some = np.linspace(0, len(curve[0]) - 1, points).astype(int)
        line.append(np.stack([np.append(axis[some], np.nan) for axis in curve]))
    return [*np.concatenate(line, axis=1)]


if __name__ == "__main__":
    main()
