"""OmniSafe's distributed tools, by name. Results keep the dtype that came in, where theirs are float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.compat.mpi_pytorch import setup_pytorch_for_mpi as setup_distributed
from rank0rl.compat.mpi_pytorch import sync_params
from rank0rl.compat.mpi_tools import op_name
from rank0rl.mpi import average, comm, launch, reduce

__all__ = [
    "avg_grads",
    "avg_params",
    "avg_tensor",
    "dist_avg",
    "dist_max",
    "dist_min",
    "dist_op",
    "dist_statistics_scalar",
    "dist_sum",
    "fork",
    "get_rank",
    "is_master",
    "setup_distributed",
    "sync_params",
    "world_size",
]


def get_rank() -> int:
    """This process's number among the ranks, from 0."""
    return comm.get_rank()


def is_master() -> bool:
    """Whether this is rank 0."""
    return comm.get_rank() == 0


def world_size() -> int:
    """Number of ranks."""
    return comm.get_nworkers()


def fork(
    parallel: int,
    bind_to_core: bool = False,
    use_number_of_threads: bool = False,
    device: str = "cpu",
    manual_args: Sequence[str] | None = None,
) -> bool:
    """Run this command line again on several ranks.

    A script calls it once, early: ``if fork(n): sys.exit()``.

    Args:
        parallel: number of ranks. With 1 or less nothing is started.
        bind_to_core: keep every rank on a core of its own.
        use_number_of_threads: count hardware threads as cores. Only Open MPI makes a difference.
        device: torch's name of one. MPI takes arrays through main memory on all of them, so that it
            decides nothing; `rank0rl.tf_config` is the GPU of each rank.
        manual_args: what Python is given on the ranks, a script (or "-m" and a module) and its
            arguments, in place of what it was given here. That script has to call `fork`, too.

    Returns:
        True in the original process, after the job has succeeded; False in every rank, also with
        parallel <= 1, and in a job that a launcher started.

    Raises:
        SystemExit: in the original process, with the job's exit code, when the job failed.
        RuntimeError: if torch knows no such device.
    """
    torch.device(device)
    done = launch.mpi_fork(
        parallel, bind_to_core=bind_to_core, hwthreads=use_number_of_threads, args=manual_args
    )
    return done == "parent"


@torch.no_grad()
def avg_tensor(value: Tensor) -> None:
    """Overwrite a tensor, in place, with its mean over ranks; one without axes as well.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Raises:
        ValueError: the same on every rank, if ranks come with different things, or with what is no
            tensor of real or complex numbers.
    """
    problem = ""
    if not isinstance(value, Tensor):
        problem = f"expected a tensor: got {type(value).__name__}"
    elif not (value.is_floating_point() or value.is_complex()):
        problem = f"{value.dtype} cannot hold a mean: use dist_avg, which gives float64"
    mean = reduce.reduce_many({"value": value}, "mean", "avg_tensor", problem=problem)["value"]
    value.copy_(mean)


def avg_grads(module: nn.Module | Tensor) -> None:
    """Overwrite the gradients of a module, or of one tensor, in place, with their mean over ranks.

    Where some ranks have a gradient and others have none, that of the others counts as 0.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, or a gradient is sparse or holds no data.
    """
    average.all_avg_grads(module)


def avg_params(module: nn.Module) -> None:
    """Overwrite parameters and buffers, in place, with their mean over ranks; counters with rank 0's.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, or a tensor is sparse or holds no data.
    """
    average.all_avg_wts(module)


def dist_avg(value: Any) -> Tensor:
    """The mean over ranks: see `dist_op`. Of integers, in float64.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "mean")


def dist_sum(value: Any) -> Tensor:
    """The sum over ranks: see `dist_op`.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "sum")


def dist_max(value: Any) -> Tensor:
    """The largest over ranks, element by element: see `dist_op`.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "max")


def dist_min(value: Any) -> Tensor:
    """The smallest over ranks, element by element: see `dist_op`.

    Collective: every rank calls this, in the same order.
    """
    return dist_op(value, "min")


def dist_op(value: Any, operation: Any) -> Tensor:
    """An operation over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        value: tensor, array, number, or list of numbers.
        operation: ReduceOp.SUM, AVG, PRODUCT, MAX or MIN of torch.distributed; their names; or
            mpi4py's MPI.SUM, PROD, MAX or MIN.

    Returns:
        Tensor of the shape, dtype and device that came in; Python's numbers have 64 bits.

    Raises:
        ValueError: the same on every rank, if ranks come with different things, or the operation is
            not known.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    result = reduce.all_reduce(value, op_name(operation))
    return result if isinstance(result, Tensor) else torch.from_numpy(np.array(result))


def dist_statistics_scalar(value: Any, with_min_and_max: bool = False) -> tuple[Tensor, ...]:
    """Mean and standard deviation, and extremes if asked for, of the samples of all ranks.

    Collective: every rank calls this, in the same order.

    Args:
        value: samples, a tensor, array, list or number; as many as this rank has, none included.
        with_min_and_max: whether to return the extremes, too.

    Returns:
        (mean, std[, min, max]), without axes, of the dtype and device of a tensor of real numbers,
        else in float64. The sum of squares is divided by the number of samples.

    Raises:
        ValueError: the same on every rank, if one comes with what are no real numbers.
    """
    s = reduce.statistics(value)
    real = isinstance(value, Tensor) and value.is_floating_point()
    kind = {"dtype": value.dtype, "device": value.device} if real else {"dtype": torch.float64}
    found = (s.mean, s.std, s.min, s.max) if with_min_and_max else (s.mean, s.std)
    return tuple(torch.tensor(number, **kind) for number in found)
