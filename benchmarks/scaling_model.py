"""The scaling model against runs: predicted from 1 rank, measured on 1 to 16, with environments that sleep.

    python benchmarks/scaling_model.py                  # about 10 minutes; needs the mpi extra only
    python benchmarks/scaling_model.py --cases a b      # some of them, the others as they were
    python benchmarks/scaling_model.py --markdown       # the table of docs/scaling.md, from the CSV

Each case is one `python -m rank0rl speedup ... --predict`: the model knows its row of 1 rank, what a
step is made of, and an exchange between ranks of this machine. Rows of more nodes in the table are kept.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from table import RESULTS, machine

from rank0rl import provenance

ROOT = Path(__file__).parent.parent
TABLE = RESULTS / "scaling_model.csv"
RANKS = ["1", "2", "4", "8", "16"]
LANES = 16
# name -> milliseconds that a step sleeps, steps a batch, epochs, overlap
CASES: dict[str, tuple[float, int, int, bool]] = {
    "a": (5, 512, 1, False),
    "b": (2, 1024, 1, False),
    "c": (2, 1024, 20, False),
    "d": (2, 1024, 20, True),
    "e": (1, 2048, 4, False),
    "f": (5, 1024, 40, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--markdown", action="store_true", help="print the table, and run nothing")
    args = parser.parse_args()
    if args.markdown:
        markdown(kept([]))
        return
    rows = kept(args.cases)
    for name in args.cases:
        rows += case(name, args)
        rows.sort(key=lambda row: (int(row["nodes"]), row["case"], int(row["nprocs"])))
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    report(rows)


def markdown(rows: list[dict[str, Any]]) -> None:
    """A line for each case, with what was predicted over what was measured."""
    columns = ["case", "sleep_ms", "steps", "epochs", "overlap", "nodes", "link_gbit"]
    counts = sorted({int(row["nprocs"]) for row in rows} - {1})
    print(f"| {' | '.join(columns)} | {' | '.join(f'{n} ranks' for n in counts)} |")
    print(f"|{'---|' * (len(columns) + len(counts))}")
    cases = dict.fromkeys(tuple(row[name] for name in columns) for row in rows)
    for what in cases:
        these = [row for row in rows if tuple(row[name] for name in columns) == what]
        found = {int(row["nprocs"]): row for row in these}
        cells = [
            f"{float(found[n]['predicted']):,.0f} / {float(found[n]['measured']):,.0f}"
            if n in found
            else ""
            for n in counts
        ]
        print(f"| {' | '.join([*map(str, what), *cells])} |")
    report(rows)


def kept(cases: list[str]) -> list[dict[str, Any]]:
    """Rows of the table that are not measured again."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["case"] not in cases]


def case(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    sleep_ms, steps, epochs, overlap = CASES[name]
    command = [sys.executable, "-m", "rank0rl", "speedup", "toy_envs:Sleeps-v0"]
    command += ["--env-kwargs", f"step_s={sleep_ms / 1000}", "--num-envs", str(LANES)]
    command += ["--steps-per-batch", str(steps), "--epochs", str(epochs)]
    command += ["--overlap"] * overlap
    command += ["--nprocs", *RANKS, "--predict", *RANKS, "--node-cores", str(provenance.cores())]
    command += ["--repeats", str(args.repeats), "--iterations", str(args.iterations)]
    tests = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, "--out", folder],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": tests},
            stdout=subprocess.DEVNULL,
        )
        with (Path(folder) / "predicted.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
    what = {"lanes": LANES, "sleep_ms": sleep_ms, "steps": steps, "epochs": epochs}
    rows = [
        {
            "case": name,
            "nprocs": row["nprocs"],
            "nodes": 1,
            "link_gbit": "",
            **what,
            "overlap": int(overlap),
            "measured": row["measured"],
            "predicted": row["predicted"],
            "error": f"{float(row['predicted']) / float(row['measured']) - 1:.3f}",
            "bound": row["bound"],
            "machine": machine(),
        }
        for row in found
        if row["measured"]
    ]
    for row in rows:
        print(*(f"{row[key]:>9}" for key in ("case", "nprocs", "measured", "predicted", "error")))
    sys.stdout.flush()
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """What the model misses; its rows of 1 rank are what it was made from."""
    errors = [abs(float(row["error"])) for row in rows if int(row["nprocs"]) > 1]
    print(
        f"{len(errors)} configurations: median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}"
    )


if __name__ == "__main__":
    main()
