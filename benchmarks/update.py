"""Measure one PPO gradient step beside one of stable-baselines3: python benchmarks/update.py.

It needs the bench extra. Networks are 64x64, for observations of 17 numbers and actions of 6, as on Walker2d, with
one thread. Rank 0's full-batch update while the other ranks wait:

    python benchmarks/update.py --waiting --nprocs 2
    python benchmarks/update.py --waiting --spinning --nprocs 2    # also beside a blocking call
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import rank0rl

EPOCHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--waiting", action="store_true", help="measure what waiting ranks cost instead"
    )
    parser.add_argument("--spinning", action="store_true", help="also wait in a blocking call")
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the update, with --waiting"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":
        sys.exit()
    sys.path.insert(0, str(Path(__file__).parent.parent))
    waiting(args) if args.waiting else gradient_step(args)


def agent_and_batch(rows: int, **options):
    import numpy as np

    from algos.ppo import PPO, PPOOptions
    from rank0rl.agent import Space, Spaces

    box = Space("box", (6,), "float32", low=-np.ones(6, "f"), high=np.ones(6, "f"))
    rng = np.random.default_rng(0)
    agent = PPO(Spaces(Space("box", (17,), "float32"), box), PPOOptions(**options), rng)
    obs = rng.standard_normal((rows, 17), dtype=np.float32)
    act, _ = agent.act(obs, rng.standard_normal((rows, 6), dtype=np.float32), np.zeros(rows))
    logp, _, _ = agent.policy.numpy(obs, act)
    adv = rng.standard_normal(rows, dtype=np.float32)
    return agent, {"obs": obs, "act": act, "logp": logp, "adv": adv, "val": 0 * adv, "ret": adv}


def gradient_step(args: argparse.Namespace) -> None:
    """Measure one gradient step beside one of stable-baselines3."""
    import numpy as np
    from table import alternate, ratio, show

    from rank0rl.mpi.threads import set_threads

    set_threads(1)
    for size, rows in ((64, 2048), (256, 20_480)):
        agent, batch = agent_and_batch(rows, minibatch_size=size, epochs=EPOCHS)

        def ours(agent=agent, batch=batch, size=size, rows=rows) -> float:
            start = time.perf_counter()
            agent.update(batch, np.random.default_rng(0), 0.0)
            return 1e6 * (time.perf_counter() - start) * size / rows / EPOCHS

        ways = {"rank0rl, us": ours, "stable-baselines3, us": stable_baselines(size, rows)}
        figures = alternate(ways, args.repeats)
        figures["rank0rl / stable-baselines3"] = ratio(*figures.values())
        show(f"one PPO gradient step of {size} rows", figures, args.out)


def stable_baselines(size: int, rows: int):
    """Return a function that times stable-baselines3's `train` on a full rollout buffer, per gradient step."""
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
        return 1e6 * (time.perf_counter() - start) * size / rows / EPOCHS

    return train


def waiting(args: argparse.Namespace) -> None:
    """Measure ten full-batch steps of 20,000 rows on rank 0, while the others are away, wait, nap, or spin."""
    import numpy as np
    from table import alternate, ratio, show

    from rank0rl.mpi import comm
    from rank0rl.mpi.threads import set_threads

    set_threads(args.threads)
    rank = comm.get_rank()
    agent, batch = agent_and_batch(20_000, minibatch_size=20_000, epochs=10)
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
            f"update of 20,000 rows, 10 full-batch steps, {args.threads} threads, ranks: {args.nprocs}",
            figures,
            args.out,
        )


if __name__ == "__main__":
    main()
