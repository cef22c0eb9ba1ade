"""Sums, means and extremes over ranks, of numbers, arrays and tensors.

A result has the kind, dtype and shape of what came in. Integers are exact: they are added as 64-bit
integers, and a result that does not fit raises OverflowError. Their mean is float64.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.agreement import SMALL, exchange
from rank0rl.mpi.arrays import SAME, as_value, as_values
from rank0rl.mpi.comm import Comm, among, get_nworkers, reduce_
from rank0rl.mpi.world import agreed, attempt, collective

Array = npt.NDArray[Any]
Over = Callable[[Array, str], Array]
"""Computes "sum", "prod", "max" or "min" over ranks, element by element."""

X = TypeVar("X")

_LOW = (1 << 32) - 1
_NEAR = 1 - 1e-12  # a product so near a limit may be beyond it, because it is computed in float64


OPS = ("sum", "mean", "prod", "max", "min")
_UFUNC: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
_FLOAT = {op: {"x": str(as_value(0.0).kind), "op": op} for op in ("sum", "mean")}
_DOUBLE = struct.Struct("d")


def all_sum(x: X, comm: Comm | None = None) -> X:
    """Return the sum over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        x: number, array, tensor, or list of numbers, which gives an array.
        comm: the ranks; all of the job by default.

    Returns:
        The same kind of thing; integers for bools.

    Raises:
        ValueError: the same on every rank, if ranks pass different things, or something that cannot
            be added.
        OverflowError: the same on every rank, if a sum of integers does not fit their dtype.
    """
    return _reduce_one(x, "sum", "all_sum", comm)


def all_mean(x: X, comm: Comm | None = None) -> Any:
    """Return the mean over ranks, as `all_sum` returns the sum: the sum in float64 / nworkers.

    The dtype stays; the mean of integers and bools is float64. Every rank has the same weight. If some
    ranks have more samples than others, divide the sum over ranks by the sum of their counts.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.
    """
    return _reduce_one(x, "mean", "all_mean", comm)


def all_reduce(x: Any, op: str = "sum", comm: Comm | None = None) -> Any:
    """Return the "sum", "mean", "prod", "max" or "min" over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.
    """
    return _reduce_one(x, op, "all_reduce", comm)


@collective
def reduce_many(
    things: Mapping[str, Any],
    op: str,
    what: str,
    comm: Comm | None = None,
    problem: str = "",
) -> dict[str, Any]:
    """Return the `all_reduce` of many things at once, by name, with one message for each dtype.

    A `problem` is what else is wrong on this rank; "" if nothing is. Error messages begin with `what`.

    Collective: every rank calls this, in the same order.

    Raises:
        ValueError: the same on every rank, if ranks pass different things, or something that cannot
            be computed with.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    if op not in OPS:
        problem = problem or f"op must be one of {', '.join(OPS)}: got {op!r}"
    values, wrong = attempt(lambda: as_values(things, op), {})
    comm = among(comm)
    arrays = [value.array for value in values.values()]
    if get_nworkers(comm) == 1 and not (problem or wrong):
        results = [_of_one(array, op) for array in arrays]
    else:
        layout: dict[str, Any] = {name: value.kind for name, value in values.items()} | {"op": op}
        small = sum([array.nbytes for array in arrays]) <= SMALL
        payload = b"".join([array.tobytes() for array in arrays]) if small else b""
        each = exchange(layout, what, payload, problem or wrong, SAME, comm)
        if small:
            stacks = _stacked(arrays, each)
            results = [_reduced(stack, op, len(each), what, _here) for stack in stacks]
        else:
            results = _reduced_by_mpi(arrays, op, what, comm)
    out = {
        name: value.restore(_narrow(result, value.array.dtype, op, what))
        for (name, value), result in zip(values.items(), results, strict=True)
    }
    return {name: out[name] for name in things}


def _reduce_one(x: Any, op: str, what: str, comm: Comm | None) -> Any:
    if type(x) is float and op in _FLOAT:
        return _reduce_float(x, op, what, comm)
    return reduce_many({"x": x}, op, what, comm)["x"]


def _reduce_float(x: float, op: str, what: str, comm: Comm | None) -> float:
    """Do for a float of Python what `reduce_many` does, in a fraction of the time."""
    each = exchange(_FLOAT[op], what, _DOUBLE.pack(x), "", SAME, comm)
    total: float = -0.0  # adds nothing, not even a sign
    for part in each:  # `sum` rounds in another way since Python 3.12
        total += _DOUBLE.unpack(part)[0]
    return total / len(each) if op == "mean" else total


