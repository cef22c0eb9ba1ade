"""Measure gather and broadcast between ranks on several hosts, for python benchmarks/links.py move.

It prints figures as JSON. All hosts must share one clock: they are namespaces of one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank0rl

OBS, ACT = 348, 17  # of Humanoid-v5
IDLE_S = 2.0  # seconds before each call: longer than TCP remembers what links carry
WARM = 2  # calls that are not timed, in which TCP finds out what the links carry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--rate", type=float, required=True, help="Mbit/s")
    parser.add_argument(
        "--burst", type=int, required=True, help="bytes that an idle link passes at once"
    )
    parser.add_argument("--rows", type=int, required=True, help="rows of all ranks")
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    if rank0rl.mpi_fork(hosts=args.hosts) == "parent":
        return
    sys.path.insert(0, str(Path(__file__).parent.parent))
    figures: dict[str, list[float]] = {}
    for name, what, size in calls(args):
        measure(name, what, size, args, figures)
    rank0rl.print0(json.dumps(figures))


def calls(args: argparse.Namespace) -> list[tuple[str, Callable[[], Any], int]]:
    """Return names, calls, and the bytes that have to cross the first host's link."""
    import numpy as np

    from rank0rl.agent import Space, Spaces
    from rank0rl.algos.ppo import PPO, PPOOptions
    from rank0rl.mpi import comm
    from rank0rl.mpi.weights import named_tensors

    n = args.rows // comm.get_nworkers()
    rows = {name: np.ones(n, np.float32) for name in ("logp", "adv", "val", "ret")}
    rows["obs"], rows["act"] = np.ones((n, OBS), np.float32), np.ones((n, ACT), np.float32)
    rows["fragment_id"] = np.zeros(n, np.int64)
    near = comm.hosts().count(comm.hosts()[0])
    size = sum(x.nbytes for x in rows.values()) * (comm.get_nworkers() - near)
    found = [("gather", lambda: rank0rl.rank0_accum_batches(rows), size)]
    spaces = Spaces(Space("box", (OBS,), "float32"), Space("box", (ACT,), "float32"))
    for width in (64, 256):
        options = PPOOptions(hidden=(width, width))
        modules = PPO(spaces, options, np.random.default_rng(0)).modules()
        size = sum(t.nbytes for t in named_tensors(modules).values())
        call = lambda modules=modules: rank0rl.rank0_bcast_wts(modules)  # noqa: E731
        found.append((f"broadcast, {width} units", call, size))
    return found


def measure(
    name: str,
    what: Callable[[], Any],
    size: int,
    args: argparse.Namespace,
    figures: dict[str, list[float]],
) -> None:
    """Time a call from when all ranks begin it until the last one has ended it; add to the figures.

    Bytes that an idle link lets through at once count as if they had needed their time.
    """
    from rank0rl.mpi import comm

    least_s, burst_s = (n * 8e-6 / args.rate for n in (size, args.burst))
    for repeat in range(WARM + args.repeats):
        begin = comm.bcast_obj(time.monotonic() + IDLE_S)
        time.sleep(begin - time.monotonic())
        before = wire()
        what()
        end = max(comm.allgather_obj(time.monotonic(), "ends"))
        if repeat >= WARM:
            seconds = end - begin + burst_s
            found = {
                "ms": 1000 * seconds,
                "bytes / rate / seconds": least_s / seconds,
                "bytes on the link / bytes": (wire() - before) / size,
            }
            for quantity, figure in found.items():
                figures.setdefault(f"{name}, {quantity}", []).append(figure)


def wire() -> int:
    """Return the bytes that this host has received and sent. A frame of many segments counts one header."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in x)
    words = line.split()
    return int(words[1]) + int(words[9])


if __name__ == "__main__":
    main()
