"""How close to the limit: every phase of an iteration beside the bare `env.step`, in one run.

    python benchmarks/speed.py Walker2d --nprocs 2

Bare stepping and whole iterations alternate, so that a drifting machine does not favour one.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import rank0rl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env_id", nargs="?", default="Walker2d")
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--steps-per-batch", type=int, default=2048)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="CSV file for the rows printed")
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":
        sys.exit()
    sys.path.insert(0, str(Path(__file__).parent.parent))
    rows = measure(args)
    if rank0rl.rank == 0:
        show(args, rows)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Name -> one figure per repeat; the same on every rank, but complete on rank 0 only."""
    import numpy as np

    from algos.ppo import PPO, PPOOptions
    from rank0rl import comm, envs, seeding
    from rank0rl.config import RunOptions
    from rank0rl.session import make_rollout
    from rank0rl.threads import set_threads
    from rank0rl.timing import Phases
    from rank0rl.trainer import collect, update

    set_threads(1)
    options = RunOptions(
        envs.resolve(args.env_id), num_envs=args.num_envs, steps_per_batch=args.steps_per_batch
    )
    rollout = make_rollout(options, comm.rank, comm.nworkers)
    agent_options = PPOOptions(minibatch_size=args.minibatch_size)
    agent = PPO(rollout.spaces, agent_options, seeding.stream(0, "init"))
    env = envs.make(options.env_id)
    my_steps = options.steps_per_env * len(rollout.lanes)
    actions = draw_actions(env, my_steps)
    rows: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    for repeat in range(args.repeats + 1):
        comm.barrier()
        start = time.perf_counter()
        bare(env, actions, repeat)
        comm.barrier()
        bare_s = time.perf_counter() - start
        phases = Phases()
        start = time.perf_counter()
        gathered = collect(agent, rollout, options, phases, repeat + 1)
        if comm.get_rank() == 0:
            update(agent, gathered, options, phases, repeat + 1, 0.0)
        comm.barrier()
        whole_s = time.perf_counter() - start
        took = phases.take()
        if repeat == 0:  # the first one warms up
            continue
        steps = args.steps_per_batch
        collect_s = float(
            np.max(comm.rank0_accum_batches({"s": np.array([took["collect"]])})["s"], initial=0)
        )
        if comm.rank == 0:
            add("bare env.step, steps/s", steps / bare_s)
            add("rollout, steps/s", steps / collect_s)
            add("rollout / bare", bare_s / collect_s)
            for phase in ("collect", "process", "wait", "gather", "update", "broadcast"):
                add(f"{phase}, ms", 1000 * took[phase])
            add("one gradient step, us", 1e6 * took["update"] / gradient_steps(args, agent_options))
            add("end to end, steps/s", steps / whole_s)
            add("end to end / bare", bare_s / whole_s)
    return rows


def gradient_steps(args: argparse.Namespace, options: object) -> int:
    return -(-args.steps_per_batch // args.minibatch_size) * options.epochs


def draw_actions(env, steps: int) -> list:
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(steps)]


def bare(env, actions: list, seed: int) -> None:
    """What Gymnasium itself costs: step, and reset where an episode ends."""
    env.reset(seed=seed)
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()


def show(args: argparse.Namespace, rows: dict[str, list[float]]) -> None:
    import statistics

    print(
        f"{args.env_id}, {args.nprocs} ranks, {args.num_envs} environments, {args.steps_per_batch} "
        f"steps a batch, minibatches of {args.minibatch_size}; median (min to max) of {args.repeats}"
    )
    table = [
        (name, statistics.median(values), min(values), max(values)) for name, values in rows.items()
    ]
    for name, median, low, high in table:
        digits = 3 if "/" in name and "steps/s" not in name else 1
        print(f"{name:26} {median:12,.{digits}f}   ({low:,.{digits}f} to {high:,.{digits}f})")
    if args.out:
        with args.out.open("w", newline="") as file:
            csv.writer(file).writerows([("what", "median", "min", "max"), *table])


if __name__ == "__main__":
    main()
