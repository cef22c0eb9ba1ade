"""Hello: every process runs this same file. Only its rank differs from that of the others.

    mpiexec -n 5 python examples/mpi/01_hello.py

Expected output, in any order:

    hello from rank 0 of 5
    hello from rank 1 of 5
    hello from rank 2 of 5
    hello from rank 3 of 5
    hello from rank 4 of 5
    rank 0 speaks for all 5

Source: the idea and the number of ranks, as in all examples here, are from a tutorial on mpi4py in
Chinese, "SpinningUp(3)基于mpi4py的并行". Text and code are not.
"""

from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
print(f"hello from rank {comm.Get_rank()} of {comm.Get_size()}")

# rank0rl: `rank0rl.rank` and `rank0rl.nworkers` are the same two numbers. Without mpiexec they are
# 0 and 1, and no MPI is loaded. `print0` prints on rank 0 only.
assert (rank0rl.rank, rank0rl.nworkers) == (comm.Get_rank(), comm.Get_size())
rank0rl.print0(f"rank 0 speaks for all {rank0rl.nworkers}")
