"""Short runs of an agent that must all have the same curve, for `python -m rank0rl check ENV --algo AGENT`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rank0rl.launch.mpiexec import find_mpiexec
from rank0rl.run.logger import read_rows

_ITERATIONS = 4
_HASHES: Mapping[str, str] = {
    "batch_sha256": "rows differ from iteration {} on: what act and process return is not the same",
    "weights_sha256": "weights differ from iteration {} on, after the same rows: update is not repeatable, "
    "or state() and load() miss something",
}


def check_agent(words: Sequence[str], folder: Path) -> dict[str, str]:
    """Train for a few iterations under conditions that must not matter.

    Args:
        words: a command line of training.
        folder: an empty folder, for the runs.

    Returns:
        Condition -> what it changes, or why the run has failed; "" if it changes nothing. If the first
        run fails, there is only that.
    """
    first = _trained(words, folder / "first")
    if first:
        return {"trained": first}
    found = {}
    conditions = {"repeated": [], "with evaluations": ["--eval-every", "1", "--eval-episodes", "2"]}
    if find_mpiexec() and importlib.util.find_spec("mpi4py"):
        conditions |= {f"on {n} ranks": ["--nprocs", str(n)] for n in (2, 3)}
    for condition, more in conditions.items():
        run = folder / condition.replace(" ", "-")
        found[condition] = _trained([*words, *more], run) or _difference(folder / "first", run)
    run = folder / "resumed"
    half = _trained(words, run, _ITERATIONS // 2) or _trained(
        ["--resume", str(run), "--trust"], run
    )
    found["stopped and resumed"] = half or _difference(folder / "first", run)
    return found


def _trained(words: Sequence[str], run: Path, iterations: int = _ITERATIONS) -> str:
    """Train in a folder; return "", or why that has failed."""
    where = [] if "--resume" in words else ["--run-dir", str(run)]
    more = ["--stop-after-iterations", str(iterations), "--drift-check-every", "1", "--quiet"]
    command = [sys.executable, "-m", "rank0rl", "train", *words, *where, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if "Error: " in line or "error: " in line]
    return (lines or done.stderr.splitlines() or [f"it ended with code {done.returncode}"])[0]


def _difference(a: Path, b: Path) -> str:
    """Return what differs first in the records of two runs; "" if nothing does."""
    rows, others = read_rows(a), read_rows(b)
    if len(rows) != len(others):
        return f"{len(others)} iterations, not {len(rows)}"
    for i, (mine, other) in enumerate(zip(rows, others, strict=True), 1):
        for column, words in _HASHES.items():
            if mine[column] != other[column]:
                return words.format(i)
    return ""
