"""Spinning Up's `mpi_tools`. Results keep the dtype of what came in, but for means of integers; the original's are float32."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from rank0rl.launch import fork
from rank0rl.mpi import comm, reduce
from rank0rl.mpi.agreement import SMALL, exchange
from rank0rl.mpi.arrays import Value, as_value, check_numbers, fill, is_tensor
from rank0rl.mpi.world import attempt

__all__ = [
    "allreduce",
    "broadcast",
    "mpi_avg",
    "mpi_fork",
    "mpi_op",
    "mpi_statistics_scalar",
    "mpi_sum",
    "msg",
    "num_procs",
    "proc_id",
]

proc_id, num_procs = comm.get_rank, comm.get_nworkers
mpi_sum, mpi_avg = reduce.all_sum, reduce.all_mean

_OPS = ("sum", "prod", "max", "min")
_TORCH = {"product": "prod", "avg": "mean"}  # names of torch.distributed.ReduceOp


def mpi_fork(n: int, bind_to_core: bool = False) -> None:
    """Run this command line again on n ranks, and end this process when they have ended.

    The call returns in every rank. With n <= 1, and in a job that a launcher started, it does
    nothing. With `bind_to_core` every rank is bound to one core.

    Raises:
        SystemExit: in the original process, with the job's exit code; 0 means success.
    """
    if fork.mpi_fork(n, bind_to_core=bind_to_core) == "parent":
        sys.exit()


def msg(m: Any, string: str = "") -> None:
    """Print a message with the number of this rank."""
    print(f"Message from {comm.get_rank()}: {string} \t {m}")


def allreduce(sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
    """Overwrite recvbuf with the sum of sendbuf over ranks, or with another operation's result.

    Collective: every rank calls this, in the same order, with the same dtype and shape.

    Args:
        sendbuf: array, tensor, number or list of numbers; MPI.IN_PLACE takes what is in recvbuf.
        recvbuf: array or tensor of the same dtype and size, contiguous or not.
        op: operation, as in `mpi_op`.

    Raises:
        ValueError: the same on every rank, if the two buffers do not fit each other, if they differ
            between ranks, or if op is unknown.
    """
    if sendbuf is getattr(sys.modules.get("mpi4py.MPI"), "IN_PLACE", recvbuf):
        sendbuf = recvbuf
    _reduce_into(recvbuf, sendbuf, op, "allreduce")


def broadcast(x: Any, root: int = 0) -> None:
    """Overwrite an array or tensor, in place, with that of rank `root`.

    Collective: every rank calls this, in the same order, with the same dtype, shape and root.

    Raises:
        ValueError: the same on every rank, if x or root differs between ranks, if x cannot be
            overwritten, or if root is not a rank.
    """
    _bcast_from(root, x, "broadcast")


def mpi_op(x: Any, op: Any) -> Any:
    """Return the sum over ranks, or another operation's result, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        x: number, array, tensor or list of numbers. The result for a list is an array.
        op: "sum", "mean", "prod", "max", "min", or mpi4py's MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN.

    Returns:
        The same kind and dtype as x, but an array for a list, and float64 for a mean of integers.
        Other results of integers are exact.

    Raises:
        ValueError: the same on every rank, if x differs in kind, dtype or shape between ranks, or
            if op is unknown.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    return reduce.all_reduce(x, _op_name(op))


def mpi_statistics_scalar(x: Any, with_min_and_max: bool = False) -> tuple[float, ...]:
    """Return mean and standard deviation, and optionally the extremes, of the samples of all ranks.

    Collective: every rank calls this, in the same order.

    Args:
        x: this rank's samples, as an array, tensor, list or number. Ranks may have different
            numbers of samples, or none.
        with_min_and_max: True to return the extremes too.

    Returns:
        mean, std[, min, max], in float64, the same on every rank. std divides the sum of squares by
        the number of samples. Without any samples nan, with inf and -inf as extremes.

    Raises:
        ValueError: the same on every rank, if one rank's samples are not real numbers.
    """
    here, problem = attempt(lambda: _statistics_here(x), b"")
    each = exchange({}, "statistics", here, problem)
    counts, totals, squared, lows, highs = np.frombuffer(b"".join(each)).reshape(-1, 5).T
    count = counts.sum()
    mean = std = float("nan")
    if count:
        mean = totals.sum() / count
        between = counts * np.square(totals / np.maximum(counts, 1) - mean)
        std = float(((squared + between).sum() / count) ** 0.5)
    extremes = float(lows.min()), float(highs.max())
    return (float(mean), std, *(extremes if with_min_and_max else ()))


