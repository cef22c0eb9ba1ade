"""A study that is killed twice, beside the same runs under xargs: time, and the hash of every run.

python benchmarks/study.py --total-steps 200000
python benchmarks/study.py --total-steps 1000000 --patience 12   # runs of many lengths

Options that are not its own, such as --patience, are those of every run.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVS, LRS = ("CartPole", "Pendulum"), ("3e-4", "1e-3")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def names(seeds):
    """Return the folders of the runs, and their command lines."""
    for seed in range(seeds):
        for env in ENVS:
            for lr in LRS:
                words = [env, "--algo", "ppo", "--lr", lr, "--seed", str(seed)]
                yield f"{env}-ppo-lr={lr}-seed{seed}", words


def under_xargs(folder, seeds, cores, more):
    """Train the runs, one process each, as many at once as there are cores; return the seconds."""
    lines = [
        shlex.join([*words, *more, "--run-dir", str(folder / name), "--quiet"])
        for name, words in names(seeds)
    ]
    begun = time.monotonic()
    subprocess.run(
        ["xargs", "-P", str(cores), "-L", "1", sys.executable, "-m", "rank0rl", "train"],
        input="\n".join(lines) + "\n",
        text=True,
        check=True,
        env=ENV,
    )
    return time.monotonic() - begun


def as_study(folder, seeds, cores, more, kill_at):
    """Train the runs as a study, which is killed at these seconds of its starts; return the seconds."""
    command = [sys.executable, "-m", "rank0rl", "study", *ENVS, "--grid", f"lr={','.join(LRS)}"]
    command += ["--seeds", f"0:{seeds}", "--cores", str(cores), "--out", str(folder), *more]
    begun = time.monotonic()
    for limit in [*kill_at, None]:
        process = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            print(f"killed after {limit:.0f} s", flush=True)
        else:
            assert code == 0, code
    return time.monotonic() - begun


def summary(run):
    """Return the hash of a run's weights, and the number of ranks of each of its starts."""
    starts = tomllib.loads((run / "config.toml").read_text())["record"]
    sha256 = json.loads((run / "summary.json").read_text())["weights_sha256"]
    return sha256, [start["nprocs"] for start in starts]


def main():
    """Measure, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the times at which it is killed")
    args, more = parser.parse_known_args()
    more += ["--total-steps", str(args.total_steps)]
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = under_xargs(folder / "xargs", args.seeds, args.cores, more)
        undisturbed = as_study(folder / "study", args.seeds, args.cores, more, [])
        kill_at = [rng.uniform(0.1, 0.4) * alone for _ in range(2)]
        killed = as_study(folder / "killed", args.seeds, args.cores, more, kill_at)
        equal = 0
        for name, _ in names(args.seeds):
            of = {kind: summary(folder / kind / name) for kind in ("xargs", "study", "killed")}
            same = len({sha256 for sha256, _ in of.values()}) == 1
            equal += same
            starts = "; ".join(f"{kind} {ranks}" for kind, (_, ranks) in of.items())
            print(f"{name}: {'equal' if same else 'DIFFERS'}; ranks of each start: {starts}")
    print(
        f"{equal} of {len(ENVS) * len(LRS) * args.seeds} equal; xargs {alone:.0f} s; study "
        f"{undisturbed:.0f} s ({undisturbed / alone:.2f}); study killed twice {killed:.0f} s "
        f"({killed / alone:.2f})"
    )


if __name__ == "__main__":
    main()
