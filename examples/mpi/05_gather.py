"""Gather: what every rank has, one rank gets, in the order of ranks.

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

# rank0rl: a dict of arrays, rows first, as many as a rank happens to have. They are put together on
# rank 0; the others get the same names with no rows. `all_accum_batches` gives all rows to all.
d = rank0rl.rank0_accum_batches({"obs": np.full(rank + 1, rank), "rew": np.ones(rank + 1)})
print(f"rank {rank} has {len(d['obs'])} rows of obs: {d['obs']}")
