"""Prove that two checkouts of this project make the same training curves, bit for bit.

    python benchmarks/same_curve.py OLD NEW                  # the whole table: an hour on two cores
    python benchmarks/same_curve.py OLD NEW --quick          # every agent, environment and variant once
    python benchmarks/same_curve.py OLD NEW --cache old.json # keeps the hashes of OLD for next time
    python benchmarks/same_curve.py OLD --cache old.json     # OLD alone: is it the same on all ranks?

Every run is `train.py` of one checkout, for three iterations. Its agent is the reference agent with
one addition: it writes SHA-256 hashes of each batch before the update and of the weights after it.
The hashes cover dtypes, shapes and contents, but no names: a renamed batch key changes nothing.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import same_curve_envs as worlds
from same_curve_rows import CLASSES, ITERATIONS, VARIANTS, WORDS, Case, cases, covering

AGENT = '''
"""The reference agent, which writes hashes of its batches and weights beside this file."""
import hashlib
from pathlib import Path

import numpy as np
from torch import nn

import rank0rl
from rank0rl.algos.{module} import {agent}


def arrays(thing):
    if isinstance(thing, nn.Module):
        thing = [*thing.parameters(), *thing.buffers()]
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        return [array for item in thing for array in arrays(item)]
    return [thing if isinstance(thing, np.ndarray) else thing.detach().cpu().numpy()]


def sha256(thing):
    parts = [
        hashlib.sha256(f"{{a.dtype.str}} {{a.shape}}".encode() + a.tobytes()).hexdigest()
        for a in arrays(thing)
    ]
    return hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()


class Hashed({agent}):
    def update(self, batch, rng, progress):
        seen = sha256(batch)
        metrics = super().update(batch, rng, progress)
        told = sha256([np.array([float(number) for number in sorted(metrics.values())])])
        hashes = seen, sha256(self.modules()), told
        with Path(__file__).with_name("hashes.txt").open("a") as file:
            print(*hashes, Path(rank0rl.__file__).parents[1], file=file)
        return metrics
'''


class Hashes(NamedTuple):
    """Hashes of one run."""

    curve: str
    """Hash of all batches, of weights and metrics after each update and of the episodes' returns."""
    record: str
    """Hash of progress.csv without times, hashes and names."""
    weights: str
    """`weights_sha256` of summary.json: the last weights, with their names."""


FAILED = Hashes("failed", "failed", "failed")


def main() -> None:
    """Run both checkouts, print the table, and exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="Checkout to compare with.")
    parser.add_argument("new", type=Path, nargs="?", help="Checkout to compare. Default: none.")
    parser.add_argument("--quick", action="store_true", help="A few rows, on 2 ranks.")
    parser.add_argument("--only", default="", help="Rows that begin so: ppo/Hopper/fixed.")
    parser.add_argument(
        "--nprocs", type=int, nargs="+", help="Numbers of ranks. Default: the row's."
    )
    parser.add_argument("--cache", type=Path, help="JSON file that keeps the hashes of OLD.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Runs at a time.")
    args = parser.parse_args()
    checkouts = [path.resolve() for path in (args.old, args.new) if path]
    rows = [case for case in cases() if str(case).startswith(args.only)]
    if args.quick:
        rows = covering(rows)
    asked = args.nprocs or ([2] if args.quick else None)
    rows = [replace(case, nprocs=tuple(asked or case.nprocs)) for case in rows]
    results = collect(rows, checkouts, args.cache, args.jobs)
    different = table(rows, results, len(checkouts))
    print(f"\n{len(rows)} rows, {different} of them with a difference")
    sys.exit(different > 0)


def collect(
    rows: Sequence[Case], checkouts: Sequence[Path], cache: Path | None, jobs: int
) -> dict[tuple[Case, int, int], Hashes]:
    """Return the hashes of each row, number of ranks and checkout. Several runs are made at a time."""
    kept = json.loads(cache.read_text()) if cache and cache.exists() else {}
    results, runs = {}, {}
    with ThreadPoolExecutor(jobs) as pool:
        for case in rows:
            for nprocs, (side, root) in itertools.product(case.nprocs, enumerate(checkouts)):
                key = cache_key(case, nprocs, root) if cache and side == 0 else None
                if key in kept:
                    results[case, nprocs, side] = Hashes(*kept[key])
                else:
                    future = pool.submit(run, case, nprocs, root)
                    runs[future] = (case, nprocs, side), key
        for i, future in enumerate(as_completed(runs), 1):
            (case, nprocs, side), key = runs[future]
            about = f"{checkouts[side].name}: {case} on {nprocs} ranks"
            try:
                found = future.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found, about = FAILED, f"{about}: {error}"
            results[case, nprocs, side] = found
            print(f"{i}/{len(runs)} {found.curve[:8]}  {about}", file=sys.stderr)
            if cache and key and found != FAILED:
                kept[key] = found
                part = cache.with_suffix(".part")
                part.write_text(json.dumps(kept, indent=1))
                part.replace(cache)
    return results


def cache_key(case: Case, nprocs: int, root: Path) -> str:
    """Return a text that names all that the hashes of a run depend on."""
    words = " then ".join(" ".join(words_of(root, *start)) for start in case.commands)
    used = Path(worlds.__file__).read_text() if "WORLDS" in words or ".npz" in words else ""
    digest = hashlib.sha256("".join([AGENT, used, sources(root), setting()]).encode()).hexdigest()
    return f"{case} on {nprocs} ranks: {words} [{digest[:16]}]"


@functools.cache
def sources(root: Path) -> str:
    """Return a hash of what a checkout trains with."""
    files = [path for name in ("rank0rl", "algos", "configs") for path in (root / name).rglob("*")]
    digest = hashlib.sha256((root / "train.py").read_bytes())
    for path in sorted(files):
        if path.suffix in (".py", ".toml"):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def setting() -> str:
    """Return what else may change bits: the CPU and the versions of libraries."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    cpu = next((line for line in lines if line.startswith("model name")), lines[0])
    names = ("numpy", "scipy", "numba", "torch", "gymnasium", "mujoco", "cma")
    versions = [metadata.version(name) for name in names]
    return " ".join([cpu, platform.python_version(), *versions])


