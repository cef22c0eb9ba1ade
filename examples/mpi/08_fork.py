"""Fork: a script that you start as usual runs itself again on n ranks.

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

from mpi4py import MPI  # many scripts import it before the fork; that works

import rank0rl

hello = f"hello from rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}"

# By hand: mpiexec with this very command, and a mark that tells its processes not to do the same.
if "BY_HAND" in os.environ:
    print("mpiexec:", hello)
    sys.exit()
if MPI.COMM_WORLD.Get_size() == 1:
    again = ["mpiexec", "-n", "4", sys.executable, *sys.argv]
    subprocess.run(again, env={**os.environ, "BY_HAND": "yes"}, check=True)

# rank0rl: the same in one line. `mpi_fork` finds the mpiexec that belongs to this Python, repeats
# Python's own options too, and ends all ranks if one fails. It returns "parent" here, once the job
# has succeeded, and "child" on every rank.
if rank0rl.mpi_fork(4) == "parent":
    print("parent: the job has succeeded")
    sys.exit()
print("mpi_fork:", hello)
