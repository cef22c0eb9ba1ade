"""Files of a speedup study: speedup.md, .csv, .json and .png."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rank0rl.run.timing import PHASES
from rank0rl.tools.speedup import measure
from rank0rl.tools.speedup.measure import Row

# Number of ranks -> steps per second and mean reward. From mpi_util's README: one run each of 2000
# episodes of Walker2d-v1, 20 a batch, on a machine of 6 cores and 12 threads, 2017.
PUBLISHED = {
    n: (steps_per_s, reward)
    for n, steps_per_s, reward in zip(
        range(1, 13),
        (546, 1040, 1712, 2014, 1950, 2100, 2300, 2400, 2484, 2339, 2384, 2169),
        (641, 544, 611, 1220, 1513, 860, 681, 452, 359, 367, 410, 336),
        strict=True,
    )
}


def write(out: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Write the files of a study.

    Args:
        out: folder of the study.
        rows: rows that `study` yields.
        about: facts that it yields with them.
    """
    table = [_columns(row) for row in rows]
    with (out / "speedup.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    (out / "speedup.json").write_text(json.dumps(about, indent=1, default=str) + "\n")
    (out / "speedup.md").write_text("\n".join(_markdown(rows, about)) + "\n")
    _draw(out / "speedup.png", rows, f"{about['settings']['env_id']}, {about['settings']['algo']}")


def _columns(row: Row) -> dict[str, Any]:
    names = (
        *("steps_per_s", "steps_per_s_min", "steps_per_s_max", "bare_steps_per_s", "return_mean"),
        *("memory_mb", "oversubscribed", "seconds", "slowest_s", "fastest_s"),
    )
    figures = {name: getattr(row, name) for name in names}
    phases = {f"{phase}_s": row.phases[phase] for phase in PHASES}
    every = {"nprocs": row.nprocs, **row.columns, **figures, **phases}
    return {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in every.items()}


def _markdown(rows: Sequence[Row], about: dict[str, Any]) -> Iterator[str]:
    published = _published(about["settings"])
    yield f"`{about['command']}`\n"
    yield ", ".join(f"{name} {value}" for name, value in about["machine"].items()) + "\n"
    head = (
        "ranks|steps/s (min to max)|speedup|efficiency|ceiling|expected|bare env.step|return|memory"
    )
    head += "|published 2017: steps/s|speedup" if published else ""
    yield f"| {head.replace('|', ' | ')} |"
    yield f"|{'---|' * (head.count('|') + 1)}"
    for row in rows:
        c = row.columns
        spread = f" ({row.steps_per_s_min:,.0f} to {row.steps_per_s_max:,.0f})"
        cells = [
            f"{row.nprocs}{' (more than cores)' if row.oversubscribed else ''}",
            f"{row.steps_per_s:,.0f}{spread * (row.steps_per_s_min < row.steps_per_s_max)}",
            *(f"{c[name]:.2f}" for name in ("speedup", "efficiency", "ceiling", "expected")),
            f"{row.bare_steps_per_s:,.0f}",
            f"{row.return_mean:.6g}",
            f"{row.memory_mb:,.0f} MB",
        ]
        if published:
            steps_per_s, _ = published.get(row.nprocs, (None, None))
            ratio = steps_per_s / published[1][0] if steps_per_s else None
            cells += [f"{steps_per_s:,}", f"{ratio:.2f}"] if steps_per_s else ["", ""]
        yield f"| {' | '.join(cells)} |"
    yield (
        "\nEfficiency is speedup per rank. The ceiling is the speedup that the first row's phases allow if "
        "every rank has a core to itself. Expected also accounts for processes that slow each other down "
        "here, as measured with bare env.step: as many processes that only step an environment, steps/s "
        "summed. Return is the mean of the last 100 episodes. Memory is the peak of all ranks together.\n"
    )
    yield "Milliseconds of an iteration on rank 0, and fractions of it:\n"
    phases = _phases(rows)
    yield f"| ranks | iteration | {' | '.join(phases)} | in no phase |"
    yield f"|{'---|' * (len(phases) + 3)}"
    for row in rows:
        each = [f"{1000 * row.phases[p]:.1f} ({row.fraction(p):.0%})" for p in phases]
        rest = f"{measure.unaccounted(row):.1%}"
        yield f"| {row.nprocs} | {1000 * row.seconds:.1f} | {' | '.join(each)} | {rest} |"
    yield ""
    yield from (f"- {note}" for note in about["notes"])


def _phases(rows: Sequence[Row]) -> list[str]:
    """Return the phases that took any time."""
    return [phase for phase in PHASES if any(row.phases[phase] for row in rows)]


def _draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw speedup beside the ideal and the ceilings, and the phases of an iteration; print a line without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: run pip install matplotlib", file=sys.stderr)
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    n = [row.nprocs for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(n, [x / n[0] for x in n], color="0.7", linestyle=":", label="ideal")
    for name, style in (("ceiling", "--"), ("expected", "-.")):
        left.plot(n, [row.columns[name] for row in rows], color="0.4", linestyle=style, label=name)
    first = rows[0].steps_per_s
    spread = [
        [(row.steps_per_s - row.steps_per_s_min) / first for row in rows],
        [(row.steps_per_s_max - row.steps_per_s) / first for row in rows],
    ]
    y = [row.columns["speedup"] for row in rows]
    left.errorbar(n, y, spread, color="C0", marker="o", capsize=3, label="measured")
    left.set(xlabel="ranks", ylabel="speedup", title=title, xticks=n)
    left.legend(frameon=False)
    bottom = [0.0] * len(rows)
    labels = [str(x) for x in n]
    for i, phase in enumerate(_phases(rows)):
        seconds = [row.phases[phase] for row in rows]
        right.bar(labels, seconds, bottom=bottom, color=f"C{i}", label=phase)
        bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
    right.set(xlabel="ranks", ylabel="seconds of an iteration, rank 0")
    right.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _published(settings: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Return the published table of mpi_util for runs with its batch rule; else nothing."""
    same = settings["algo"] == "klppo" and settings.get("episodes_per_batch") == 20
    return PUBLISHED if same else {}
