"""A loop on NumPy alone, whose ranks start in a tenth of a second, with a fault where it is asked for.

python faulty.py NPROCS FAULT PLACE [RANK]
"""

import os
import signal
import sys
import time

import rank0rl.comm

NPROCS, FAULT, PLACE, *RANK = sys.argv[1:]
if rank0rl.mpi_fork(int(NPROCS)) == "parent":
    sys.exit()

import numpy as np


def fault(place, turn=3):
    if place != PLACE or turn != 3 or (RANK and rank0rl.rank != int(RANK[0])):
        return
    match FAULT:
        case "raise":
            raise ZeroDivisionError("on purpose")
        case "sys.exit(3)":
            sys.exit(3)
        case "os._exit(3)":
            os._exit(3)
        case "os._exit(0)":
            os._exit(0)
        case "sys.exit(0)":
            sys.exit(0)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "skip":
            pass


fault("begin")
for turn in range(6):
    fault("rollout", turn)
    rows = {"x": np.full((3, 2), rank0rl.rank, np.float32)}
    if not (FAULT == "skip" and turn == 3 and rank0rl.rank == int(RANK[0])):
        rows = rank0rl.rank0_accum_batches(rows)
    if rank0rl.rank == 0:
        fault("update", turn)
        time.sleep(0.01)
    weights = rank0rl.comm.bcast(np.full(4, turn + rank0rl.rank))
fault("end")
rank0rl.print0("well", len(rows["x"]))
