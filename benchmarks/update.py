"""Measure updates of PPO and TRPO beside stable-baselines3's and another checkout's: python benchmarks/update.py.

    python benchmarks/update.py --beside ../before    # a checkout of another version

It needs the bench extra. Networks are 64x64, for observations of 17 numbers and actions of 6, as on Walker2d. Every
figure is the median update of a process of its own; all ways take turns. Rank 0's full-batch update while the other
ranks wait:

    python benchmarks/update.py --waiting --nprocs 2
    python benchmarks/update.py --waiting --spinning --nprocs 2    # also beside a blocking call

PPO's update on a GPU, beside this machine's CPU with all --threads:

    python benchmarks/update.py --device cuda --threads 1 16
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
EPOCHS = 10
CASES = {  # name -> agent, rows of a batch, rows of a minibatch
    "PPO, 2048 rows, minibatches of 64": ("ppo", 2048, 64),
    "PPO, 2048 rows, minibatches of 512": ("ppo", 2048, 512),
    "PPO, 20,480 rows, minibatches of 256": ("ppo", 20_480, 256),
    "TRPO, 20,000 rows": ("trpo", 20_000, 256),
}
ON_DEVICE = {  # name -> units of both layers, None for images; rows of a batch, rows of a minibatch
    "64 units, 2,048 rows, minibatches of 64": (64, 2048, 64),
    "64 units, 20,480 rows, minibatches of 256": (64, 20_480, 256),
    "256 units, 20,480 rows, minibatches of 256": (256, 20_480, 256),
    "256 units, 20,480 rows, minibatches of 4,096": (256, 20_480, 4096),
    "1,024 units, 4,096 rows, minibatches of 4,096": (1024, 4096, 4096),
    "images of 84x84x4, 1,024 rows, minibatches of 256": (None, 1024, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument(
        "--waiting", action="store_true", help="measure what waiting ranks cost instead"
    )
    parser.add_argument("--spinning", action="store_true", help="also wait in a blocking call")
    parser.add_argument("--device", help="measure PPO on this device, beside the CPU, instead")
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        root, what, *numbers = args.one
        sys.path.insert(0, root)
        print(measured(what, *map(int, numbers)))
    elif args.waiting:
        sys.path.insert(0, str(HERE))
        import rank0rl

        if rank0rl.mpi_fork(args.nprocs) == "parent":
            sys.exit()
        waiting(args)
    elif args.device:
        sys.path.insert(0, str(HERE))
        on_device(args)
    else:
        updates(args)


def updates(args: argparse.Namespace) -> None:
    """Measure a whole update in alternation."""
    from table import alternate, ratio, show

    for name, case in CASES.items():
        ways = {f"threads: {n}, ms": partial(process, HERE, *case, n) for n in args.threads}
        first, *others = ways
        if args.beside:
            others.append("beside, ms")
            ways["beside, ms"] = partial(process, args.beside.resolve(), *case, 1)
        if case[0] == "ppo":
            others.append("stable-baselines3, ms")
            ways["loss by torch, ms"] = partial(process, HERE, "own", *case[1:], 1)
            ways["stable-baselines3, ms"] = partial(process, HERE, "sb3", *case[1:], 1)
            ways["each of two processes at once, ms"] = partial(twice, HERE, *case, 1)
        figures = alternate(ways, args.repeats)
        for n in args.threads:
            mine = figures[f"threads: {n}, ms"]
            for other in ("beside", "stable-baselines3"):
                if f"{other}, ms" in figures:
                    figures[f"threads: {n} / {other}"] = ratio(mine, figures[f"{other}, ms"])
            if n > 1:
                figures[f"gain of {n} threads"] = ratio(figures[first], mine)
        if "loss by torch, ms" in figures:
            figures["loss by torch / closed form"] = ratio(
                figures["loss by torch, ms"], figures[first]
            )
        if "each of two processes at once, ms" in figures:
            at_once = [took / 2 for took in figures["each of two processes at once, ms"]]
            figures["gain of two processes"] = ratio(figures[first], at_once)
        show(f"an update of {name}", figures, args.out)


def on_device(args: argparse.Namespace) -> None:
    """Measure a PPO update of ten epochs, of four on images, on the CPU and on a device."""
    from rank0rl.run.launch_options import limit_cpu

    limit_cpu("portable")
    import torch
    from table import alternate, ratio, show

    index = torch.device(args.device).index or 0
    name = torch.cuda.get_device_name(index) if args.device.startswith("cuda") else "CPU"
    for case, (units, rows, size) in ON_DEVICE.items():
        cpu = {f"CPU, threads: {n}, ms": ("cpu", n) for n in args.threads}
        gpu = f"{args.device} ({name}), ms"
        ways = {
            way: partial(update_on, *where, units, rows, size)
            for way, where in {**cpu, gpu: (args.device, 1)}.items()
        }
        figures = alternate(ways, args.repeats)
        for way in cpu:
            figures[f"{way[:-4]} / {args.device}"] = ratio(figures[way], figures[gpu])
        show(f"an update of PPO, {case}", figures, args.out)


def update_on(device: str, threads: int, units: int | None, rows: int, size: int) -> float:
    """Return the milliseconds of an update; the first one compiles."""
    import numpy as np

    sizes = {} if units is None else {"hidden": (units, units)}
    epochs = 4 if units is None else EPOCHS
    agent, batch = agent_and_batch(
        rows, "ppo", threads, device, units is None, minibatch_size=size, epochs=epochs, **sizes
    )
    start = time.perf_counter()
    agent.update(batch, np.random.default_rng(0), 0.0)
    return 1000 * (time.perf_counter() - start)


def process(root: Path, what: str, rows: int, size: int, threads: int) -> float:
    """Return the milliseconds of an update, measured in a process of its own."""
    command = [sys.executable, __file__, "--one", str(root), what, str(rows), str(size)]
    done = subprocess.run([*command, str(threads)], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def twice(root: Path, what: str, rows: int, size: int, threads: int) -> float:
    """Return the mean of two such processes that run at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(process, root, what, rows, size, threads) for _ in range(2)]
    return statistics.mean(each.result() for each in both)


