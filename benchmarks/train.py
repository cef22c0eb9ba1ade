"""Measure whole iterations of PPO beside other projects and bare `env.step`: python benchmarks/train.py.

It needs the bench extra. A larger batch, and discrete actions:

    python benchmarks/train.py --steps-per-batch 20000 --minibatch-size 256 --iterations 4
    python benchmarks/train.py CartPole --sb3 8

An LSTM, with four epochs, beside sb3-contrib:

    python benchmarks/train.py CartPole --lstm --minibatch-size 256 --iterations 6

Images: Pong, with four epochs and the same network everywhere, and with torch threads of stable-baselines3 as --nprocs
says. It needs the atari extra too.

    python benchmarks/train.py Pong --iterations 6

stable-baselines3 in JAX (SBX), alone and with EnvPool, from an environment of its own, see others.py:

    python benchmarks/train.py --sbx-python sbx/bin/python --sbx 8 --sbx-envpool 8 32 --single-file

Every figure is a process of its own, and all ways take turns. The first iteration is not timed.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from table import alternate, ratio, show

ROOT = Path(__file__).parent.parent
ENVS = {"Walker2d": "Walker2d-v5", "CartPole": "CartPole-v1", "Pong": "ale_py:ALE/Pong-v5"}
PHASES = ("collect", "process", "wait", "gather", "update", "broadcast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", choices=ENVS, default="Walker2d")
    parser.add_argument("--lstm", action="store_true", help="networks with memory")
    parser.add_argument("--nprocs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps-per-batch", type=int, default=2048)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument(
        "--sb3", type=int, nargs="*", default=[1, 8], help="environments of stable-baselines3"
    )
    parser.add_argument(
        "--single-file", type=int, nargs="*", default=[8], help="environments of the one-file loop"
    )
    parser.add_argument("--sbx", type=int, nargs="*", default=[], help="environments of SBX")
    parser.add_argument(
        "--sbx-envpool", type=int, nargs="*", default=[], help="environments of SBX on EnvPool"
    )
    parser.add_argument("--sbx-python", default=sys.executable, help="Python that has these")
    parser.add_argument("--units", type=int, default=64, help="of both hidden layers")
    parser.add_argument("--beside", help='other options of train.py, such as "--overlap"')
    parser.add_argument(
        "--before", type=Path, help="a checkout of another version, beside this one"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    if args.task == "Pong":
        args.steps_per_batch, args.minibatch_size = 1024, 256
    phases: dict[str, list[float]] = {}
    phases_before: dict[str, list[float]] = {}
    limits, ours, beside, before, others = ways_of(args, phases, phases_before)
    seen = alternate({**limits, **ours, **beside, **before, **others}, args.repeats)
    figures = dict(seen)
    last = seen[list(ours)[-1]]
    for name in beside:
        figures[f"{args.beside} / without"] = ratio(seen[name], last)
    for now, then in zip(ours, before, strict=False):
        figures[f"{now} / before"] = ratio(seen[now], seen[then])
        if then == list(before)[-1] and limits:
            figures["before / bare env.step"] = ratio(seen[then], seen[next(iter(limits))])
    for name in limits:
        figures[f"rank0rl / {name.split(',')[0]}"] = ratio(last, seen[name])
    if others:
        best = max((seen[name] for name in others), key=statistics.median)
        figures["rank0rl / the best other"] = ratio(last, best)
    if len(ours) > 1:
        figures["speedup"] = ratio(last, seen[next(iter(ours))])
    for name, those in (("", phases), ("before: ", phases_before)):
        figures |= {name + phase: these for phase, these in those.items()}
    size = f"{args.steps_per_batch} steps a batch, minibatches of {args.minibatch_size}"
    task = f"{args.task}, LSTM" if args.lstm else args.task
    task += f", {4 if args.lstm or args.task == 'Pong' else 10} epochs"
    if args.units != 64:
        task += f", {args.units} units"
    show(f"{task}, {size}, steps/s and ms", figures, args.out)


def ways_of(args: argparse.Namespace, phases: dict, phases_before: dict) -> list[dict]:
    """Return what takes turns: limits, this checkout, with other options, the other one, others."""
    most = max(args.nprocs)
    ours = {f"rank0rl, ranks: {n}": partial(rank0rl, args, n, phases) for n in args.nprocs}
    beside, before, others = {}, {}, {}
    if args.beside:
        options = shlex.split(args.beside)
        beside[f"rank0rl, ranks: {most}, {args.beside}"] = partial(rank0rl, args, most, {}, options)
    if args.before:
        root = args.before.resolve()
        for n in args.nprocs:
            before[f"before, ranks: {n}"] = partial(rank0rl, args, n, phases_before, (), root)
    if args.task == "Pong":
        for n in args.nprocs:
            options = ["--threads", str(n)]
            others[f"stable-baselines3, threads: {n}"] = partial(
                other, args, "stable-baselines3", 8, options
            )
        return [{}, ours, beside, before, others]
    counts = (
        {"sb3-contrib": args.sb3}
        if args.lstm
        else {
            "stable-baselines3": args.sb3,
            "sbx": args.sbx,
            "sbx-envpool": args.sbx_envpool,
            "single-file": args.single_file if args.task == "Walker2d" else [],
        }
    )
    for name, numbers in counts.items():
        for n in numbers:
            others[f"{name}, environments: {n}"] = partial(
                other, args, name, n, ["--units", str(args.units)]
            )
    limits = {f"bare env.step, processes: {most}": partial(bare, args.task, most)}
    if args.task == "Walker2d":
        limits[f"raw mj_step, processes: {most}"] = partial(bare, args.task, most, raw=True)
    return [limits, ours, beside, before, others]


def other(
    args: argparse.Namespace, name: str, environments: int, options: Sequence[str] = ()
) -> float:
    """Return the steps per second of another project."""
    sizes = environments, args.steps_per_batch, args.minibatch_size, max(3, args.iterations // 4)
    python = args.sbx_python if name.startswith("sbx") else sys.executable
    command = [python, str(ROOT / "benchmarks" / "others.py"), name, args.task, *map(str, sizes)]
    command += options
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def bare(task: str, processes: int, raw: bool = False, steps: int = 10_000) -> float:
    """Return the steps per second of so many processes that only call `env.step`, summed.

    With `raw`, only the time inside MuJoCo's `mj_step` counts.
    """
    code = f"""
