"""Sums, means and extremes over ranks, of numbers, arrays and tensors.

A result has the kind, dtype and shape of what came in. Integers are exact: they are added as 64-bit
integers, and a result that does not fit raises OverflowError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rank0rl.mpi.comm import Comm, get_nworkers, reduce_, world
from rank0rl.mpi.errors import agreed, attempt, collective
from rank0rl.mpi.layout import check_layout
from rank0rl.mpi.rows import gather_rows
from rank0rl.mpi.values import as_value, as_values, check_numbers

Array = npt.NDArray[Any]
X = TypeVar("X")

OPS = ("sum", "mean", "prod", "max", "min")
_SAME = "kinds, dtypes and shapes"


@dataclass(frozen=True)
class Statistics:
    """Statistics of samples that are spread over ranks."""

    mean: float
    std: float
    """Standard deviation of the samples themselves: the sum of squares divided by their number."""
    min: float
    max: float
    count: int


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
    return reduce_many({"x": x}, "sum", "all_sum", comm)["x"]  # type: ignore[no-any-return]


def all_mean(x: X, comm: Comm | None = None) -> Any:
    """Return the mean over ranks, element by element, on every rank: the sum in float64 / nworkers.

    Every rank has the same weight. If some ranks have more samples than others, use `statistics`.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        x: number, array, tensor, or list of numbers, which gives an array.
        comm: the ranks; all of the job by default.

    Returns:
        The same kind of thing, of the same dtype; float64 for integers and bools.
    """
    return reduce_many({"x": x}, "mean", "all_mean", comm)["x"]


def all_reduce(x: Any, op: str = "sum", comm: Comm | None = None) -> Any:
    """Return the "sum", "mean", "prod", "max" or "min" over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.
    """
    return reduce_many({"x": x}, op, "all_reduce", comm)["x"]


@collective
def statistics(x: Any, comm: Comm | None = None) -> Statistics:
    """Return mean, standard deviation and extremes of all samples of all ranks, in float64.

    Collective: every rank calls this, in the same order.

    Args:
        x: this rank's samples, any number of them: an array, tensor, list or number.
        comm: the ranks; all of the job by default.

    Returns:
        The same on every rank. Without any samples nan, with inf and -inf as extremes.

    Raises:
        ValueError: the same on every rank, if one passes anything but real numbers.
    """
    samples, problem = attempt(lambda: _samples(x), np.empty(0))
    sums = np.array([samples.sum(), samples.size])
    total, count = reduce_many({"x": sums}, "sum", "statistics", comm, problem)["x"].tolist()
    mean = total / count if count else float("nan")
    squares = all_sum(float(np.square(samples - mean).sum()), comm)
    std = (squares / count) ** 0.5 if count else float("nan")
    low = all_reduce(float(samples.min(initial=np.inf)), "min", comm)
    high = all_reduce(float(samples.max(initial=-np.inf)), "max", comm)
    return Statistics(mean, std, low, high, int(count))


@collective
def reduce_many(
    things: Mapping[str, Any],
    op: str,
    what: str,
    comm: Comm | None = None,
    problem: str = "",
) -> dict[str, Any]:
    """Return the `all_reduce` of many things at once, with one message for each dtype.

    Collective: every rank calls this, in the same order.

    Args:
        things: name -> number, array, tensor or list of numbers.
        op: one of `OPS`.
        what: name of the collective, for error messages.
        comm: the ranks; all of the job by default.
        problem: what else is wrong on this rank; "" if nothing is.

    Returns:
        Name -> result, on every rank.

    Raises:
        ValueError: the same on every rank, if ranks pass different things, or something that cannot
            be computed with.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    if op not in OPS:
        problem = problem or f"op must be one of {', '.join(OPS)}: got {op!r}"
    values, wrong = attempt(lambda: as_values(things, op), {})
    layout = {name: value.layout for name, value in values.items()} | {"op": op}
    check_layout(layout, what, problem or wrong, _SAME, comm=comm)
    n = get_nworkers(comm)
    out: dict[str, Any] = {}
    for dtype in {_wide(value.array.dtype, op): None for value in values.values()}:
        these = {k: v for k, v in values.items() if _wide(v.array.dtype, op) == dtype}
        flat = np.concatenate([value.array.reshape(-1) for value in these.values()], dtype=dtype)
        if op in ("max", "min") and dtype.kind == "f":
            _extreme_(flat, op, what, comm)
        elif op in ("sum", "prod") and dtype.kind in "iu":
            _exact_(flat, op, what, comm)
        else:
            reduce_([flat], "sum" if op == "mean" else op, what, comm)
        if op == "mean":
            flat /= n
        start = 0
        for name, value in these.items():
            result = flat[start : start + value.array.size].reshape(value.array.shape)
            out[name] = value.restore(_narrow(result, value.array.dtype, op, what))
            start += value.array.size
    return {name: out[name] for name in things}