def _statistics_here(x: Any) -> bytes:
    """Return count, sum, sum of squared deviations and extremes of this rank's samples, as float64."""
    array = as_value(x).array
    check_numbers(array, "max")
    samples = array.astype(np.float64).reshape(-1)
    n, total = samples.size, samples.sum()
    squares = np.square(samples - total / max(1, n)).sum()
    extremes = samples.min(initial=np.inf), samples.max(initial=-np.inf)
    return np.array([n, total, squares, *extremes]).tobytes()


def _op_name(op: Any) -> str:
    """Return the name that `mpi.reduce` uses; an unknown operation as text, which all ranks then reject."""
    mpi: Any = sys.modules.get("mpi4py.MPI")  # else op cannot be one of its operations
    if mpi is not None and isinstance(op, mpi.Op):
        known = (name for name in _OPS if op == getattr(mpi, name.upper()))
        return next(known, "another operation of mpi4py")
    name, wrong = attempt(lambda: str(getattr(op, "name", op)).lower(), "")
    return wrong or _TORCH.get(name, name)


def _reduce_into(
    x: Any, sent: Any, op: Any, what: str, problem: str = "", written: bool = True
) -> None:
    """Overwrite x, an array or tensor, with the result of an operation on what the ranks have sent.

    Without `written`, x stays as it is on this rank. A `problem` is what else is wrong on it.
    """
    op = _op_name(op)
    unfit, wrong = attempt(lambda: _unfit(as_value(sent), x, op), "")
    problem = problem or _not_writable(x) or unfit or wrong
    result = reduce.reduce_many({"x": sent}, op, what, problem=problem)["x"]
    if written:
        fill(x, as_value(result).array)


def _bcast_from(root: Any, x: Any, what: str, problem: str = "", name: str = "root") -> None:
    """Do what `broadcast` does, with the name of its argument `root`, and what else is wrong on this rank."""
    no_rank = _not_a_rank(name, root)
    layout: dict[str, Any] = {name: "" if no_rank else str(root)}
    problem = problem or no_rank or _not_writable(x)
    thing, wrong = attempt(lambda: as_value(x), as_value(np.empty(0)))
    if not wrong:
        layout["x"] = thing.kind
        if thing.array.dtype.hasobject:
            wrong = f"expected numbers or text: got dtype {thing.array.dtype}"
    sent = np.ascontiguousarray(thing.array)
    small = sent.nbytes <= SMALL
    payload = sent.tobytes() if small else b""
    each = exchange(layout, what, payload, problem or wrong, f"dtypes, shapes and {name}")
    if small:
        sent = np.frombuffer(bytearray(each[root]), sent.dtype)  # torch warns of bytes
    else:
        comm.bcast_(sent, root=root)
    if comm.get_rank() != root:
        fill(x, sent)


def _not_a_rank(name: str, rank: Any) -> str:
    """Explain why an argument is not the number of a rank; return "" if it is one."""
    last = comm.get_nworkers() - 1
    if isinstance(rank, int | np.integer) and 0 <= rank <= last:
        return ""
    return "".join(attempt(lambda: f"{name} must be a rank, 0 to {last}: got {rank!r}", ""))


def _unfit(sent: Value, x: Any, op: str) -> str:
    """Explain why x cannot hold a result; return "" if it can."""
    there, kind = as_value(x), sent.array.dtype.kind
    if (there.dtype, there.array.size) != (sent.dtype, sent.array.size):
        return (
            f"recvbuf must have the dtype and size of sendbuf: got {there.dtype}, "
            f"{there.array.size} and {sent.dtype}, {sent.array.size}"
        )
    if (op == "mean" and kind in "biu") or (op == "sum" and kind == "b"):
        return f"{sent.array.dtype} cannot hold the {op}: use mpi_op or dist_op, which give another dtype"
    return ""


def _not_writable(x: Any) -> str:
    """Explain why something cannot be overwritten; return "" if it can."""
    if isinstance(x, np.ndarray):
        return "" if x.flags.writeable else "expected an array to write to: got a read-only one"
    if not is_tensor(x):
        return f"expected an array or a tensor to write to: got {type(x).__name__}"
    from rank0rl.mpi.weights import check_data  # which loads torch

    return attempt(lambda: check_data({"x": x}), None)[1]
