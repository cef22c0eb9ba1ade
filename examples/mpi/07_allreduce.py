"""Allreduce: a reduce whose result every rank gets. Here, a mean of different numbers of returns.

    mpiexec -n 3 python examples/mpi/07_allreduce.py

Expected output, in any order:

    rank 0 has returns [10.], in all of them 120.0
    rank 1 has returns [20. 20.], in all of them 120.0
    rank 2 has returns [30. 20. 20.], in all of them 120.0
    mean of the 6 returns: 20.000
    mean of the 3 ranks' means, which is something else: 17.778
"""

import numpy as np
from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
returns = np.array([[10.0], [20.0, 20.0], [30.0, 20.0, 20.0]][rank])  # of this rank's episodes

total = comm.allreduce(returns.sum(), op=MPI.SUM)
print(f"rank {rank} has returns {returns}, in all of them {total}")

# rank0rl: `all_sum` takes numbers, lists, arrays and tensors. A mean over ranks is a sum divided by
# a count. `all_mean` counts every rank the same: use it where all ranks have equally many numbers.
total, count = rank0rl.all_sum([returns.sum(), len(returns)])
rank0rl.print0(f"mean of the {count:.0f} returns: {total / count:.3f}")
mean = rank0rl.all_mean(returns.mean())
rank0rl.print0(f"mean of the {rank0rl.nworkers} ranks' means, which is something else: {mean:.3f}")
