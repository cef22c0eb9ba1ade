"""Prove that two checkouts of this project make the same training curves, bit for bit.

    python benchmarks/same_curve.py OLD NEW                  # the whole table: an hour on two cores
    python benchmarks/same_curve.py OLD NEW --quick          # PPO and REINFORCE on 1 and 2 ranks
    python benchmarks/same_curve.py OLD NEW --cache old.json # keeps the hashes of OLD for next time
    python benchmarks/same_curve.py OLD --cache old.json     # OLD alone: is it the same on all ranks?

Every run is `train.py` of one checkout, for three iterations. Its agent is the reference agent with
one addition: it writes SHA-256 hashes of each batch before the update and of the weights after it.
The hashes cover dtypes, shapes and contents, but no names: a renamed batch key changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

AGENTS = {
    "ppo": "PPO",
    "trpo": "TRPO",
    "klppo": "KLPPO",
    "reinforce": "Reinforce",
    "cem": "CEM",
}  # file in algos/ -> class
ENVS = ("Hopper", "CartPole")
ITERATIONS = 3
BATCHES = {
    "fixed": ("--num-envs 6 --steps-per-batch 192", f"--total-steps {ITERATIONS * 192}"),
    "episodes": ("--num-envs 6 --episodes-per-batch 12", f"--num-episodes {ITERATIONS * 12}"),
}  # mode -> the size of a batch, the length of the run
VARIANTS = {
    "plain": ("", 0),
    "resume": ("", 1),
    "overlap": ("--overlap", 0),
    "overlap, resume": ("--overlap", 2),
    "parts, evaluation": ("--gather-parts 3 --eval-every 1 --eval-episodes 3", 0),
}  # name -> options, iterations after which the run stops and is resumed (0: it does not stop)
MORE = {
    "ppo": ("overlap, resume", "parts, evaluation"),
    "reinforce": ("overlap, resume",),
}  # agent -> variants beyond the three that all agents have

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
        with Path(__file__).with_name("hashes.txt").open("a") as file:
            print(seen, sha256(self.modules()), Path(rank0rl.__file__).parents[1], file=file)
        return metrics
'''


@dataclass(frozen=True)
class Case:
    """One row of the table: what is trained, and how."""

    agent: str
    """File in algos/."""
    env: str
    """Environment."""
    batches: str
    """Key of BATCHES."""
    variant: str
    """Key of VARIANTS."""

    @property
    def curve(self) -> tuple[str, ...]:
        """The curve it belongs to: resume, parts and evaluation must not change one."""
        return self.agent, self.env, self.batches, "overlap" * ("overlap" in self.variant)

    @property
    def commands(self) -> list[str]:
        """Options of each start of the run; `--resume` alone goes on with the run."""
        options, stop = VARIANTS[self.variant]
        size, length = BATCHES[self.batches]
        population = "--population 12" if self.agent == "cem" else ""
        first = f"{self.env} {size} {length} {options} {population}"
        if not stop:
            return [first]
        return [f"{first} --stop-after-iterations {stop}", "--resume"]

    def __str__(self) -> str:
        """Return its place in the table, which `--only` searches."""
        return "/".join((self.agent, self.env, self.batches, self.variant))


class Hashes(NamedTuple):
    """Hashes of one run."""

    curve: str
    """Hash of all batches, of the weights after each update and of the episodes' returns."""
    weights: str
    """`weights_sha256` of summary.json: the last weights, with their names."""


FAILED = Hashes("failed", "failed")