def measured(what: str, rows: int, size: int, threads: int) -> float:
    """Return the milliseconds of a median update in this process."""
    if what != "sb3":
        with suppress(ImportError, ValueError):  # older versions have no such thing
            from rank0rl.run.launch_options import limit_cpu

            limit_cpu("portable")
    import numpy as np

    from rank0rl.mpi.threads import set_threads

    set_threads(1)
    if what == "sb3":
        train = stable_baselines(size, rows)
    else:
        agent, batch = agent_and_batch(
            rows, what, threads, **({} if what == "trpo" else {"minibatch_size": size})
        )

        def train() -> float:
            start = time.perf_counter()
            agent.update(batch, np.random.default_rng(0), 0.0)
            return time.perf_counter() - start

    train()
    times: list[float] = []
    while len(times) < 5 or sum(times) < 1:
        times.append(train())
    return 1000 * statistics.median(times)


@cache
def agent_and_batch(rows, name="ppo", threads=1, device="cpu", images=False, **options):
    """Return an agent that is ready to update, and a batch of observations on Walker2d or of images."""
    import importlib

    import numpy as np

    from rank0rl.agent import Space, Spaces, Step
    from rank0rl.mpi.threads import set_threads

    kind = "ppo" if name == "own" else name
    module = importlib.import_module(f"rank0rl.algos.{kind}")
    of = getattr(module, kind.upper())
    if name == "own":  # its loss is computed by torch
        of = type("Own", (of,), {"closed_form": lambda self: None})
    box = Space("box", (6,), "float32", low=-np.ones(6, "f"), high=np.ones(6, "f"))
    rng = np.random.default_rng(0)
    spaces = Spaces(Space("box", (17,), "float32"), box)
    if images:
        image = Space("box", (4, 84, 84), "uint8", low=np.zeros(1), high=np.full(1, 255))
        spaces = Spaces(image, Space("discrete", (), "int64", choices=(6,)))
    agent = of(spaces, getattr(module, f"{kind.upper()}Options")(**options), rng)
    if hasattr(agent, "prepare"):  # older versions have none
        agent.threads, agent.device = threads, device
        if images:
            from rank0rl.nets.images import use_threads  # older versions have none

            use_threads(agent.modules().values(), threads)
        agent.prepare()
        set_threads(1)
    if images:
        obs = rng.integers(0, 256, (rows, 4, 84, 84), np.uint8)
        act, logp = rng.integers(0, 6, rows), np.full(rows, -np.log(6), np.float32)
    else:
        obs = rng.standard_normal((rows, 17), dtype=np.float32)
        noise = rng.standard_normal((rows, 6), dtype=np.float32)
        act, _ = agent.act(Step(obs, noise, np.zeros(rows)))
        logp = np.full(rows, -8, np.float32)
    adv = rng.standard_normal(rows, dtype=np.float32)
    return agent, {"obs": obs, "act": act, "logp": logp, "adv": adv, "val": 0 * adv, "ret": adv}


