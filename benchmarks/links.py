"""Measure gather, broadcast and iterations between hosts with limited links: python benchmarks/links.py move --rate 1000.

It needs root and the mujoco extra. Other measurements:

    python benchmarks/links.py move --rate 100 --hosts 1 4            # 1 rank on the first, 4 on the other
    python benchmarks/links.py iteration --rate 1000 --delay 10 --env UCX_RNDV_THRESH=inf
    python benchmarks/links.py parts --rate 100 --rows 8192           # rows that travel while others are collected

The hosts are namespaces of this machine (hosts.py). The delay is one way, in milliseconds: a round trip takes
twice as long. Links are idle before each call, as while rank 0 updates. Headers take 4.4 % of what a link
carries. Bytes on the link are those of the first host's interface, nearly without headers.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import BURST, Host, hosts
from table import show

ROOT = Path(__file__).parent.parent
NAMES = ("one", "two", "three", "four")
COPIES = 1000  # rows that an agent makes of each step, see large.py
EXCHANGES = ("broadcast", "wait", "gather")  # phases of an iteration in which ranks meet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["move", "iteration", "parts"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 1], help="ranks of each host")
    parser.add_argument(
        "--rate", type=float, default=1000, help="rate of each link, each way, Mbit/s"
    )
    parser.add_argument("--delay", type=float, default=0, help="delay one way, ms")
    parser.add_argument(
        "--slow-start", action="store_true", help="let TCP start slowly after idle time"
    )
    parser.add_argument(
        "--env", nargs="*", default=[], help="environment variables for MPI, NAME=VALUE"
    )
    parser.add_argument("--rows", type=int, default=20_000, help="rows of all ranks")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    os.nice(-15)  # other programs of this machine would not run on these hosts
    os.environ.update(setting.split("=", 1) for setting in args.env)
    idle = f", slow start after idle {'on' if args.slow_start else 'off'}" if args.delay else ""
    where = f"ranks: {args.hosts}, {args.rate:g} Mbit/s, {args.delay:g} ms one way{idle}"
    figures = {"move": move, "iteration": iteration, "parts": parts}[args.what](args)
    show(", ".join([args.what, where, *args.env]), figures, args.out)


def move(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure a gather of a batch, and broadcasts of weights, beside bytes / rate."""
    command = ["benchmarks/moves.py", "--hosts", listed(args), "--rate", str(args.rate)]
    command += ["--burst", str(BURST), "--rows", str(args.rows), "--repeats", str(args.repeats)]
    return json.loads(on_hosts(args, args.delay, lambda host, _: started(host, *command)))


def iteration(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the milliseconds of an iteration with the delay and without, in turns, and what the delay adds."""
    n = sum(args.hosts)
    large = ["--algo", "benchmarks/large.py:Large", "--copies", str(COPIES), "--num-envs", str(n)]
    large += ["--steps-per-batch", str(args.rows // COPIES // n * n)]
    figures: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        slow, fast = (
            on_hosts(args, ms, lambda *where: train(args, large, *where)) for ms in (args.delay, 0)
        )
        found = {f"{name}, ms": figure for name, figure in slow.items()}
        found |= {f"{name} without delay, ms": figure for name, figure in fast.items()}
        if args.delay:
            added = {name: (slow[name] - fast[name]) / (2 * args.delay) for name in slow}
            found |= {f"{name}, round trips": figure for name, figure in added.items()}
        for name, figure in found.items():
            figures.setdefault(name, []).append(figure)
    return figures


def parts(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the milliseconds of an iteration of PPO whose rows travel at once and in parts, in turns."""
    envs = ["--num-envs", str(8 * sum(args.hosts)), "--steps-per-batch", str(args.rows)]
    update = ["--epochs", "1", "--minibatch-size", str(args.rows // 8)]
    figures: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for n in (1, 4):
            ppo = [*envs, *update, "--gather-parts", str(n)]
            found = on_hosts(args, args.delay, lambda *where, ppo=ppo: train(args, ppo, *where))
            for name, figure in found.items():
                figures.setdefault(f"{name}, {n} part{'s' * (n > 1)}, ms", []).append(figure)
    return figures


def train(
    args: argparse.Namespace, options: list[str], host: Host, folder: Path
) -> dict[str, float]:
    """Return the milliseconds of an iteration of train.py, and of its phases in which ranks meet.

    Each is the median of many iterations.
    """
    options = ["Humanoid", *options, "--stop-after-iterations", "12"]
    rows = progress(args, options, host, folder)[2:]
    took = {"iteration": [float(b["seconds"]) - float(a["seconds"]) for a, b in pairwise(rows)]}
    took |= {name: [float(row[f"{name}_s"]) for row in rows] for name in ("collect", *EXCHANGES)}
    took["all exchanges"] = [sum(each) for each in zip(*map(took.get, EXCHANGES), strict=True)]
    return {name: 1000 * statistics.median(x) for name, x in took.items()}


def progress(
    args: argparse.Namespace, options: list[str], host: Host, folder: Path
) -> list[dict[str, str]]:
    """Run train.py on all hosts, started on the first one; return the rows of its progress.csv."""
    command = ["train.py", *options, "--quiet", "--hosts", listed(args)]
    started(host, *command, "--run-dir", str(folder / "local" / "run"))
    with (host.path(folder / "local") / "run" / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def on_hosts(args: argparse.Namespace, delay_ms: float, what: Callable[[Host, Path], Any]) -> Any:
    """Make the hosts; return the result of a function of the first host and of a folder of its own."""
    names = NAMES[: len(args.hosts)]
    limits = {"rate_mbit": args.rate, "slow_start": args.slow_start, "delay_s": delay_ms / 1000}
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder), *names, **limits) as made:
        return what(made[0], Path(folder))


def started(host: Host, *command: str) -> str:
    """Run a command on a host; return what it prints."""
    done = subprocess.run(
        host.on([sys.executable, *command]),
        check=True,
        cwd=ROOT,
        env={**os.environ, **host.env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def listed(args: argparse.Namespace) -> str:
    return ",".join(f"{name}:{n}" for name, n in zip(NAMES, args.hosts, strict=False))


if __name__ == "__main__":
    main()
