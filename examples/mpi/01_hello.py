"""Hello: every process runs this same file, and differs from the others in its rank alone.

    mpiexec -n 5 python examples/mpi/01_hello.py

Expected output, in any order:

    hello from rank 0 of 5
    hello from rank 1 of 5
    hello from rank 2 of 5
    hello from rank 3 of 5
    hello from rank 4 of 5
    rank 0 speaks for all 5

Source: the idea and the number of ranks, as in all examples here, are those of a tutorial on mpi4py
in Chinese, "SpinningUp(3)基于mpi4py的并行"; text and code are not.
"""

from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
print(f"hello from rank {comm.Get_rank()} of {comm.Get_size()}")

# rank0rl: the same two numbers, `rank0rl.rank` and `rank0rl.nworkers`. Without mpiexec they are 0
# and 1, and no MPI is loaded. What should be said once is said by rank 0.
assert (rank0rl.rank, rank0rl.nworkers) == (comm.Get_rank(), comm.Get_size())
rank0rl.print0(f"rank 0 speaks for all {rank0rl.nworkers}")
