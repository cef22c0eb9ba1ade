"""OmniSafe's distributed tools. Results keep the dtype of what came in, but for means of integers; the original's are float32.

The collectives of tensors, from `all_reduce` to `scatter`, have the arguments of torch.distributed and
write in place. `group` must be None and `async_op` False: all ranks take part, and each call returns
when its work is done. Tensors have any shape, the same on every rank, and one dtype. `op` is ReduceOp.SUM,
AVG, PRODUCT, MAX or MIN of torch.distributed, or one of their names; `dst` and `src` are numbers of ranks.
Whatever is wrong, or differs between ranks, is the same ValueError on every rank. An integer result
that does not fit its dtype is an OverflowError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.compat import mpi_pytorch
from rank0rl.compat.average import all_avg_wts
from rank0rl.compat.mpi_tools import (
    _bcast_from,
    _not_a_rank,
    _not_writable,
    _reduce_into,
    mpi_op,
    mpi_statistics_scalar,
)
from rank0rl.launch import fork as launch
from rank0rl.mpi import comm
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.gather import gather_many
from rank0rl.mpi.world import attempt

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

get_rank, world_size = comm.get_rank, comm.get_nworkers
setup_distributed = mpi_pytorch.setup_pytorch_for_mpi
avg_grads, sync_params = mpi_pytorch.mpi_avg_grads, mpi_pytorch.sync_params


def is_master() -> bool:
    """Return True on rank 0."""
    return comm.get_rank() == 0


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
        use_number_of_threads: True to count hardware threads as cores, on Open MPI.
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


def all_reduce(tensor: Tensor, op: Any = "sum", group: None = None, async_op: bool = False) -> None:
    """Overwrite a tensor, in place, with its sum over ranks, or with another operation's result.

    Collective: every rank calls this, in the same order.
    """
    _reduce_into(tensor, tensor, op, "all_reduce", _unsupported(tensor, group, async_op))


def reduce(
    tensor: Tensor, dst: int, op: Any = "sum", group: None = None, async_op: bool = False
) -> None:
    """Overwrite the tensor of rank `dst` with the sum over ranks. Other ranks keep theirs.

    Collective: every rank calls this, in the same order.
    """
    problem = _unsupported(tensor, group, async_op) or _not_a_rank("dst", dst)
    check_layout({"dst": "" if problem else str(dst)}, "reduce", problem, "dst")
    _reduce_into(tensor, tensor, op, "reduce", written=comm.get_rank() == dst)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: None = None, async_op: bool = False
) -> None:
    """Overwrite the tensors of a list, in place, with those of all ranks, in the order of ranks.

    Collective: every rank calls this, in the same order.
    """
    problem = _unsupported(tensor, group, async_op)
    problem = problem or _unfit("tensor_list", tensor_list, tensor, writable=True)
    _gather_into(tensor_list, tensor, "all_gather", problem)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: None = None,
    async_op: bool = False,
) -> None:
    """Overwrite the tensors of rank `dst`'s list, in place, with those of all ranks.

    Collective: every rank calls this, in the same order. The list is None on the other ranks.
    """
    problem = _unsupported(tensor, group, async_op) or _not_a_rank("dst", dst)
    problem = problem or _unfit_on(dst, "gather_list", gather_list, tensor, writable=True)
    check_layout({"dst": "" if problem else str(dst)}, "gather", problem, "dst")
    _gather_into(gather_list or (), tensor, "gather", to_all=dst != 0)


def broadcast(tensor: Tensor, src: int, group: None = None, async_op: bool = False) -> None:
    """Overwrite a tensor, in place, with that of rank `src`.

    Collective: every rank calls this, in the same order.
    """
    _bcast_from(src, tensor, "broadcast", _unsupported(tensor, group, async_op), "src")


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: None = None,
    async_op: bool = False,
) -> None:
    """Overwrite a tensor, in place, with the one for this rank in the list of rank `src`.

    Every rank receives the whole list, so that it needs memory for it.

    Collective: every rank calls this, in the same order. The list is None on the other ranks.
    """
    problem = _unsupported(tensor, group, async_op) or _not_a_rank("src", src)
    problem = problem or _not_writable(tensor)
    problem = problem or _unfit_on(src, "scatter_list", scatter_list, tensor)
    whole = torch.empty(0)
    if not problem and scatter_list:
        whole, problem = attempt(lambda: torch.stack([t.detach() for t in scatter_list]), whole)
    elif not problem:
        whole = tensor.new_empty((comm.get_nworkers(), *tensor.shape))
    _bcast_from(src, whole, "scatter", problem, "src")
    with torch.no_grad():
        tensor.copy_(whole[comm.get_rank()])


def avg_params(module: nn.Module) -> None:
    """Overwrite parameters and buffers, in place, with their mean over ranks; see `all_avg_wts`.

    Collective: every rank calls this, in the same order.
    """
    all_avg_wts(module)


def avg_tensor(value: Tensor) -> None:
    """Overwrite a tensor of real or complex numbers with its mean over ranks. Wrong use is as in `all_reduce`.

    Collective: every rank calls this, in the same order.
    """
    _reduce_into(value, value, "mean", "avg_tensor", _unsupported(value))


def dist_op(value: Any, operation: Any) -> Tensor:
    """Return the result of an operation over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        value: tensor, array, number or list of numbers.
        operation: ReduceOp.SUM, AVG, PRODUCT, MAX or MIN of torch.distributed; one of their names;
            or mpi4py's MPI.SUM, PROD, MAX or MIN.

    Returns:
        Tensor of the same shape, dtype and device as the value. Python's numbers become 64-bit
        tensors, and so does the mean of integers.

    Raises:
        ValueError: the same on every rank, if the value's kind, dtype or shape differs between
            ranks, or if the operation is unknown.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    result = mpi_op(value, operation)
    return result if isinstance(result, Tensor) else torch.from_numpy(np.array(result))