import gymnasium as gym, time
inside = 0
if {raw}:
    import mujoco
    mj_step = mujoco.mj_step
    def timed(*args, **kwargs):
        global inside
        begin = time.perf_counter()
        mj_step(*args, **kwargs)
        inside += time.perf_counter() - begin
    mujoco.mj_step = timed
env = gym.make("{ENVS[task]}", disable_env_checker=True)
env.action_space.seed(0)
actions = [env.action_space.sample() for _ in range({steps})]
env.reset(seed=0)
start = time.perf_counter()
for action in actions:
    _, _, over, cut, _ = env.step(action)
    if over or cut:
        env.reset()
print({steps} / (inside or time.perf_counter() - start))
"""
    these = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    return sum(float(process.communicate()[0]) for process in these)


def rank0rl(
    args: argparse.Namespace,
    nprocs: int,
    phases: dict[str, list[float]],
    options: Sequence[str] = (),
    root: Path = ROOT,
) -> float:
    """Run train.py; return its steps per second, and add its phases to a dict of figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", ENVS[args.task], "--nprocs", str(nprocs)]
        if args.task != "Pong":
            command += ["--config", str(ROOT / "benchmarks" / "ppo-64x64.toml"), "--num-envs", "32"]
            command += ["--hidden", str(args.units), str(args.units)]
        if args.lstm:
            command += ["--recurrent", "lstm", "--epochs", "4"]
        command += ["--steps-per-batch", str(args.steps_per_batch)]
        command += ["--minibatch-size", str(args.minibatch_size)]
        command += [
            "--stop-after-iterations",
            str(args.iterations),
            "--run-dir",
            folder,
            *options,
        ]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        with Path(folder, "progress.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    first, last = rows[0], rows[-1]
    took = float(last["seconds"]) - float(first["seconds"])
    means = {p: statistics.mean(float(row[f"{p}_s"]) for row in rows[1:]) for p in PHASES}
    each = took / (len(rows) - 1)
    if nprocs == 1:  # ranks share collecting and processing
        shared = (means["collect"] + means["process"]) / each
        for most in (max(args.nprocs), 16):
            ceiling = 1 / (1 - shared + shared * nprocs / most)
            phases.setdefault(f"ceiling that the phases imply, {most} ranks", []).append(ceiling)
    if nprocs == max(args.nprocs):
        for phase, mean in means.items():
            phases.setdefault(f"{phase}, ms", []).append(1000 * mean)
        other = each - sum(means.values())
        phases.setdefault("all else, ms", []).append(1000 * other)
    return args.steps_per_batch / each


if __name__ == "__main__":
    main()
