"""Broadcast: all ranks get what one rank has.

    mpiexec -n 10 python examples/mpi/03_broadcast.py

Expected output, in any order:

    rank 0 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 1 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 2 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 3 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 4 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 5 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 6 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 7 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 8 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
    rank 9 has 100 and [0.  0.5 1. ], by rank0rl [0.  0.5 1. ]
"""

import numpy as np
from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
weights = np.array([0.0, 0.5, 1.0])  # rank 0 sends these to the others

# bcast sends any object, pickled. Bcast sends a buffer, and every rank must have made one.
number = comm.bcast(100 if rank == 0 else None, root=0)
buffer = weights.copy() if rank == 0 else np.empty(3)
comm.Bcast(buffer, root=0)

# rank0rl: `bcast` sends an array of rank 0. The others do not have to know its shape.
# `rank0_bcast_wts` sends all weights of a torch module, in place: see examples/08_script_ranks.py.
ours = rank0rl.bcast(weights if rank == 0 else None)
print(f"rank {rank} has {number} and {buffer}, by rank0rl {ours}")
