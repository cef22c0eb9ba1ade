"""OmniSafe's distributed tools. Results keep the dtype of what came in; the original's are float32."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.compat import average
from rank0rl.compat._omnisafe_collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    reduce,
    reduce_tensor,
    scatter,
)
from rank0rl.compat.average import statistics
from rank0rl.compat.mpi_pytorch import setup_pytorch_for_mpi as setup_distributed
from rank0rl.compat.mpi_pytorch import sync_params
from rank0rl.compat.mpi_tools import op_name
from rank0rl.launch import fork as launch
from rank0rl.mpi import comm
from rank0rl.mpi.reduce import all_reduce as reduce_any

__all__ = [
    "all_gather",
    "all_reduce",
    "avg_grads",
    "avg_params",
    "avg_tensor",
    "broadcast",
    "dist_avg",
    "dist_max",
    "dist_min",
    "dist_op",
    "dist_statistics_scalar",
    "dist_sum",
    "fork",
    "gather",
    "get_rank",
    "is_master",
    "reduce",
    "scatter",
    "setup_distributed",
    "sync_params",
    "world_size",
]


def get_rank() -> int:
    """Return the number of this rank, from 0."""
    return comm.get_rank()


def is_master() -> bool:
    """Return True on rank 0."""
    return comm.get_rank() == 0


def world_size() -> int:
    """Return the number of ranks."""
    return comm.get_nworkers()


def fork(
    parallel: int,
    bind_to_core: bool | str = False,
    use_number_of_threads: Any = False,
    device: str = "cpu",
    manual_args: Sequence[str] | None = None,
) -> bool:
    """Run this command line again on several ranks.

    A script calls it once, early: ``if fork(n): sys.exit()``. Some versions of OmniSafe have the
    arguments (parallel, device, manual_args) instead. They work too: a text in second place is the
    device.

    If there are several ranks, they get the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Nothing listens on that port.

    Collective: every rank calls this, in the same order.

    Args:
        parallel: number of ranks. With 1 or less, nothing is started.
        bind_to_core: True to bind every rank to one core.
        use_number_of_threads: True to count hardware threads as cores. It has an effect on Open MPI
            only.
        device: torch's name of a device. It is only checked: MPI sends the arrays of every device
            through main memory. `rank0rl.tf_config` is the GPU of each rank.
        manual_args: arguments of Python on the ranks, in place of those of this process: a script
            (or "-m" and a module) and its arguments. That script must call `fork` too.

    Returns:
        True in the original process, after the job has succeeded. False in every rank, with
        parallel <= 1, and in a job that a launcher started.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed.
        RuntimeError: if torch does not know the device.
    """
    if isinstance(bind_to_core, str):  # (parallel, device, manual_args)
        device, manual_args = bind_to_core, use_number_of_threads or manual_args
        bind_to_core = use_number_of_threads = False
    torch.device(device)
    done = launch.mpi_fork(
        parallel, bind_to_core=bind_to_core, hwthreads=use_number_of_threads, args=manual_args
    )
    if comm.get_nworkers() > 1:
        _set_variables_of_torchrun()
    return done == "parent"


def _set_variables_of_torchrun() -> None:
    """Set the variables that torchrun sets for its ranks. The user's MASTER_ADDR and MASTER_PORT stay."""
    hosts, rank = comm.hosts(), comm.get_rank()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(hosts)),
        LOCAL_RANK=str(hosts[:rank].count(hosts[rank])),
        LOCAL_WORLD_SIZE=str(hosts.count(hosts[rank])),
    )
    os.environ.setdefault("MASTER_ADDR", hosts[0])
    os.environ.setdefault("MASTER_PORT", "29500")  # torch.distributed's default


def avg_tensor(value: Tensor) -> None:
    """Overwrite a tensor of any shape, in place, with its mean over ranks.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Raises:
        ValueError: the same on every rank, if dtypes or shapes differ between ranks, or if the
            value is not a tensor of real or complex numbers.
    """
    reduce_tensor(value, "mean", "avg_tensor")


def avg_grads(module: nn.Module | Tensor) -> None:
    """Overwrite the gradients of a module, or of one tensor, in place, with their mean over ranks.

    If only some ranks have a gradient of a parameter, it counts as 0 on the others.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, or a gradient is sparse or holds no data.
    """
    average.all_avg_grads(module)


def avg_params(module: nn.Module) -> None:
    """Overwrite parameters and buffers, in place, with their mean over ranks.

    Buffers that cannot hold a mean, such as counters, are overwritten with those of rank 0.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, or a tensor is sparse or holds no data.
    """
    average.all_avg_wts(module)


def dist_avg(value: Any) -> Tensor:
    """Return the mean over ranks, as `dist_op` does. The mean of integers is float64.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "mean")


def dist_sum(value: Any) -> Tensor:
    """Return the sum over ranks, as `dist_op` does.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "sum")


def dist_max(value: Any) -> Tensor:
    """Return the largest values over ranks, element by element, as `dist_op` does.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "max")


def dist_min(value: Any) -> Tensor:
    """Return the smallest values over ranks, element by element, as `dist_op` does.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "min")


def dist_op(value: Any, operation: Any) -> Tensor:
    """Return the result of an operation over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        value: tensor, array, number or list of numbers.
        operation: ReduceOp.SUM, AVG, PRODUCT, MAX or MIN of torch.distributed; one of their names;
            or mpi4py's MPI.SUM, PROD, MAX or MIN.

    Returns:
        Tensor of the same shape, dtype and device as the value. Python's numbers become 64-bit
        tensors.

    Raises:
        ValueError: the same on every rank, if the value's kind, dtype or shape differs between
            ranks, or if the operation is unknown.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    result = reduce_any(value, op_name(operation))
    return result if isinstance(result, Tensor) else torch.from_numpy(np.array(result))


def dist_statistics_scalar(value: Any, with_min_and_max: bool = False) -> tuple[Tensor, ...]:
    """Return mean and standard deviation, and optionally the extremes, of the samples of all ranks.

    Collective: every rank calls this, in the same order.

    Args:
        value: this rank's samples, as a tensor, array, list or number. Ranks may have different
            numbers of samples, or none.
        with_min_and_max: True to return the extremes too.

    Returns:
        (mean, std[, min, max]), tensors of shape (). They have the dtype and device of the value if
        it is a tensor of real numbers, else float64. Every element is a sample: mean and std divide
        by the number of elements. OmniSafe divides by len(value), the number of rows, which gives
        other results for a 2-D value.

    Raises:
        ValueError: the same on every rank, if one rank's samples are not real numbers.
    """
    s = statistics(value)
    real = isinstance(value, Tensor) and value.is_floating_point()
    kind = {"dtype": value.dtype, "device": value.device} if real else {"dtype": torch.float64}
    found = (s.mean, s.std, s.min, s.max) if with_min_and_max else (s.mean, s.std)
    return tuple(torch.tensor(number, **kind) for number in found)