@collective
def gather_many(
    things: Mapping[str, Any],
    what: str,
    comm: Comm | None = None,
    problem: str = "",
    to_all: bool = True,
) -> dict[str, Any]:
    """Return the things of all ranks, stacked along a new first axis in rank order, on every rank.

    Collective: every rank calls this, in the same order.

    Args:
        things: name -> number, array, tensor or list of numbers.
        what: name of the collective, for error messages.
        comm: the ranks; all of the job by default.
        problem: what else is wrong on this rank; "" if nothing is.
        to_all: False to send them to rank 0 alone. The others then get stacks of no things.

    Returns:
        Name -> array, or tensor where one came in, of shape (ranks, *its shape).

    Raises:
        ValueError: the same on every rank, if ranks pass different things, or something that cannot
            be sent.
    """
    values, wrong = attempt(lambda: as_values(things), {})
    layout = {name: value.layout for name, value in values.items()}
    counts = check_layout(
        layout, what, problem or wrong, _SAME, comm=comm, numbers=[1] * len(values)
    )
    comm = comm or world()
    stacked = [value.array[None] for value in values.values()]
    if comm:
        stacked = gather_rows(stacked, counts, what, comm, to_all)
    out = {name: v.restore(a) for (name, v), a in zip(values.items(), stacked, strict=True)}
    return {name: out[name] for name in things}


def _samples(x: Any) -> Array:
    array = as_value(x).array
    check_numbers(array, "max")
    return array.astype(np.float64).reshape(-1)


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


def _extreme_(flat: Array, op: str, what: str, comm: Comm | None) -> None:
    """Reduce in place; the result is nan where any rank has nan, which MPI does not guarantee."""
    missing = np.isnan(flat)
    least = -np.inf if op == "max" else np.inf
    both = np.concatenate([np.where(missing, least, flat), np.where(missing, -least, least)])
    both = both.astype(flat.dtype)
    reduce_([both], op, what, comm)
    flat[:] = np.where(both[flat.size :] == -least, np.nan, both[: flat.size])


def _exact_(flat: Array, op: str, what: str, comm: Comm | None) -> None:
    """Reduce 64-bit integers in place; first in float64, which shows results near the limits."""
    rough = flat.astype(np.float64)
    reduce_([rough], op, what, comm)
    limits = np.iinfo(flat.dtype)
    if rough.size and (rough.min() <= limits.min < 0 or rough.max() >= float(limits.max)):
        raise agreed(
            OverflowError(
                f"{what}: a result does not fit 64 bits: {rough.min():g} to {rough.max():g}; pass "
                f"floats"
            )
        )
    reduce_([flat], op, what, comm)


def _narrow(result: Array, dtype: np.dtype[Any], op: str, what: str) -> Array:
    """Return a result in the dtype that came in, where it can be."""
    if dtype.kind == "b" and op in ("sum", "mean"):
        return result
    if op == "mean" and dtype.kind in "iu":
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
    return result.astype(dtype)
