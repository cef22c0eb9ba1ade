"""Print the figures that benchmarks recorded as tables: python benchmarks/table.py performance.csv.

docs/performance.md shows some of them. The functions here are shared by all benchmarks: they let ways
take turns, and print and record medians.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def alternate(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all ways in turn, so that a machine whose speed drifts favours none; return name -> figures.

    Each way runs once more before, to warm up. There is one figure per repeat.
    """
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            figure = way()
            if repeat:
                figures[name].append(figure)
    return figures


def ratio(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def show(title: str, figures: Mapping[str, list[float]], out: str | None = None) -> None:
    """Print median, minimum and maximum of each figure; add them to a CSV in benchmarks/results."""
    print(title)
    rows = [(name, statistics.median(x), min(x), max(x), len(x)) for name, x in figures.items()]
    for name, median, low, high, _ in rows:
        digits = 0 if median >= 1000 else 1 if median >= 10 else 3
        text = f"{median:12,.{digits}f}   ({low:,.{digits}f} to {high:,.{digits}f})"
        print(f"  {name:44} {text}", flush=True)
    if out:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / out
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(
                    ["title", "what", "median", "min", "max", "repeats", "machine", "command"]
                )
            command = shlex.join(["python", *sys.argv])
            writer.writerows([(title, *row, machine(), command) for row in rows])


def markdown(out: str) -> None:
    """Print a CSV in benchmarks/results as tables."""
    titles: dict[tuple[str, str], list[dict[str, str]]] = {}
    with (RESULTS / out).open(newline="") as file:
        for row in csv.DictReader(file):
            titles.setdefault((row["title"], row["command"]), []).append(row)
    for (title, command), rows in titles.items():
        shown = command.replace(f" --out {out}", "")
        print(f"\n**{title}** (`{shown}`, {rows[0]['repeats']} runs)\n")
        print("| | median | min | max |\n|---|---|---|---|")
        for row in rows:
            numbers = [float(row[name]) for name in ("median", "min", "max")]
            digits = 0 if numbers[0] >= 1000 else 1 if numbers[0] >= 10 else 3
            print(f"| {row['what']} | {' | '.join(f'{x:,.{digits}f}' for x in numbers)} |")


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []:
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return f"{cpu}, {os.cpu_count()} cores"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", help="file in benchmarks/results")
    markdown(parser.parse_args().csv)
