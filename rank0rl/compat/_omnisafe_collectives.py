"""OmniSafe's collectives of tensors, with the arguments of torch.distributed. They write in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rank0rl.compat.mpi_tools import bcast_from, not_a_rank, op_name
from rank0rl.mpi import comm
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.errors import attempt
from rank0rl.mpi.reduce import gather_many, reduce_many
from rank0rl.mpi.weights import check_data


def all_reduce(tensor: Tensor, op: Any = "sum", group: None = None, async_op: bool = False) -> None:
    """Overwrite a tensor, in place, with its sum over ranks, or with another operation's result.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Args:
        tensor: tensor of any shape.
        op: ReduceOp.SUM, AVG, PRODUCT, MAX or MIN of torch.distributed, or one of their names.
        group: None, for all ranks.
        async_op: False. The function returns when its work is done.

    Raises:
        ValueError: the same on every rank, if dtypes, shapes or operations differ between ranks, or
            if the tensor cannot hold the result.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    reduce_tensor(tensor, op, "all_reduce", problem=_unsupported(group, async_op))


def reduce(
    tensor: Tensor, dst: int, op: Any = "sum", group: None = None, async_op: bool = False
) -> None:
    """Overwrite the tensor of rank `dst` with the sum over ranks. Other ranks keep theirs.

    Collective: every rank calls this, in the same order, with the same dtype, shape and dst.

    Args:
        tensor: tensor of any shape.
        dst: number of the rank that gets the result.
        op: operation, as in `all_reduce`.
        group: None, for all ranks.
        async_op: False. The function returns when its work is done.

    Raises:
        ValueError: in the same cases as `all_reduce`, and if dst is not a rank.
        OverflowError: in the same cases as `all_reduce`.
    """
    problem = _unsupported(group, async_op) or not_a_rank("dst", dst)
    check_layout({"dst": str(dst)}, "reduce", problem, "dst")
    reduce_tensor(tensor, op, "reduce", written=comm.get_rank() == dst)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: None = None, async_op: bool = False
) -> None:
    """Overwrite the tensors of a list, in place, with those of all ranks, in the order of ranks.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Args:
        tensor_list: one tensor for each rank, of the tensor's dtype and shape.
        tensor: what this rank gives.
        group: None, for all ranks.
        async_op: False. The function returns when its work is done.

    Raises:
        ValueError: the same on every rank, if dtypes or shapes differ between ranks, or if one
            rank's list does not fit.
    """
    problem = _unsupported(group, async_op)
    problem = problem or _unfit(tensor_list, "tensor_list", tensor, writable=True)
    _gather_into(tensor_list, tensor, "all_gather", problem)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: None = None,
    async_op: bool = False,
) -> None:
    """Overwrite the tensors of rank `dst`'s list, in place, with those of all ranks.

    Collective: every rank calls this, in the same order, with the same dtype, shape and dst.

    Args:
        tensor: what this rank gives.
        gather_list: on rank `dst`, one tensor for each rank, of the tensor's dtype and shape. None
            on the others.
        dst: number of the rank that gets the tensors.
        group: None, for all ranks.
        async_op: False. The function returns when its work is done.

    Raises:
        ValueError: in the same cases as `all_gather`, and if dst is not a rank.
    """
    problem = _unsupported(group, async_op) or not_a_rank("dst", dst)
    problem = problem or _unfit_on(dst, gather_list, "gather_list", tensor, writable=True)
    check_layout({"dst": str(dst)}, "gather", problem, "dst")
    _gather_into(gather_list or (), tensor, "gather", to_all=dst != 0)


def broadcast(tensor: Tensor, src: int, group: None = None, async_op: bool = False) -> None:
    """Overwrite a tensor, in place, with that of rank `src`.

    Collective: every rank calls this, in the same order, with the same dtype, shape and src.

    Args:
        tensor: tensor of any shape.
        src: number of the rank that gives its tensor.
        group: None, for all ranks.
        async_op: False. The function returns when its work is done.

    Raises:
        ValueError: the same on every rank, if dtypes, shapes or src differ between ranks, or if
            src is not a rank.
    """
    problem = _unsupported(group, async_op) or _not_writable(tensor)
    bcast_from(src, tensor, "broadcast", problem, "src")


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: None = None,
    async_op: bool = False,
) -> None:
    """Overwrite a tensor, in place, with the one for this rank in the list of rank `src`.

    Every rank receives the whole list, so that it needs memory for it.

    Collective: every rank calls this, in the same order, with the same dtype, shape and src.

    Args:
        tensor: tensor of any shape.
        scatter_list: on rank `src`, one tensor for each rank, of the tensor's dtype and shape. None
            on the others.
        src: number of the rank that gives its list.
        group: None, for all ranks.
        async_op: False. The function returns when its work is done.

    Raises:
        ValueError: in the same cases as `broadcast`, and if the list of rank src does not fit.
    """
    problem = _unsupported(group, async_op) or not_a_rank("src", src) or _not_writable(tensor)
    problem = problem or _unfit_on(src, scatter_list, "scatter_list", tensor)
    whole, wrong = torch.empty(0), ""
    if not problem and scatter_list:
        whole, wrong = attempt(lambda: torch.stack([t.detach() for t in scatter_list]), whole)
    elif not problem:
        whole = tensor.new_empty((comm.get_nworkers(), *tensor.shape))
    bcast_from(src, whole, "scatter", problem or wrong, "src")
    with torch.no_grad():
        tensor.copy_(whole[comm.get_rank()])


