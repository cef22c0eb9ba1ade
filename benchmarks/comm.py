"""Measure gather and broadcast beside a plain copy of memory: python benchmarks/comm.py --nprocs 2.

Also measure what a gather costs before its rows move.

    python benchmarks/comm.py --nprocs 4 --sizes        # headers only
    python benchmarks/comm.py --nprocs 2 --gradients    # averages of gradients only
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import rank0rl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1, 10, 100, 1000], help="MB of all ranks"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--gradients", action="store_true", help="measure only averages of gradients"
    )
    parser.add_argument("--out", help="CSV in benchmarks/results that gets the rows")
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":
        sys.exit()
    sys.path.insert(0, str(Path(__file__).parent.parent))
    if args.gradients:
        gradients(args)
        return
    headers(args)
    for size in args.sizes:
        bandwidth(args, size)


def timed(what, count: int = 1) -> float:
    """Return the seconds of one call, from when all ranks are there."""
    from rank0rl.mpi import comm

    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        what()
    return (time.perf_counter() - start) / count


def headers(args: argparse.Namespace) -> None:
    """Measure the messages that ranks exchange before rows move."""
    import numpy as np
    from table import alternate, show

    from rank0rl.mpi import comm
    from rank0rl.mpi.agreement import check_layout

    world, rank, n = comm.world(), comm.get_rank(), comm.get_nworkers()
    assert world is not None, "gathering needs --nprocs 2 or more"
    no_rows = {"obs": np.empty((0, 17), np.float32), "act": np.empty((0, 6), np.float32)}

    def blocking() -> None:  # the same three messages, in calls that spin
        world.Allgather(np.zeros(35, np.int64), np.empty((n, 35), np.int64))
        for _ in no_rows:
            world.Gatherv(
                np.empty(0, np.uint8), [None, [0] * n, [0] * n, "B"] if rank == 0 else None
            )

    calls = {
        "agree on a layout, us": lambda: check_layout({"a": "f4"}, "test"),
        "gather of no rows, us": lambda: rank0rl.rank0_accum_batches(no_rows),
        "the same messages, blocking, us": blocking,
    }
    ways = {name: lambda call=call: 1e6 * timed(call, 300) for name, call in calls.items()}
    figures = alternate(ways, args.repeats)
    if rank == 0:
        show(f"before rows move, ranks: {n}", figures, args.out)


def bandwidth(args: argparse.Namespace, size: int) -> None:
    """Measure gather and broadcast of so many MB, beside a copy of memory."""
    import numpy as np
    from table import alternate, ratio, show

    from rank0rl.mpi import comm

    world, rank, n = comm.world(), comm.get_rank(), comm.get_nworkers()
    assert world is not None, "gathering needs --nprocs 2 or more"
    rows = size * 1_000_000 // 128 // n
    part = {"obs": np.ones((rows, 32), np.float32)}
    whole = np.ones((rows * n, 32), np.float32)

    def copy() -> None:  # into new memory, as a gather does
        if rank == 0:
            np.empty_like(whole)[...] = whole

    def bcast() -> None:
        comm.bcast_(whole)
        comm.barrier()

    counts = [part["obs"].size] * n
    already = np.empty_like(whole)  # its pages are there

    def plain() -> None:  # what MPI itself takes
        receive = [already, counts] if rank == 0 else None
        world.Gatherv(part["obs"], receive)

    calls = {
        "copy of memory, GB/s": copy,
        "gather, GB/s": lambda: rank0rl.rank0_accum_batches(part),
        "one blocking Gatherv into memory that is there, GB/s": plain,
        "broadcast, GB/s": bcast,
    }
    gigabytes = rows * n * 128 / 1e9
    ways = {name: lambda call=call: gigabytes / timed(call) for name, call in calls.items()}
    figures = alternate(ways, args.repeats)
    copied, gathered, bare, sent = figures.values()
    figures["gather / copy"] = ratio(gathered, copied)
    figures["blocking Gatherv / copy"] = ratio(bare, copied)
    figures["broadcast / copy"] = ratio(sent, copied)
    if rank == 0:
        show(f"{size} MB of all, ranks: {n}", figures, args.out)


def gradients(args: argparse.Namespace) -> None:
    """Measure averages of gradients of a million parameters in 50 tensors."""
    import numpy as np
    import torch
    from mpi4py import MPI
    from table import alternate, ratio, show

    from rank0rl.compat import mpi_pytorch
    from rank0rl.mpi import comm

    torch.set_num_threads(1)
    world, rank, n = comm.world(), comm.get_rank(), comm.get_nworkers()
    assert world is not None, "averaging needs --nprocs 2 or more"
    sizes = [(199, 200)] * 25 + [(200,)] * 25
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
    for parameter in module:
        parameter.grad = torch.randn_like(parameter)
    flat = np.zeros(sum(p.numel() for p in module), np.float32)

    def one_by_one() -> None:
        for parameter in module:
            world.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
            parameter.grad /= n

    calls = {
        "mpi_avg_grads, ms": lambda: mpi_pytorch.mpi_avg_grads(module),
        "one Allreduce of as many numbers, ms": lambda: world.Allreduce(MPI.IN_PLACE, flat),
        "one blocking call per parameter, ms": one_by_one,
    }

    def mean_ms(call) -> float:
        world.Barrier()
        start = time.perf_counter()
        for _ in range(20):
            call()
        return 1e3 * (time.perf_counter() - start) / 20

    figures = alternate({k: lambda call=call: mean_ms(call) for k, call in calls.items()}, 9)
    ours, one, each = figures.values()
    figures["mpi_avg_grads / one Allreduce"] = ratio(ours, one)
    figures["mpi_avg_grads / one call per parameter"] = ratio(ours, each)
    if rank == 0:
        show(f"gradients of {flat.size:,} parameters in 50 tensors, ranks: {n}", figures, args.out)


if __name__ == "__main__":
    main()
