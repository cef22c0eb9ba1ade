"""Spinning Up's `mpi_pytorch`: every rank has a copy of a module, and gradients are averaged."""

from __future__ import annotations

import os
import platform

import torch

from rank0rl.compat.average import all_avg_grads as mpi_avg_grads
from rank0rl.mpi import comm
from rank0rl.mpi.threads import set_threads
from rank0rl.mpi.weights import rank0_bcast_wts as sync_params

__all__ = ["mpi_avg_grads", "setup_pytorch_for_mpi", "sync_params"]


def setup_pytorch_for_mpi() -> None:
    """Limit torch and BLAS to this rank's share of its host's cores. The number of threads never grows.

    Collective: every rank calls this, in the same order.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    fair = max(1, cores // comm.hosts().count(platform.node()))
    set_threads(min(fair, torch.get_num_threads()))
