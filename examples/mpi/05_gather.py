"""Gather: one rank gets what every rank has, in the order of ranks.

    mpiexec -n 5 python examples/mpi/05_gather.py

Expected output, in any order:

    rank 0 gathered [1, 4, 9, 16, 25]
    rank 0 has 15 rows of obs: [0 1 1 2 2 2 3 3 3 3 4 4 4 4 4]
    rank 1 has 0 rows of obs: []
    rank 2 has 0 rows of obs: []
    rank 3 has 0 rows of obs: []
    rank 4 has 0 rows of obs: []
"""

import numpy as np
from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
rank = comm.Get_rank()

squares = comm.gather((rank + 1) ** 2, root=0)  # a list on rank 0, None elsewhere
if rank == 0:
    print(f"rank 0 gathered {squares}")

# rank0rl: a dict of arrays, whose first axis counts rows. Ranks may have different numbers of rows.
# Rank 0 gets all rows, the others the same names with no rows. With `all_accum_batches`, all ranks
# get all rows.
d = rank0rl.rank0_accum_batches({"obs": np.full(rank + 1, rank), "rew": np.ones(rank + 1)})
print(f"rank {rank} has {len(d['obs'])} rows of obs: {d['obs']}")
