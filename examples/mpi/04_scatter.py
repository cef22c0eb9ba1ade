"""Scatter: rank 0 sends one item to each rank.

    mpiexec -n 10 python examples/mpi/04_scatter.py

Expected output, in any order:

    rank 0 got 1, and has environments 0 to 3
    rank 1 got 2, and has environments 4 to 7
    rank 2 got 3, and has environments 8 to 10
    rank 3 got 4, and has environments 11 to 13
    rank 4 got 5, and has environments 14 to 16
    rank 5 got 6, and has environments 17 to 19
    rank 6 got 7, and has environments 20 to 22
    rank 7 got 8, and has environments 23 to 25
    rank 8 got 9, and has environments 26 to 28
    rank 9 got 10, and has environments 29 to 31
    all ranks have 32 environments
"""

import numpy as np
from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
rank = comm.Get_rank()

# The list must have exactly one item for each rank; the other ranks pass None.
mine = comm.scatter(list(range(1, 11)) if rank == 0 else None, root=0)

# rank0rl has no scatter: the number of a rank says what it has to do. The shares of 32 environments
# among 10 ranks may differ by one.
share = np.array_split(np.arange(32), rank0rl.nworkers)[rank0rl.rank]
print(f"rank {rank} got {mine}, and has environments {share[0]} to {share[-1]}")
total = rank0rl.all_sum(len(share))
rank0rl.print0(f"all ranks have {total} environments")