def run(case: Case, nprocs: int, root: Path) -> Hashes:
    """Train, and return what the run hashes to.

    Raises:
        RuntimeError: if the run fails, or if it imported another checkout than its own.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file in (Path(worlds.__file__), Path(__file__).with_name("same_curve_hook.py")):
            shutil.copy(file, folder)
        worlds.write_data(folder)
        for name, agent, options in case.commands:
            kept = folder / name
            if agent:
                text = AGENT.format(module=agent, agent=CLASSES[agent])
                (folder / f"hashed_{agent}.py").write_text(text)
            words = words_of(root, name, agent, options)
            words = [word.replace("{folder}", temporary) for word in words]
            start([*words, "--nprocs", str(nprocs), "--quiet"], root, folder)
        written = (folder / "hashes.txt").read_text().splitlines()
        summary = json.loads((kept / "summary.json").read_text())
        record = record_of(kept / "progress.csv")
    lines = [line.split(maxsplit=3) for line in written]
    roots = {where for *_, where in lines}
    if roots != {str(root)}:
        raise RuntimeError(f"expected rank0rl of {root}, got that of {sorted(roots)}")
    iterations = summary["iterations"]
    if iterations < ITERATIONS or len(lines) != iterations * (
        1 + bool(VARIANTS[case.variant].before)
    ):
        raise RuntimeError(f"expected {ITERATIONS} updates or more, got {len(lines)}: {summary}")
    numbers = [summary[name] for name in ("steps", "episodes", "return_mean")]
    whole = json.dumps([[found for *found, _ in lines], numbers])
    return Hashes(hashlib.sha256(whole.encode()).hexdigest(), record, summary["weights_sha256"])


def record_of(path: Path) -> str:
    """Return a hash of a record without names, times and other hashes."""
    left_out = ("_s", "_sha256", "seconds", "memory_mb")
    with path.open() as file:
        rows = [
            sorted(value for name, value in row.items() if not name.endswith(left_out))
            for row in csv.DictReader(file)
        ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def words_of(root: Path, name: str, agent: str, options: str) -> list[str]:
    """Return the command line of a start, with the words of this checkout."""
    if options == "--resume":
        return ["--resume", f"{{folder}}/{name}"]
    for word, (option, old, new) in WORDS.items():
        if word in options:
            options = options.replace(word, new if option in help_of(root) else old)
    where = f"--algo {{folder}}/hashed_{agent}.py:Hashed --run-dir {{folder}}/{name}"
    return f"{options} {where}".replace("WORLDS", worlds.__name__).split()


@functools.cache
def help_of(root: Path) -> str:
    """Return what `train.py --help` of a checkout prints."""
    return start(["--help"], root, root)


def start(words: Sequence[str], root: Path, folder: Path) -> str:
    """Run `train.py` of a checkout, with the modules of a folder; return what it prints.

    Raises:
        RuntimeError: if it fails, with the end of what it printed.
    """
    done = subprocess.run(
        [sys.executable, str(root / "train.py"), *words],
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def table(rows: Sequence[Case], results: Mapping[tuple[Case, int, int], Hashes], sides: int) -> int:
    """Print the rows; return the number of rows with a difference.

    A row is the same if all of its hashes are equal, over both checkouts and all numbers of ranks,
    and its curve is that of the first row of its curve: a resumed run is the run that did not stop.
    """
    columns = ["old", "new"][:sides]
    print("| agent | environment | batches | variant | ranks |", " | ".join(columns), "| same |")
    print("|" + " --- |" * (6 + sides))
    first: dict[tuple[str, ...], Hashes] = {}
    different = renamed = 0
    for case in rows:
        each = [[results[case, n, side] for n in case.nprocs] for side in range(sides)]
        found = [hashes for side in each for hashes in side]
        expected = first.setdefault(case.curve, found[0])
        same = FAILED not in found and {h.curve for h in found} == {expected.curve}
        recorded = len({h.record for h in found}) == 1
        different += not (same and recorded)
        renamed += same and {h.weights for h in found} != {expected.weights}
        shown = [" ".join(h.curve[:8] for h in side) for side in each]
        where = (case.agent, case.env, case.batches, case.variant, "/".join(map(str, case.nprocs)))
        answer = "NO" if not same else "yes" if recorded else "NO: progress.csv"
        print("|", " | ".join((*where, *shown, answer)), "|")
    if renamed:
        print(f"\n{renamed} rows have equal weights under other names (`weights_sha256` differs)")
    return different


if __name__ == "__main__":
    main()
