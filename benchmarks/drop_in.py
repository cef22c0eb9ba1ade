"""Time per call of the drop-in modules, beside the same calls as their originals make them on mpi4py.

    python benchmarks/drop_in.py --nprocs 1
    python benchmarks/drop_in.py --nprocs 2

The originals' patterns are written anew: blocking calls on float32 buffers, without any check that
the ranks agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from table import alternate, ratio, show

import rank0rl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", default="", help="CSV in benchmarks/results")
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":
        return
    for what, ours, original, calls in pairs():
        ways = {"here": per_call(ours, calls), "original": per_call(original, calls)}
        figures = alternate(ways, args.repeats)
        if rank0rl.rank == 0:
            rows = {f"{way}, us": seconds for way, seconds in figures.items()}
            rows["here / original"] = ratio(figures["here"], figures["original"])
            show(f"{what}, {args.nprocs} ranks", rows, args.out)


def per_call(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Return a function that returns the microseconds of one of many calls in a row."""
    from rank0rl.mpi import comm

    def measured() -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e6 * (time.perf_counter() - begin) / calls

    return measured


def pairs() -> list[tuple[str, Callable[[], Any], Callable[[], Any], int]]:
    """Return what is called, the call here, the original's way, and how often it is called."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from rank0rl.compat import mpi_pytorch, mpi_tools, omnisafe

    torch.set_num_threads(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(17, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 6)
    )
    net(torch.ones(5, 17)).sum().backward()
    samples = np.arange(2000, dtype=np.float32)
    listed = samples.tolist()
    eight, many, tensor = np.ones(8, np.float32), np.ones(10_000, np.float32), torch.ones(8)
    original = Originals(MPI.COMM_WORLD)
    statistics = mpi_tools.mpi_statistics_scalar
    return [
        ("mpi_avg, a number", partial(mpi_tools.mpi_avg, 3.0), partial(original.avg, 3.0), 2000),
        ("mpi_avg, 8", partial(mpi_tools.mpi_avg, eight), partial(original.avg, eight), 2000),
        ("mpi_avg, 10,000", partial(mpi_tools.mpi_avg, many), partial(original.avg, many), 300),
        (
            "dist_avg, a tensor of 8",
            partial(omnisafe.dist_avg, tensor),
            partial(original.avg_tensor, tensor),
            2000,
        ),
        (
            "mpi_statistics_scalar, an array of 2,000",
            partial(statistics, samples, True),
            partial(original.statistics, samples),
            300,
        ),
        (
            "mpi_statistics_scalar, a list of 2,000",
            partial(statistics, listed, True),
            partial(original.statistics, listed),
            300,
        ),
        (
            "mpi_avg_grads, 3 layers",
            partial(mpi_pytorch.mpi_avg_grads, net),
            partial(original.avg_grads, net),
            300,
        ),
        (
            "sync_params, 3 layers",
            partial(mpi_pytorch.sync_params, net),
            partial(original.sync_params, net),
            300,
        ),
        (
            "broadcast, 10,000",
            partial(mpi_tools.broadcast, many),
            partial(original.world.Bcast, many),
            300,
        ),
    ]


class Originals:
    """The originals, as far as MPI and copies are concerned."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def op(self, x: Any, op: Any = None) -> Any:
        import numpy as np
        from mpi4py import MPI

        x, scalar = ([x], True) if np.isscalar(x) else (x, False)
        x = np.asarray(x, dtype=np.float32)
        result = np.zeros_like(x, dtype=np.float32)
        self.world.Allreduce(x, result, op=op or MPI.SUM)
        return result[0] if scalar else result

    def avg(self, x: Any) -> Any:
        return self.op(x) / self.world.Get_size()

    def avg_tensor(self, value: Any) -> Any:
        import torch

        return torch.as_tensor(self.avg(value.numpy()))

    def statistics(self, x: Any) -> Any:
        import numpy as np
        from mpi4py import MPI

        x = np.array(x, dtype=np.float32)
        total, n = self.op([np.sum(x), len(x)])
        mean = total / n
        std = np.sqrt(self.op(np.sum((x - mean) ** 2)) / n)
        low = self.op(np.min(x) if len(x) > 0 else np.inf, MPI.MIN)
        return mean, std, low, self.op(np.max(x) if len(x) > 0 else -np.inf, MPI.MAX)

    def avg_grads(self, net: Any) -> None:
        if self.world.Get_size() > 1:
            for p in net.parameters():
                p.grad.numpy()[:] = self.avg(p.grad)

    def sync_params(self, net: Any) -> None:
        if self.world.Get_size() > 1:
            for p in net.parameters():
                self.world.Bcast(p.data.numpy(), root=0)


if __name__ == "__main__":
    main()