def stable_baselines(size: int, rows: int):
    """Return a function that times stable-baselines3's `train` on a full rollout buffer, in seconds."""
    import gymnasium as gym
    import numpy as np
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    env = gym.make("Walker2d-v5")
    model = PPO("MlpPolicy", env, n_steps=rows, batch_size=size, n_epochs=EPOCHS, device="cpu")
    model.set_logger(Logger(None, []))
    buffer, rng = model.rollout_buffer, np.random.default_rng(0)

    def train() -> float:
        buffer.reset()
        for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
            array = getattr(buffer, name)
            array[...] = rng.standard_normal(array.shape, dtype=np.float32)
        buffer.log_probs[...] = -8
        buffer.full, buffer.pos = True, rows
        start = time.perf_counter()
        model.train()
        return time.perf_counter() - start

    return train


def waiting(args: argparse.Namespace) -> None:
    """Measure ten full-batch steps of 20,000 rows on rank 0, while the others are away, wait, nap, or spin."""
    import numpy as np
    from table import alternate, ratio, show

    from rank0rl.mpi import comm
    from rank0rl.mpi.threads import set_threads

    set_threads(1)
    rank, threads = comm.get_rank(), args.threads[-1]
    agent, batch = agent_and_batch(20_000, threads=threads, minibatch_size=20_000, epochs=10)
    world = comm.world()
    assert world is not None, "waiting ranks need --nprocs 2 or more"

    def update(meet) -> float:
        comm.barrier()
        start = time.perf_counter()
        if rank == 0:
            agent.update(batch, np.random.default_rng(0), 0.0)
        took = time.perf_counter() - start
        meet()
        return took * 1000

    def nap(pause_s: float) -> None:  # naps for longer than the update takes
        end = time.perf_counter() + 2
        while rank and time.perf_counter() < end:
            time.sleep(pause_s)

    away = "the other ranks away, ms"
    ways = {
        away: lambda: update(lambda: nap(2.0)),
        "away, once more": lambda: update(lambda: nap(2.0)),
        "napping, 1 ms at a time, without MPI": lambda: update(lambda: nap(1e-3)),
        "waiting": lambda: update(comm.barrier),
    }
    if args.spinning:
        ways["in a blocking call"] = lambda: update(world.Barrier)
    figures = alternate(ways, args.repeats)
    for name in list(ways)[1:]:
        figures[f"{name} / away"] = ratio(figures[name], figures[away])
    if rank == 0:
        show(
            f"update of 20,000 rows, 10 full-batch steps, {threads} threads, ranks: {args.nprocs}",
            figures,
            args.out,
        )


if __name__ == "__main__":
    main()