@functools.cache
def _wide(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    """Return the dtype to compute in: one that MPI knows, and no smaller."""
    kind = dtype.kind
    if op == "mean" and kind in "biu":
        return np.dtype(np.float64)
    if kind in "bi":
        return np.dtype(np.int64)
    if kind == "u":
        return np.dtype(np.uint64)
    least = {"f": "f8", "c": "c16"} if op == "mean" else {"f": "f4", "c": "c8"}
    return np.promote_types(dtype, least[kind])


def _of_one(array: Array, op: str) -> Array:
    """Return the result for a single rank: the array, in the dtype that results have."""
    counted = array.dtype.kind == "b" or (op == "mean" and array.dtype.kind in "iu")
    return array.astype(_wide(array.dtype, op) if counted else array.dtype)


def _stacked(arrays: Sequence[Array], each: Sequence[bytes]) -> Iterator[Array]:
    """Yield the arrays of all ranks, (ranks, *shape), to compute in, from the bytes of each rank."""
    start = 0
    for array in arrays:
        end = start + array.nbytes
        joined = b"".join([part[start:end] for part in each])
        yield np.frombuffer(joined, array.dtype).reshape(len(each), *array.shape)
        start = end


def _here(stacked: Array, op: str) -> Array:
    """Reduce along the first axis, in rank order."""
    result: Any = stacked[0]
    for row in stacked[1:]:  # in half the time of `reduce` if the rows are short
        result = _UFUNC[op](result, row)
    return np.asarray(result)


def _reduced_by_mpi(arrays: Sequence[Array], op: str, what: str, comm: Comm | None) -> list[Array]:
    """Reduce arrays with one message for each dtype, or two."""

    def by_mpi(flat: Array, op: str) -> Array:
        total = np.array(flat, order="C")
        reduce_([total], op, what, comm)
        return total

    out: list[Any] = [None] * len(arrays)
    dtypes = [_wide(array.dtype, op) for array in arrays]
    for dtype in dict.fromkeys(dtypes):
        these = [i for i, wide in enumerate(dtypes) if wide == dtype]
        flat = np.concatenate([arrays[i].reshape(-1) for i in these], dtype=dtype)
        whole = _reduced(flat, op, get_nworkers(comm), what, by_mpi)
        ends = np.cumsum([arrays[i].size for i in these])
        for i, part in zip(these, np.split(whole, ends[:-1]), strict=True):
            out[i] = part.reshape(arrays[i].shape)
    return out


def _reduced(array: Array, op: str, nworkers: int, what: str, over: Over) -> Array:
    """Reduce over ranks, in the dtype to compute in. Integers are exact.

    Raises:
        OverflowError: the same on every rank, if a result does not fit int64 or uint64.
    """
    wide: Array = array.astype(_wide(array.dtype, op), copy=False)
    dtype = wide.dtype
    if op == "mean":
        return np.asarray(over(wide, "sum") / nworkers)
    if (
        op == "sum" and dtype.kind in "iu"
    ):  # sums of either half over less than 2^31 ranks are exact
        halves = over(np.stack([wide >> 32, wide & _LOW], axis=-1).astype(np.int64), "sum")
        high, low = halves[..., 0] + (halves[..., 1] >> 32), halves[..., 1] & _LOW
        limits = np.iinfo(dtype)
        if high.size and (high.min() < limits.min >> 32 or high.max() > limits.max >> 32):
            raise _overflow(high.astype(np.float64) * 2.0**32, what)
        return np.asarray((high.astype(dtype) << 32) | low.astype(dtype))
    if op == "prod" and dtype.kind in "iu":
        rough, limits = over(wide.astype(np.float64), "prod"), np.iinfo(dtype)
        least, most = _NEAR * limits.min, _NEAR * limits.max
        if rough.size and ((rough.min() <= least < 0) or rough.max() >= most):
            raise _overflow(rough, what)
    if op in ("max", "min") and dtype.kind == "f":
        # nan where any rank has nan, which MPI does not guarantee
        missing, end = np.isnan(wide), -np.inf if op == "max" else np.inf
        both = [np.where(missing, end, wide), np.where(missing, -end, end)]
        result = over(np.stack(both, axis=-1).astype(dtype), op)
        return np.where(result[..., 1] == -end, np.nan, result[..., 0]).astype(dtype)
    return over(wide, op)


def _overflow(rough: Array, what: str) -> OverflowError:
    return agreed(
        OverflowError(
            f"{what}: a result does not fit 64 bits: {rough.min():g} to {rough.max():g}; pass floats"
        )
    )


def _narrow(result: Array, dtype: np.dtype[Any], op: str, what: str) -> Array:
    """Return a result in the dtype that came in, where it can be."""
    if (dtype.kind == "b" and op in ("sum", "mean")) or (op == "mean" and dtype.kind in "iu"):
        return result
    if dtype.kind in "iu" and result.size:
        limits = np.iinfo(dtype)
        if result.min() < limits.min or result.max() > limits.max:
            raise agreed(
                OverflowError(
                    f"{what}: a result does not fit {dtype}: {result.min()} to {result.max()}; pass "
                    f"larger integers"
                )
            )
    return result.astype(dtype, copy=False)
