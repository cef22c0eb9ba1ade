"""Measure how well the cost model predicts, with environments that sleep: python benchmarks/scaling_model.py.

It takes about 20 minutes and needs only the mpi extra. It predicts from 1 rank and measures 1 to 16 ranks.

    python benchmarks/scaling_model.py --cases a b      # only these cases; the others stay as they were
    python benchmarks/scaling_model.py --markdown       # print the CSV as a table: predicted / measured

Each case is one `python -m rank0rl speedup ... --predict`: the model knows the row of 1 rank, what a step
consists of, and an exchange between ranks of this machine. Cases with several nodes then run, as root, on
namespaces of this machine (hosts.py). Their links have the rate and the delay that the model was told; the
delay is one way.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hosts
import links
from table import RESULTS, machine

from rank0rl.run.machine import available_cores

TABLE = RESULTS / "scaling_model.csv"
ENVS = 16
TCP_US = 50  # microseconds of a message to another host besides the delay, as `speedup` assumes


@dataclass(frozen=True)
class Case:
    """One experiment, and the nodes and links on which it runs."""

    sleep_ms: float
    """Milliseconds of a step."""
    steps: int
    """Steps of a batch."""
    epochs: int = 1
    overlap: bool = False
    obs: int = 2
    """Length of an observation."""
    parts: int = 1
    """Parts in which rows travel."""
    nodes: int = 1
    link_gbit: float | None = None
    delay_ms: float = 0


CASES = {
    "a": Case(5, 512),
    "b": Case(2, 1024),
    "c": Case(2, 1024, epochs=20),
    "d": Case(2, 1024, epochs=20, overlap=True),
    "e": Case(1, 2048, epochs=4),
    "f": Case(5, 1024, epochs=40, overlap=True),
    "g": Case(5, 512, nodes=2, link_gbit=1, delay_ms=1),
    "h": Case(5, 512, obs=3000, nodes=2, link_gbit=0.1),
    "i": Case(5, 512, obs=300, nodes=4, link_gbit=0.1, delay_ms=5),
    "j": Case(5, 512, obs=3000, parts=4, nodes=2, link_gbit=0.1),
}
RANKS = {1: (1, 2, 4, 8, 16), 2: (2, 4, 8), 4: (4, 8)}  # number of nodes -> numbers of ranks
COLUMNS = ["case", "nprocs", *Case.__dataclass_fields__]
COLUMNS += ["measured", "predicted", "error", "bound", "machine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument(
        "--markdown", action="store_true", help="print the table without running anything"
    )
    args = parser.parse_args()
    if args.markdown:
        markdown(kept([]))
        return
    absent = hosts.missing(limited=True)
    if absent and any(CASES[name].nodes > 1 for name in args.cases):
        parser.error(f"{absent}: name --cases of one node")
    if not absent:
        os.nice(-15)  # other programs of this machine would not run on these hosts
    rows = kept(args.cases)
    for name in args.cases:
        rows += case(name, args)
        rows.sort(key=lambda row: (row["case"], int(row["nprocs"])))
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    report(rows)


def markdown(rows: list[dict[str, Any]]) -> None:
    """Print a line for each case: predicted / measured steps per second."""
    columns = ["case", *Case.__dataclass_fields__]
    counts = sorted({int(row["nprocs"]) for row in rows} - {1})
    print(f"| {' | '.join(columns)} | {' | '.join(f'{n} ranks' for n in counts)} |")
    print(f"|{'---|' * (len(columns) + len(counts))}")
    for name in dict.fromkeys(row["case"] for row in rows):
        found = {int(row["nprocs"]): row for row in rows if row["case"] == name}
        cells = [
            f"{float(found[n]['predicted']):,.0f} / {float(found[n]['measured']):,.0f}"
            if n in found
            else ""
            for n in counts
        ]
        what = found[max(found)]
        print(f"| {' | '.join([*(what[column] for column in columns), *cells])} |")
    report(rows)


def kept(cases: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the table that are not measured again."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["case"] not in cases]


def case(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict and measure one case; return its rows."""
    what = CASES[name]
    options = ["benchmarks.sleeps:Sleeps-v0", "--num-envs", str(ENVS)]
    options += ["--env-kwargs", f"step_s={what.sleep_ms / 1000}", f"size={what.obs}"]
    options += ["--steps-per-batch", str(what.steps), "--epochs", str(what.epochs)]
    options += ["--gather-parts", str(what.parts)]
    options += ["--overlap"] if what.overlap else []
    rows = []
    for found in predicted(what, options, args):
        n, nodes = int(found["nprocs"]), int(found["nodes"])
        if n > 1 and n not in RANKS[what.nodes]:
            continue
        if nodes > 1:
            rates = [measured(what, n, options, args) for _ in range(args.repeats)]
            found["measured"] = f"{statistics.median(rates):.6g}"
        row = {
            "case": name,
            "nprocs": n,
            **asdict(what),
            "overlap": int(what.overlap),
            "nodes": nodes,  # one for the row of one rank
            "measured": found["measured"],
            "predicted": found["predicted"],
            "error": f"{float(found['predicted']) / float(found['measured']) - 1:.3f}",
            "bound": found["bound"],
            "machine": machine(),
        }
        keys = ("case", "nprocs", "measured", "predicted", "error")
        print(*(f"{row[key]:>9}" for key in keys), flush=True)
        rows.append(row)
    return rows


def predicted(what: Case, options: list[str], args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the rows of the model. On one node, they have the measured figures too."""
    counts = [str(n) for n in RANKS[what.nodes]]
    of_node = max(1, len(available_cores()) // what.nodes)  # all nodes are this one
    command = [sys.executable, "-m", "rank0rl", "speedup", *options, "--predict", *counts]
    command += ["--nprocs", *(counts if what.nodes == 1 else ["1"]), "--nodes", str(what.nodes)]
    command += ["--node-cores", str(of_node), "--latency-us", str(TCP_US + 1000 * what.delay_ms)]
    command += ["--link-gbit", str(what.link_gbit)] if what.link_gbit else []
    command += ["--repeats", str(args.repeats), "--iterations", str(args.iterations)]
    paths = [str(links.ROOT), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, "--out", folder],
            check=True,
            cwd=links.ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
        )
        with (Path(folder) / "predicted.csv").open(newline="") as file:
            return list(csv.DictReader(file))


def measured(what: Case, n: int, options: list[str], args: argparse.Namespace) -> float:
    """Return the steps per second of so many ranks on hosts. The first iteration is not timed."""
    ranks = [n // what.nodes] * what.nodes
    assert what.link_gbit
    there = argparse.Namespace(hosts=ranks, rate=1000 * what.link_gbit, slow_start=False)
    stop = ["--stop-after-iterations", str(args.iterations + 1), "--keep-checkpoints", "1"]
    rows = links.on_hosts(
        there,
        what.delay_ms,
        lambda host, folder: links.progress(there, [*options, *stop], host, folder),
    )
    steps, seconds = (float(rows[-1][x]) - float(rows[0][x]) for x in ("steps", "seconds"))
    return steps / seconds


def report(rows: list[dict[str, Any]]) -> None:
    """Print the errors of the model, without the rows of 1 rank, which it was made from."""
    errors = [abs(float(row["error"])) for row in rows if int(row["nprocs"]) > 1]
    print(
        f"{len(errors)} configurations: median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}"
    )


if __name__ == "__main__":
    main()