def main() -> None:
    """Run both checkouts, print the table, and exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="Checkout to compare with.")
    parser.add_argument("new", type=Path, nargs="?", help="Checkout to compare. Default: none.")
    parser.add_argument("--quick", action="store_true", help="PPO and REINFORCE, 1 and 2 ranks.")
    parser.add_argument("--only", default="", help="Rows that begin so: ppo/Hopper/fixed.")
    parser.add_argument("--nprocs", type=int, nargs="+", help="Numbers of ranks. Default: 1 2 3.")
    parser.add_argument("--cache", type=Path, help="JSON file that keeps the hashes of OLD.")
    args = parser.parse_args()
    agents = ["ppo", "reinforce"] if args.quick else list(AGENTS)
    nprocs = args.nprocs or ([1, 2] if args.quick else [1, 2, 3])
    checkouts = [path.resolve() for path in (args.old, args.new) if path]
    results: dict[Case, list[list[Hashes]]] = {}
    for case in cases(agents):
        if str(case).startswith(args.only):
            caches = (args.cache, None)
            results[case] = [
                [hashes(case, n, root, cache) for n in nprocs]
                for root, cache in zip(checkouts, caches, strict=False)
            ]
    different = table(results, nprocs)
    print(f"\n{len(results)} rows, {different} of them with a difference")
    sys.exit(different > 0)


def cases(agents: Sequence[str]) -> Iterator[Case]:
    """Yield the rows of the table. CEM has whole episodes only: a candidate is an episode."""
    for agent, env, batches in itertools.product(agents, ENVS, BATCHES):
        if agent == "cem" and batches == "fixed":
            continue
        for variant in ("plain", "resume", "overlap", *MORE.get(agent, ())):
            yield Case(agent, env, batches, variant)


def hashes(case: Case, nprocs: int, root: Path, cache: Path | None) -> Hashes:
    """Return what a run hashes to, from the cache if it is there; FAILED if the run failed."""
    kept = json.loads(cache.read_text()) if cache and cache.exists() else {}
    key = f"{case} --nprocs {nprocs}: {' then '.join(case.commands)}"
    if key not in kept:
        try:
            kept[key] = run(case, nprocs, root)
        except RuntimeError as error:
            print(f"{root}: {case} on {nprocs} ranks: {error}", file=sys.stderr)
            return FAILED
        if cache:
            cache.write_text(json.dumps(kept, indent=1))
    found = Hashes(*kept[key])
    print(f"{found.curve[:12]}  {root.name}: {case} on {nprocs} ranks", file=sys.stderr)
    return found


def run(case: Case, nprocs: int, root: Path) -> Hashes:
    """Train, and return what the run hashes to.

    Raises:
        RuntimeError: if the run fails, or if it imported another checkout than its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "hashed.py")
        agent.write_text(AGENT.format(module=case.agent, agent=AGENTS[case.agent]))
        kept = Path(folder, "run")
        for options in case.commands:
            if options == "--resume":
                words = ["--resume", str(kept)]
            else:
                words = [*options.split(), "--algo", f"{agent}:Hashed", "--run-dir", str(kept)]
            start([*words, "--nprocs", str(nprocs), "--quiet"], root)
        written = Path(folder, "hashes.txt").read_text().splitlines()
        summary = json.loads((kept / "summary.json").read_text())
    lines = [line.split(maxsplit=2) for line in written]
    roots = {where for _, _, where in lines}
    if roots != {str(root)}:
        raise RuntimeError(f"expected rank0rl of {root}, got that of {sorted(roots)}")
    if len(lines) != ITERATIONS or summary["iterations"] != ITERATIONS:
        raise RuntimeError(f"expected {ITERATIONS} updates, got {len(lines)}: {summary}")
    curve = [[batch, weights] for batch, weights, _ in lines]
    numbers = [summary[name] for name in ("steps", "episodes", "return_mean")]
    whole = hashlib.sha256(json.dumps([curve, numbers]).encode()).hexdigest()
    return Hashes(whole, summary["weights_sha256"])


def start(words: Sequence[str], root: Path) -> None:
    """Run `train.py` of a checkout.

    Raises:
        RuntimeError: if it fails, with the end of what it printed.
    """
    command = [sys.executable, str(root / "train.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        command,
        check=False,
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")


def table(results: dict[Case, list[list[Hashes]]], nprocs: Sequence[int]) -> int:
    """Print a row for every case; return the number of rows with a difference.

    A row is the same if all of its hashes are equal, over both checkouts and all numbers of ranks,
    and equal to those of the first row of its curve: a resumed run is the run that did not stop.
    """
    ranks = "/".join(map(str, nprocs))
    columns = [f"{name}, {ranks} ranks" for name in ("old", "new")]
    columns = columns[: max((len(sides) for sides in results.values()), default=0)]
    print("| agent | environment | batches | variant |", " | ".join(columns), "| same |")
    print("|" + " --- |" * (5 + len(columns)))
    first: dict[tuple[str, ...], Hashes] = {}
    different = renamed = 0
    for case, sides in results.items():
        expected = first.setdefault(case.curve, sides[0][0])
        found = [hashes for side in sides for hashes in side]
        same = FAILED not in found and {h.curve for h in found} == {expected.curve}
        different += not same
        renamed += same and {h.weights for h in found} != {expected.weights}
        shown = [" ".join(h.curve[:8] for h in side) for side in sides]
        row = (case.agent, case.env, case.batches, case.variant, *shown, "yes" if same else "NO")
        print("|", " | ".join(row), "|")
    if renamed:
        print(f"\n{renamed} rows have equal weights under other names (`weights_sha256` differs)")
    return different


if __name__ == "__main__":
    main()
