"""A job of two ranks that gather, which `doctor` starts. Its arguments are a launcher and hosts, or ""."""

from __future__ import annotations

import sys
import time

from rank0rl.launch import fork


def main() -> None:
    """Print what rank 0 has measured."""
    mpiexec, hosts = (word or None for word in sys.argv[1:])
    if fork.mpi_fork(2, mpiexec=mpiexec, hosts=hosts) == "parent":
        return
    from rank0rl.mpi import comm

    comm.print0(measure())


def measure() -> str:
    """Return the latency and bandwidth of a gather.

    Collective: every rank calls this.
    """
    import numpy as np

    from rank0rl.mpi import comm
    from rank0rl.mpi.gather import rank0_accum_batches

    took = {}
    for size in (1, 1 << 24):
        rows = {"x": np.zeros(size, np.uint8)}
        rank0_accum_batches(rows)
        times = []
        for _ in range(20):
            comm.barrier()
            start = time.perf_counter()
            rank0_accum_batches(rows)
            times.append(time.perf_counter() - start)
        took[size] = sorted(times)[10]
    return (
        f"gathered 1 byte per rank in {1e6 * took[1]:.0f} us, and 16 MiB per rank at "
        f"{comm.get_nworkers() * (1 << 24) / took[1 << 24] / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
