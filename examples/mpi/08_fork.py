"""Fork: a script that is run as any other starts itself again on n ranks.

    python examples/mpi/08_fork.py

Expected output, in any order:

    mpiexec: hello from rank 0 of 4
    mpiexec: hello from rank 1 of 4
    mpiexec: hello from rank 2 of 4
    mpiexec: hello from rank 3 of 4
    mpi_fork: hello from rank 0 of 4
    mpi_fork: hello from rank 1 of 4
    mpi_fork: hello from rank 2 of 4
    mpi_fork: hello from rank 3 of 4
    parent: the job has succeeded
"""

import os
import subprocess
import sys

from mpi4py import MPI  # before the fork: not needed there, but many scripts have it so

import rank0rl

hello = f"hello from rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}"

# By hand: mpiexec with this very command, and a mark by which its processes know not to do the same.
if "BY_HAND" in os.environ:
    print("mpiexec:", hello)
    sys.exit()
if MPI.COMM_WORLD.Get_size() == 1:
    again = ["mpiexec", "-n", "4", sys.executable, *sys.argv]
    subprocess.run(again, env={**os.environ, "BY_HAND": "yes"}, check=True)

# rank0rl: the same in a line. It finds the mpiexec that belongs to this Python, repeats Python's own
# options too, watches over the ranks, and ends all of them if one fails. It returns "parent" here,
# once the job has succeeded, and "child" on every rank.
if rank0rl.mpi_fork(4) == "parent":
    print("parent: the job has succeeded")
    sys.exit()
print("mpi_fork:", hello)
