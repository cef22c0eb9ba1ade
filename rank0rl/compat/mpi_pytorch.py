"""Spinning Up's `mpi_pytorch`: every rank has a copy of a module, and gradients are averaged."""

from __future__ import annotations

import os
import platform

from torch import nn

from rank0rl.compat.average import all_avg_grads
from rank0rl.mpi import comm
from rank0rl.mpi.threads import set_threads
from rank0rl.mpi.weights import rank0_bcast_wts


def setup_pytorch_for_mpi() -> None:
    """Limit torch and BLAS to this rank's share of its host's cores. The number of threads never grows.

    Collective: every rank calls this, in the same order.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    mine = platform.node(), affinity(0) if affinity else set(range(os.cpu_count() or 1))
    ranks = comm.allgather_obj(mine, "setup_pytorch_for_mpi")
    sharing = [cores for host, cores in ranks if host == mine[0] and cores & mine[1]]
    fair = max(1, len(mine[1]) // len(sharing))
    set_threads(fair, raises=False)


def mpi_avg_grads(module: nn.Module) -> None:
    """Overwrite the gradients of a module, in place, with their mean over ranks; see `all_avg_grads`.

    Collective: every rank calls this, in the same order.
    """
    all_avg_grads(module)


def sync_params(module: nn.Module) -> None:
    """Overwrite a module's parameters and buffers, in place, with those of rank 0; see `rank0_bcast_wts`.

    Collective: every rank calls this, in the same order.
    """
    rank0_bcast_wts(module)