def reduce_tensor(
    tensor: Tensor, op: Any, what: str, problem: str = "", written: bool = True
) -> None:
    """Overwrite a tensor, in place, with the result of an operation over ranks, as `all_reduce` does.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Args:
        tensor: tensor of any shape.
        op: operation.
        what: name of the collective, for error messages.
        problem: what else is wrong on this rank; "" if nothing is.
        written: False to leave the tensor as it is on this rank.
    """
    op = op_name(op)
    problem = problem or _not_writable(tensor)
    if not problem and op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        problem = f"{tensor.dtype} cannot hold a mean: use dist_avg, which gives float64"
    if not problem and op == "sum" and tensor.dtype == torch.bool:
        problem = "torch.bool cannot hold a sum: use dist_sum, which gives integers"
    result = reduce_many({"tensor": tensor}, op, what, problem=problem)["tensor"]
    if written:
        with torch.no_grad():
            tensor.copy_(result)


def _gather_into(
    tensors: Sequence[Tensor], tensor: Tensor, what: str, problem: str = "", to_all: bool = True
) -> None:
    """Overwrite tensors, if there are any on this rank, with those of all ranks."""
    whole = gather_many({"tensor": tensor}, what, problem=problem, to_all=to_all)["tensor"]
    if tensors:
        with torch.no_grad():
            for into, given in zip(tensors, whole, strict=True):
                into.copy_(given)


def _unsupported(group: Any, async_op: bool) -> str:
    """Explain why these arguments of torch.distributed have no meaning here; return "" for the defaults."""
    if group is None and not async_op:
        return ""
    return (
        f"group must be None and async_op False, because all ranks take part and wait: got "
        f"group={group!r}, async_op={async_op!r}"
    )


def _not_writable(tensor: Any) -> str:
    """Explain why something cannot be overwritten as a tensor; return "" if it can."""
    if not isinstance(tensor, Tensor):
        return f"expected a tensor: got {type(tensor).__name__}"
    return attempt(lambda: check_data({"tensor": tensor}), None)[1]


def _unfit_on(rank: int, tensors: Any, name: str, tensor: Tensor, writable: bool = False) -> str:
    """Explain why a list, which one rank passes and the others do not, is wrong on this rank."""
    if comm.get_rank() == rank:
        return _unfit(tensors, name, tensor, writable)
    return f"{name} must be None on all ranks but {rank}: got a list" if tensors else ""


def _unfit(tensors: Any, name: str, tensor: Tensor, writable: bool = False) -> str:
    """Explain why something is not a list of tensors like this one, one for each rank; return "" if it is."""
    n = comm.get_nworkers()
    if not isinstance(tensors, list | tuple) or len(tensors) != n:
        got = len(tensors) if isinstance(tensors, list | tuple) else type(tensors).__name__
        return f"{name} must be a list of {n} tensors, one for each rank: got {got}"
    for i, each in enumerate(tensors):
        problem = _unlike(each, tensor) or (_not_writable(each) if writable else "")
        if problem:
            return f"{name}[{i}]: {problem}"
    return ""


def _unlike(tensor: Any, other: Any) -> str:
    """Explain why two things are not tensors of one dtype and shape; return "" if they are."""
    for each in (tensor, other):
        if not isinstance(each, Tensor):
            return f"expected a tensor: got {type(each).__name__}"
    if (tensor.dtype, tensor.shape) == (other.dtype, other.shape):
        return ""
    wanted, got = (f"{each.dtype} {tuple(each.shape)}" for each in (other, tensor))
    return f"expected the dtype and shape of the tensor, {wanted}: got {got}"
