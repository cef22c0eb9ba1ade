"""Record what two ranks do, without and with --overlap, and draw it: python docs/make/timeline.py.

It writes benchmarks/results/timeline.csv and docs/timeline.svg. With --draw it only draws the CSV again.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from theme import WIDTH, box, save_diagram, write

from rank0rl import cli
from rank0rl.launch import job
from rank0rl.run.usage import Phases

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "timeline.csv"
FOLDER = "TIMELINE_FOLDER"  # environment variable: where the ranks of a run write their phases
TRAIN = "Walker2d --config benchmarks/ppo-64x64.toml --nprocs 2 --num-envs 16 --epochs 40 --stop-after-iterations 16"
RUNS = ("", "--overlap --rank0-envs 5")  # options besides
WARM, SHOWN = 4, 3  # iterations of a run before the first that may be drawn, and iterations drawn
WORK = {"collect": "c0", "process": "c0", "update": "c1"}
OF_RANK0 = dict.fromkeys(("gather", "hash", "broadcast", "record"), "c2")  # others wait in them
KEY = ((14, "c0", "collect, process"), (168, "c1", "update"), (266, "c2", "exchange, record"))
LEFT, RIGHT = 70, WIDTH - 14

Row = tuple[str, str, float, float]  # rank, phase, start and end in seconds


def main() -> None:
    if FOLDER in os.environ:
        record()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="Draw the CSV again.")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not args.draw:
        taken = [(options, measure(options)) for _ in range(args.repeats) for options in RUNS]
        with RESULTS.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["options", "seconds", "rank", "phase", "start_s", "end_s"])
            for options in RUNS:
                writer.writerows(median([rows for name, rows in taken if name == options], options))
    with RESULTS.open(newline="") as file:
        draw(list(csv.DictReader(file)))


def record() -> None:
    """Train as the command line says; every rank writes the times of its phases to a file."""
    plain = Phases.__call__

    @contextmanager
    def recorded(self: Phases, name: str) -> Iterator[None]:
        start = time.monotonic()  # one clock for all processes of a host
        with plain(self, name):
            yield
        with Path(os.environ[FOLDER], f"{job.world_rank()}.csv").open("a", newline="") as file:
            csv.writer(file).writerow([name, start, time.monotonic()])

    Phases.__call__ = recorded  # type: ignore[method-assign]
    cli.main()


def measure(options: str) -> list[Row]:
    """Train with these options besides; return the phases of both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *shlex.split(f"{TRAIN} {options}")]
        command += ["--run-dir", str(Path(folder, "run"))]
        subprocess.run(command, check=True, env={**os.environ, FOLDER: folder})
        rows = []
        for path in sorted(Path(folder).glob("*.csv")):
            with path.open(newline="") as file:
                read = csv.reader(file)
                rows += [(path.stem, name, float(start), float(end)) for name, start, end in read]
    return rows


def median(runs: list[list[Row]], options: str) -> Iterator[list[object]]:
    """Yield the rows from that place on, of all runs, where some iterations take their median time."""
    places = []
    for rows in runs:
        begins = [start for rank, name, start, _ in rows if (rank, name) == ("0", "collect")]
        pairs = zip(begins[WARM:], begins[WARM + SHOWN :], strict=False)
        places += [(end - start, start, rows) for start, end in pairs]
    seconds, begin, rows = sorted(places, key=lambda place: place[0])[len(places) // 2]
    for rank, name, start, end in rows:
        if end > begin and start < begin + 3 * seconds:
            times = (f"{each - begin:.6f}" for each in (start, end))
            yield [options, f"{seconds:.6f}", rank, name, *times]


def draw(rows: list[dict[str, str]]) -> None:
    """Draw the runs at one scale, as long as the first one takes for its iterations."""
    made, y = [], 0
    seconds = float(rows[0]["seconds"])
    for options in RUNS:
        run = [row for row in rows if row["options"] == options]
        each = f"{1000 * float(run[0]['seconds']) / SHOWN:.0f} ms an iteration"
        made.append(
            write(14, y + 28, f"with {options}" if options else "without --overlap", "bold")
        )
        made.append(write(RIGHT, y + 28, each, "end"))
        for rank in ("0", "1"):
            top = y + 42 + 40 * int(rank)
            made.append(write(14, top + 21, f"rank {rank}"))
            made.append(box(LEFT, top, RIGHT - LEFT, 30, "", "idle"))
            made += bars([row for row in run if row["rank"] == rank], seconds, top)
        y += 132
    for x, kind, name in KEY:
        made.append(box(x, y + 4, 16, 16, "", f"{kind} flat"))
        made.append(write(x + 22, y + 17, name))
    made.append(box(434, y + 4, 16, 16, "", "idle"))
    made.append(write(456, y + 17, "wait, asleep"))
    alt = (
        "What two ranks do over time. Without overlap, rank 1 waits while rank 0 updates. With overlap, "
        "rank 1 collects meanwhile, and rank 0 has fewer envs."
    )
    save_diagram("timeline", y + 34, alt, *made)


def bars(rows: list[dict[str, str]], seconds: float, y: float) -> Iterator[str]:
    """Yield the phases in which a rank works, as boxes."""
    for row in rows:
        kind = (WORK | OF_RANK0 if row["rank"] == "0" else WORK).get(row["phase"])
        ends = [min(max(float(row[name]) / seconds, 0), 1) for name in ("start_s", "end_s")]
        low, high = (LEFT + end * (RIGHT - LEFT) for end in ends)
        if kind and high > low:
            yield box(low, y, high - low, 30, "", f"{kind} flat")


if __name__ == "__main__":
    main()
