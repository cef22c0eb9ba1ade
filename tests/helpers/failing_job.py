"""A loop without torch, whose ranks start fast, with a fault at a given place.

python failing_job.py NPROCS FAULT PLACE [RANK]
"""

import os
import signal
import sys
import time

import rank0rl.mpi.comm

NPROCS, FAULT, PLACE, *RANK = sys.argv[1:]
if rank0rl.mpi_fork(int(NPROCS)) == "parent":
    sys.exit()


def fault(place):
    """Fail at the place that the command line names; in the loop, only in the fourth iteration."""
    if place != PLACE or iteration not in (0, 4) or (RANK and rank0rl.rank != int(RANK[0])):
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


iteration = 0
fault("import")

import numpy as np
from helpers import envs

from rank0rl import batch as batches
from rank0rl.envs.block import make_block
from rank0rl.rollout import FixedSteps


class Env(envs.Count):
    def __init__(self):
        fault("constructor")
        super().__init__(length=2)

    def reset(self, **kwargs):
        fault("reset")
        return super().reset(**kwargs)

    def step(self, action):
        fault("step")
        return super().step(action)


class Agent(envs.NoiseAgent):
    def act(self, step):
        fault("act")
        return super().act(step)

    def process(self, fragment):
        fault("process")
        return super().process(fragment)


rollout = FixedSteps(
    make_block(lambda _: Env(), range(rank0rl.rank, rank0rl.rank + 1), seed=0), steps=5
)
agent = Agent(rollout.spaces)
for iteration in range(1, 7):
    fragments, _ = rollout.collect(agent, iteration)
    rows = batches.concatenate([agent.process(fragment) for fragment in fragments])
    fault("between")
    if not (FAULT == "skip" and iteration == 4 and rank0rl.rank == int(RANK[0])):
        rows = rank0rl.rank0_accum_batches(rows)
    if rank0rl.rank == 0:
        fault("update")
        time.sleep(0.01)
    weights = rank0rl.mpi.comm.bcast(np.full(4, iteration + rank0rl.rank))
iteration = 0
fault("end")
rank0rl.print0("well", len(rows["obs"]))
