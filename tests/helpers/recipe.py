"""The recipe of eight steps, as a script of one's own would have it."""

import argparse
import sys

import rank0rl

parser = argparse.ArgumentParser()
parser.add_argument("--nprocs", type=int, default=1)
parser.add_argument("--end", default="well")
parser.add_argument("--text", default="")
args = parser.parse_args()

loaded = {"numpy", "torch", "mpi4py"} & set(sys.modules)
try:
    where = rank0rl.mpi_fork(args.nprocs)
except SystemExit as end:
    print("job failed with", end.code)
    raise
if where == "parent":
    print("parent", sorted(loaded), sorted({"numpy", "torch", "mpi4py"} & set(sys.modules)))
    sys.exit()

import numpy as np
import torch

rank0rl.set_global_seeds(3)
net = torch.nn.Linear(2, 1)
d = rank0rl.rank0_accum_batches({"obs": np.full((2, 2), rank0rl.rank, np.float32)})
obs = d["obs"]
if args.end == "raise" and rank0rl.rank == 1:
    raise KeyError("on purpose")
if args.end == "hang" and rank0rl.rank == 1:
    import time

    time.sleep(600)
if rank0rl.rank == 0:
    with torch.no_grad():
        net.weight.fill_(float(obs.sum()))
rank0rl.rank0_bcast_wts(net, label="net")
weights = rank0rl.rank0_accum_batches({"w": net.weight.detach().numpy()})["w"]
rank0rl.print0("rows", len(obs), "weights", sorted(set(weights.ravel().tolist())), repr(args.text))
if args.end == "code":
    sys.exit(3)
