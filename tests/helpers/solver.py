"""A parallel solver that talks by lines: sums a number over its ranks. Its first rank leaves a process that hides.

    python tests/helpers/solver.py [MARK]

MARK is in the command line of all its processes.
"""

import os
import subprocess
import sys
import time

from mpi4py import MPI

HIDDEN = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"

STREAMS = ("stdin", "stdout", "stderr")


def main():
    comm = MPI.COMM_WORLD
    if comm.rank == 0 and len(sys.argv) > 1:
        hidden = [sys.executable, "-S", "-c", HIDDEN, *sys.argv[1:]]
        subprocess.Popen(
            hidden, env={}, start_new_session=True, **dict.fromkeys(STREAMS, subprocess.DEVNULL)
        )
    while line := comm.bcast(sys.stdin.readline() if comm.rank == 0 else None):
        what, *number = line.split()
        last = comm.rank == comm.size - 1
        if what == "crash" and last:
            sys.stderr.write("on purpose\n")
            os._exit(3)
        if what == "hang" and last:
            time.sleep(600)
        total = comm.allreduce(float(number[0] if number else 0))
        if comm.rank == 0:
            print(total, flush=True)
    if what == "late":
        time.sleep(600)


main()
