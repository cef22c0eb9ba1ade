"""Hashes of short runs with and without --cpu avx2, to compare types of CPU: python benchmarks/cpu_types.py.

Each run adds a line to benchmarks/results/cpu_types.csv. A hash that another CPU has too shows that the two
compute the same bits.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from table import RESULTS, machine

ROOT = Path(__file__).parent.parent
RUNS = (("CartPole", "ppo"), ("Walker2d", "ppo"), ("Hopper", "trpo"), ("Pendulum", "klppo"))
NAMES = ("env", "algo", "cpu", "weights_sha256", "machine", "numpy", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    path = RESULTS / "cpu_types.csv"
    rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    for env, algo in RUNS:
        for cpu in ("", "avx2"):
            row = dict(
                zip(NAMES, (env, algo, cpu, sha256(env, algo, cpu), machine()), strict=False)
            )
            row |= {"numpy": np.__version__, "torch": torch.__version__}
            same = {
                r["machine"] for r in rows if (r["env"], r["algo"], r["cpu"]) == (env, algo, cpu)
            }
            equal = {r["machine"] for r in rows if r["weights_sha256"] == row["weights_sha256"]}
            print(
                f"{env} {algo} {cpu or 'as it is'}: equal on {len(equal)} of {len(same)} machines before"
            )
            rows.append(row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def sha256(env: str, algo: str, cpu: str) -> str:
    """Return the hash of the weights after a short run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", env, "--algo", algo, "--total-steps", "20000"]
        command += ["--cpu", cpu] if cpu else []
        command += ["--run-dir", folder, "--quiet"]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(Path(folder, "summary.json").read_text())["weights_sha256"]


if __name__ == "__main__":
    main()
