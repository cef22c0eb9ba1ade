"""Reduce: the arrays of all ranks become one on rank 0, element by element: a sum, a maximum, ...

    mpiexec -n 3 python examples/mpi/06_reduce.py

Expected output, in any order:

    rank 0 sends [0 1 2]
    rank 1 sends [0 2 4]
    rank 2 sends [0 3 6]
    rank 0 has the sum [ 0  6 12] and the maximum [0 3 6]
    rank 1 has the sum [0 0 0] and the maximum [0 0 0]
    rank 2 has the sum [0 0 0] and the maximum [0 0 0]
    by rank0rl rank 0 has [ 0  6 12]
    by rank0rl rank 1 has [ 0  6 12]
    by rank0rl rank 2 has [ 0  6 12]
"""

import numpy as np
from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
mine = (rank + 1) * np.arange(3, dtype=np.int64)
print(f"rank {rank} sends {mine}")

# Both buffers must have the same dtype and shape. Only the root's is written to. The others keep
# what they had, here zeros, without any warning.
total, most = np.zeros(3, np.int64), np.zeros(3, np.int64)
comm.Reduce(mine, total, op=MPI.SUM, root=0)
comm.Reduce(mine, most, op=MPI.MAX, root=0)
print(f"rank {rank} has the sum {total} and the maximum {most}")

# rank0rl: all ranks get the sum, so none is left with zeros. Different dtypes or shapes raise an
# error.
print(f"by rank0rl rank {rank} has {rank0rl.all_sum(mine)}")