def dist_avg(value: Any) -> Tensor:
    """Return the mean over ranks. Collective: as `dist_op`."""
    return dist_op(value, "mean")


def dist_sum(value: Any) -> Tensor:
    """Return the sum over ranks. Collective: as `dist_op`."""
    return dist_op(value, "sum")


def dist_max(value: Any) -> Tensor:
    """Return the largest value over ranks, element by element. Collective: as `dist_op`."""
    return dist_op(value, "max")


def dist_min(value: Any) -> Tensor:
    """Return the smallest value over ranks, element by element. Collective: as `dist_op`."""
    return dist_op(value, "min")


def dist_statistics_scalar(value: Any, with_min_and_max: bool = False) -> tuple[Tensor, ...]:
    """Return what `mpi_statistics_scalar` returns as tensors of shape ().

    They have the dtype and device of the value if it is a tensor of real numbers, else float64. Every
    element is a sample. OmniSafe divides by len(value), the number of rows, which gives other results
    for a 2-D value.

    Collective: every rank calls this, in the same order.
    """
    real = isinstance(value, Tensor) and value.is_floating_point()
    kind = {"dtype": value.dtype, "device": value.device} if real else {"dtype": torch.float64}
    found = mpi_statistics_scalar(value, with_min_and_max)
    return tuple(torch.tensor(number, **kind) for number in found)


def _gather_into(
    tensors: Sequence[Tensor], tensor: Tensor, what: str, problem: str = "", to_all: bool = True
) -> None:
    """Overwrite tensors, if there are any on this rank, with those of all ranks."""
    whole = gather_many({"tensor": tensor}, what, problem=problem, to_all=to_all)["tensor"]
    if tensors:
        with torch.no_grad():
            for into, given in zip(tensors, whole, strict=True):
                into.copy_(given)


def _unsupported(tensor: Any, group: Any = None, async_op: bool = False) -> str:
    """Explain why arguments of torch.distributed have no meaning here; return "" if they have."""
    if not isinstance(tensor, Tensor):
        return f"expected a tensor: got {type(tensor).__name__}"
    if group is None and not async_op:
        return ""
    return (
        f"group must be None and async_op False, because all ranks take part and wait: got "
        f"group={group!r}, async_op={async_op!r}"
    )


def _unfit_on(rank: int, name: str, tensors: Any, like: Tensor, writable: bool = False) -> str:
    """Explain why a list, which one rank passes and the others do not, is wrong on this rank."""
    if comm.get_rank() == rank:
        return _unfit(name, tensors, like, writable)
    return f"{name} must be None on all ranks but {rank}: got a list" if tensors else ""


def _unfit(name: str, tensors: Any, like: Tensor, writable: bool = False) -> str:
    """Explain why something is not a list of tensors like this one, one for each rank; return "" if it is."""
    n = comm.get_nworkers()
    if not isinstance(tensors, list | tuple) or len(tensors) != n:
        got = len(tensors) if isinstance(tensors, list | tuple) else type(tensors).__name__
        return f"{name} must be a list of {n} tensors, one for each rank: got {got}"
    wanted = f"{like.dtype} {tuple(like.shape)}"
    for i, each in enumerate(tensors):
        is_tensor = isinstance(each, Tensor)
        got = f"{each.dtype} {tuple(each.shape)}" if is_tensor else type(each).__name__
        if got != wanted:
            return f"{name}[{i}] must have the dtype and shape of the tensor, {wanted}: got {got}"
        if writable and (problem := _not_writable(each)):
            return f"{name}[{i}]: {problem}"
    return ""
