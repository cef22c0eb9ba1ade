"""Spinning Up's `mpi_tools`, by name. Results keep the dtype that came in, where theirs are float32."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from rank0rl.mpi import comm, launch, reduce

_OPS = ("sum", "prod", "max", "min")
_TORCH = {"product": "prod", "avg": "mean"}  # names of torch.distributed.ReduceOp


def mpi_fork(n: int, bind_to_core: bool = False) -> None:
    """Run this command line again on n ranks, and end this process when they have ended.

    Returns in every rank; also with n <= 1, and in a job that a launcher started.

    Args:
        n: number of ranks.
        bind_to_core: keep every rank on a core of its own.

    Raises:
        SystemExit: in the original process, with the job's exit code, 0 after success.
    """
    if launch.mpi_fork(n, bind_to_core=bind_to_core) == "parent":
        sys.exit()


def msg(m: Any, string: str = "") -> None:
    """Print a message with the number of this rank."""
    print(f"Message from {comm.get_rank()}: {string} \t {m}")


def proc_id() -> int:
    """This process's number among the ranks, from 0."""
    return comm.get_rank()


def num_procs() -> int:
    """Number of ranks."""
    return comm.get_nworkers()


def allreduce(sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
    """Overwrite recvbuf with the sum over ranks of sendbuf, or with what `op` says.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Args:
        sendbuf: array, tensor, number or list of numbers; MPI.IN_PLACE for what is in recvbuf.
        recvbuf: array or tensor of the same dtype and as many numbers, contiguous or not.
        op: as in `mpi_op`.

    Raises:
        ValueError: the same on every rank, if the two do not fit, ranks come with different things,
            or op is not known.
    """
    if sendbuf is getattr(sys.modules.get("mpi4py.MPI"), "IN_PLACE", None):
        sendbuf = recvbuf
    name, problem = op_name(op), ""
    try:
        problem = _unfit(reduce.opened(sendbuf).array, recvbuf, name)
    except (TypeError, ValueError) as error:
        problem = str(error)
    result = reduce.reduce_many({"sendbuf": sendbuf}, name, "allreduce", problem=problem)["sendbuf"]
    _fill(recvbuf, reduce.opened(result).array.reshape(recvbuf.shape))


def broadcast(x: Any, root: int = 0) -> None:
    """Overwrite an array or tensor, in place, with the root's.

    Collective: every rank calls this, in the same order, with the same dtype, shape and root.

    Raises:
        ValueError: the same on every rank, if ranks come with different things, with something that
            cannot be overwritten, or if no rank has the root's number.
    """
    layout, problem = {"root": str(root)}, _not_writable(x)
    sent = np.empty(0)
    if not 0 <= root < comm.get_nworkers():
        problem = f"root must be a rank, 0 to {comm.get_nworkers() - 1}: got {root}"
    try:
        thing = reduce.opened(x)
        layout["x"], sent = thing.layout, np.ascontiguousarray(thing.array)
        if sent.dtype.hasobject:
            problem = problem or f"expected numbers or text: got dtype {sent.dtype}"
    except (TypeError, ValueError) as error:
        problem = problem or str(error)
    comm.check_layout(layout, "broadcast", problem, "dtypes, shapes and root")
    comm.bcast_(sent, root=root)
    if comm.get_rank() != root:
        _fill(x, sent.reshape(x.shape))


def mpi_op(x: Any, op: Any) -> Any:
    """The sum over ranks, or what `op` says, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        x: number, array, tensor, or list of numbers, which gives an array.
        op: "sum", "mean", "prod", "max", "min", or mpi4py's MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN.

    Returns:
        The same kind of thing, a number for a number, of the same dtype; integers are exact.

    Raises:
        ValueError: the same on every rank, if ranks come with different things, or op is not known.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    return reduce.all_reduce(x, op_name(op))


def mpi_sum(x: Any) -> Any:
    """The sum over ranks: see `mpi_op`.

    Collective: every rank calls this, in the same order.
    """
    return reduce.all_sum(x)


def mpi_avg(x: Any) -> Any:
    """The mean over ranks: see `mpi_op`. Of integers, in float64.

    Collective: every rank calls this, in the same order.
    """
    return reduce.all_mean(x)


def mpi_statistics_scalar(x: Any, with_min_and_max: bool = False) -> tuple[float, ...]:
    """Mean and standard deviation, and extremes if asked for, of the samples of all ranks.

    Collective: every rank calls this, in the same order.

    Args:
        x: samples, an array, tensor, list or number; as many as this rank has, none included.
        with_min_and_max: whether to return the extremes, too.

    Returns:
        mean, std[, min, max], in float64. The sum of squares is divided by the number of samples.

    Raises:
        ValueError: the same on every rank, if one comes with what are no real numbers.
    """
    s = reduce.statistics(x)
    return (s.mean, s.std, s.min, s.max) if with_min_and_max else (s.mean, s.std)


def op_name(op: Any) -> str:
    """What `stats` calls an operation of mpi4py or torch.distributed, or one that is named.

    An unknown one comes back as text, to be refused on all ranks at once.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")  # whose operations nobody has who has not loaded it
    if mpi is not None and isinstance(op, mpi.Op):
        known = (name for name in _OPS if op == getattr(mpi, name.upper()))
        return next(known, "another operation of mpi4py")
    name = str(getattr(op, "name", op)).lower()
    return _TORCH.get(name, name)


def _unfit(sent: Any, recvbuf: Any, op: str) -> str:
    """Why a result has no place in recvbuf; "" if it has."""
    problem = _not_writable(recvbuf)
    if problem:
        return f"recvbuf: {problem}"
    there = reduce.opened(recvbuf).array
    if (there.dtype, there.size) != (sent.dtype, sent.size):
        return (
            f"recvbuf must have the dtype and size of sendbuf: got {there.dtype}, {there.size} and "
            f"{sent.dtype}, {sent.size}"
        )
    if (op == "mean" and sent.dtype.kind in "biu") or (op == "sum" and sent.dtype.kind == "b"):
        return (
            f"recvbuf cannot hold the {op} of {sent.dtype}: use mpi_op, which gives another dtype"
        )
    return ""


def _not_writable(x: Any) -> str:
    torch = sys.modules.get("torch")
    if isinstance(x, np.ndarray):
        return "" if x.flags.writeable else "expected an array to write to: got a read-only one"
    if torch is not None and isinstance(x, torch.Tensor):
        return ""
    return f"expected an array or a tensor to write to: got {type(x).__name__}"


def _fill(x: Any, values: Any) -> None:
    """Overwrite an array, or a tensor whose history does not matter."""
    if isinstance(x, np.ndarray):
        x[...] = values
        return
    import torch

    with torch.no_grad():
        x.copy_(torch.from_numpy(values))
