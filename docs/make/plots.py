"""Draw docs/speedup.svg, scaling.svg and same-curve.svg from benchmarks/results/: python docs/make/plots.py.

These made the runs of same_curve.csv, which has three columns of their records:

    python train.py Walker2d --config benchmarks/ppo-64x64.toml --total-steps 40960 --nprocs 1
    python train.py Walker2d --config benchmarks/ppo-64x64.toml --total-steps 40960 --nprocs 8
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from theme import DOCS, save_plot

from rank0rl.run.usage import PHASES
from rank0rl.tools import figures
from rank0rl.tools.speedup.cost_model import LARGER_BATCH, SAME, SAME_BATCH

RESULTS = DOCS.parent / "benchmarks" / "results"
SIZE = (5.8, 3.8)  # inches; with text of 9 points, a phone still shows it
LABELS = {
    SAME: "predicted, the same experiment",
    SAME_BATCH: "more envs, the same batch",
    LARGER_BATCH: "more envs, the batch grows with the ranks",
}


def main() -> None:
    speedup(RESULTS / "speedup" / "ppo")
    scaling(RESULTS / "speedup" / "ppo")
    same_curve(RESULTS / "same_curve.csv")


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: list[dict[str, str]], name: str) -> list[float]:
    """Return a column of these rows."""
    return [float(row[name]) for row in rows]


def speedup(study: Path) -> None:
    """Draw the measured speedup beside what the phases allow, and the phases of an iteration."""
    rows = table(study / "speedup.csv")
    ranks = [int(row["nprocs"]) for row in rows]
    with figures.style() as figure_class:
        figure = figure_class(figsize=SIZE, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 0.8))
        for name, line in (("ceiling", "--"), ("expected", "-.")):
            left.plot(ranks, numbers(rows, name), f"C7{line}", label=name)
        rates = [np.array(numbers(rows, f"steps_per_s{end}")) for end in ("", "_min", "_max")]
        rate, low, high = (each / rates[0][0] for each in rates)
        left.errorbar(
            ranks, rate, [rate - low, high - rate], fmt="C0o-", capsize=3, label="measured"
        )
        left.set(xlabel="ranks", ylabel="speedup", xticks=ranks)
        left.legend()
        bottom = np.zeros(len(rows))
        all_of = max(numbers(rows, "seconds"))
        shown = [each for each in PHASES if max(numbers(rows, f"{each}_s")) > 0.02 * all_of]
        for i, phase in enumerate(shown):
            took = 1000 * np.array(numbers(rows, f"{phase}_s"))
            right.bar([*map(str, ranks)], took, bottom=bottom, color=f"C{i}", label=phase)
            bottom += took
        right.set(xlabel="ranks", ylabel="ms of an iteration, rank 0")
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        alt = ", ".join(f"{x:.2f} on {n}" for n, x in zip(ranks, rate, strict=True))
        save_plot("speedup", figure, f"Speedup by number of ranks: {alt}. Phases of an iteration.")


def scaling(study: Path) -> None:
    """Draw predicted steps per second by number of ranks, and the measured ones."""
    rows = table(study / "predicted.csv")
    ranks = sorted({int(row["nprocs"]) for row in rows})
    with figures.style() as figure_class:
        figure = figure_class(figsize=SIZE, layout="constrained")
        axis = figure.add_subplot()
        joint = [row for row in rows if row["experiment"] == SAME][-1]
        for i, (name, label) in enumerate(LABELS.items()):
            these = [row for row in rows if row["experiment"] == name]
            these = these if name == SAME else [joint, *these]
            axis.plot(
                *(numbers(these, column) for column in ("nprocs", "predicted")),
                color=f"C{i}",
                linestyle=("-", "--", "-.")[i],
                label=label,
            )
        measured = [row for row in rows if row["measured"]]
        points = (numbers(measured, column) for column in ("nprocs", "measured"))
        axis.plot(*points, "C3o", markersize=5, label="measured")
        axis.set(xlabel="ranks", ylabel="steps per second", yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks[::2], [f"{n:,}" for n in ranks[::2]])
        axis.xaxis.minorticks_off()
        axis.set_ylim(0.8 * numbers(measured, "measured")[0], 3 * max(numbers(rows, "predicted")))
        figures.label_decades(axis.yaxis)
        axis.legend(loc="upper left")
        alt = f"Predicted steps per second on 1 to {ranks[-1]:,} ranks, and measured ones"
        save_plot("scaling", figure, alt)


def same_curve(path: Path) -> None:
    """Draw the curves of one training over each other, with the hashes of their weights."""
    rows = table(path)
    with figures.style() as figure_class:
        figure = figure_class(figsize=SIZE, layout="constrained")
        axis = figure.add_subplot()
        names = list(dict.fromkeys(row["run"] for row in rows))
        looks = ({"linewidth": 7, "alpha": 0.35}, {"linewidth": 3})
        for i, (name, look) in enumerate(zip(names, looks, strict=True)):
            these = [row for row in rows if row["run"] == name]
            label = f"{name}: weights {these[-1]['weights_sha256'][:8]}"
            points = (numbers(these, column) for column in ("steps", "return_mean"))
            axis.plot(*points, **{"color": f"C{i}", "label": label, **look})
        axis.set(xlabel="steps", ylabel="return")
        axis.legend(loc="upper left")
        alt = f"One learning curve, drawn twice: {', '.join(names)}. The hashes are equal."
        save_plot("same-curve", figure, alt)


if __name__ == "__main__":
    main()
