"""Sums, means and extremes over ranks, of numbers, arrays and tensors.

What comes back is of the kind, dtype and shape that came in. Integers are exact: they are added as
64-bit integers, and a result that does not fit raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rank0rl.mpi import comm as ranks
from rank0rl.mpi.comm import Comm

Array = npt.NDArray[Any]
X = TypeVar("X")

OPS = ("sum", "mean", "prod", "max", "min")
_SAME = "kinds, dtypes and shapes"


@dataclass(frozen=True)
class Statistics:
    """Of samples that are spread over ranks."""

    mean: float
    std: float
    """Standard deviation of the samples themselves: the sum of squares divided by their number."""
    min: float
    max: float
    count: int


def all_sum(x: X, comm: Comm | None = None) -> X:
    """Sum over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        x: number, array, tensor, or list of numbers, which gives an array.
        comm: the ranks; all of the job by default.

    Returns:
        The same kind of thing; for bools, integers.

    Raises:
        ValueError: the same on every rank, if ranks come with different things, or with something
            that cannot be computed with.
        OverflowError: the same on every rank, if a sum of integers does not fit their dtype.
    """
    return reduce_many({"x": x}, "sum", "all_sum", comm)["x"]  # type: ignore[no-any-return]


def all_mean(x: X, comm: Comm | None = None) -> Any:
    """Mean over ranks, element by element, on every rank: the sum in float64, divided by their number.

    Every rank counts the same. For samples of which some ranks have more, use `stats.statistics`.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.

    Args:
        x: number, array, tensor, or list of numbers, which gives an array.
        comm: the ranks; all of the job by default.

    Returns:
        The same kind of thing, of the same dtype; for integers and bools, float64.
    """
    return reduce_many({"x": x}, "mean", "all_mean", comm)["x"]


def all_reduce(x: Any, op: str = "sum", comm: Comm | None = None) -> Any:
    """The "sum", "mean", "prod", "max" or "min" over ranks, element by element, on every rank.

    Collective: every rank calls this, in the same order, with the same kind, dtype and shape.
    """
    return reduce_many({"x": x}, op, "all_reduce", comm)["x"]


def statistics(x: Any, comm: Comm | None = None) -> Statistics:
    """Mean, standard deviation and extremes of all samples of all ranks, in float64.

    Collective: every rank calls this, in the same order.

    Args:
        x: samples, an array, tensor, list or number; as many as this rank has, none included.
        comm: the ranks; all of the job by default.

    Returns:
        The same on every rank. Of no samples at all, nan, with inf and -inf as extremes.

    Raises:
        ValueError: the same on every rank, if one comes with what are no real numbers.
    """
    samples, problem = np.empty(0), ""
    try:
        thing = opened(x)
        _check(thing, "max")
        samples = thing.array.astype(np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = str(error)
    begun = np.array([samples.sum(), samples.size])
    total, count = reduce_many({"x": begun}, "sum", "statistics", comm, problem)["x"].tolist()
    mean = total / count if count else float("nan")
    squares = all_sum(float(np.square(samples - mean).sum()), comm)
    std = (squares / count) ** 0.5 if count else float("nan")
    low = all_reduce(float(samples.min(initial=np.inf)), "min", comm)
    high = all_reduce(float(samples.max(initial=-np.inf)), "max", comm)
    return Statistics(mean, std, low, high, int(count))


def reduce_many(
    things: Mapping[str, Any],
    op: str,
    what: str,
    comm: Comm | None = None,
    problem: str = "",
) -> dict[str, Any]:
    """`all_reduce` of many things at once, as one message for each dtype.

    Collective: every rank calls this, in the same order.

    Args:
        things: name -> number, array, tensor or list of numbers.
        op: one of `OPS`.
        what: the name of the collective, for the message of an error.
        comm: the ranks; all of the job by default.
        problem: what else is wrong on this rank, if anything is.

    Returns:
        Name -> what has come of it, on every rank.

    Raises:
        ValueError: the same on every rank, if ranks come with different things, or with something
            that cannot be computed with.
        OverflowError: the same on every rank, if an integer result does not fit its dtype.
    """
    if op not in OPS:
        problem = problem or f"op must be one of {', '.join(OPS)}: got {op!r}"
    every, wrong = _opened_all(things, op)
    layout = {name: thing.layout for name, thing in every.items()} | {"op": op}
    ranks.check_layout(layout, what, problem or wrong, _SAME, comm=comm)
    n = ranks.get_nworkers(comm)
    out: dict[str, Any] = {}
    for dtype in {_wide(thing.array.dtype, op): None for thing in every.values()}:
        these = {k: t for k, t in every.items() if _wide(t.array.dtype, op) == dtype}
        flat = np.concatenate([thing.array.reshape(-1) for thing in these.values()], dtype=dtype)
        if op in ("max", "min") and dtype.kind == "f":
            _extreme_(flat, op, what, comm)
        elif op in ("sum", "prod") and dtype.kind in "iu":
            _exact_(flat, op, what, comm)
        else:
            ranks.reduce_([flat], "sum" if op == "mean" else op, what, comm)
        if op == "mean":
            flat /= n
        start = 0
        for name, thing in these.items():
            result = flat[start : start + thing.array.size].reshape(thing.array.shape)
            out[name] = thing.closed(_narrow(result, thing.array.dtype, op, what))
            start += thing.array.size
    return {name: out[name] for name in things}


def gather_many(things: Mapping[str, Any], what: str, comm: Comm | None = None) -> dict[str, Any]:
    """The things of all ranks, stacked along a new first axis in rank order, on every rank.

    Collective: every rank calls this, in the same order.

    Args:
        things: name -> number, array, tensor or list of numbers.
        what: the name of the collective, for the message of an error.
        comm: the ranks; all of the job by default.

    Returns:
        Name -> array, or tensor where one came in, of shape (ranks, *its shape).

    Raises:
        ValueError: the same on every rank, if ranks come with different things, or with something
            that cannot be sent.
    """
    every, problem = _opened_all(things)
    layout = {name: thing.layout for name, thing in every.items()}
    counts = ranks.check_layout(layout, what, problem, _SAME, comm=comm, numbers=[1] * len(every))
    comm = comm or ranks.world()
    stacked = [thing.array[None] for thing in every.values()]
    if comm:
        stacked = ranks.gather(stacked, counts, what, comm, to_all=True)
    out = {name: t.closed(a) for (name, t), a in zip(every.items(), stacked, strict=True)}
    return {name: out[name] for name in things}


class Opened(NamedTuple):
    """A thing as an array, and how to make such a thing of a result."""

    array: Array
    closed: Callable[[Array], Any]
    layout: str


def opened(x: Any) -> Opened:
    """A number, array, tensor or list of numbers as an array, which may share its memory.

    Raises:
        TypeError: if it is something else.
        ValueError: if it is a tensor that has no such array.
    """
    torch = sys.modules.get("torch")  # who has no tensors need not wait for it to load
    if torch is not None and isinstance(x, torch.Tensor):
        if x.is_sparse or x.device.type == "meta":
            kind = "sparse" if x.is_sparse else "on the meta device, where it has no data"
            raise ValueError(f"a tensor must be dense and hold data: got one that is {kind}")
        dtype, device = x.dtype, x.device
        there = x.detach().cpu().resolve_conj().resolve_neg()
        array = (there.float() if dtype == torch.bfloat16 else there).numpy()

        def closed(result: Array) -> Any:
            back = torch.from_numpy(np.array(result, order="C"))
            return back.to(device, dtype if result.dtype == array.dtype else None)

        return Opened(array, closed, f"tensor {dtype} {tuple(x.shape)}, {device.type}")
    if isinstance(x, np.ndarray | list | tuple):
        array = np.asarray(x)
        return Opened(array, np.array, f"{array.dtype.str} {array.shape}")
    if isinstance(x, bool | int | float | complex | np.generic):
        array = np.asarray(x)
        plain = not isinstance(x, np.generic)
        return Opened(
            array,
            lambda a: a.item() if plain and a.ndim == 0 else a[()],
            f"number {array.dtype.str}",
        )
    raise TypeError(
        f"expected a number, an array or a tensor: got {type(x).__name__}; make it one of these"
    )


def _opened_all(things: Mapping[str, Any], op: str = "") -> tuple[dict[str, Opened], str]:
    """Things as arrays, in an order that all ranks share; and what is wrong, if anything is."""
    every, problem = {}, ""
    for name in sorted(things):
        try:
            every[name] = opened(things[name])
            _check(every[name], op)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = problem or f"{name!r}: {error}"
    return every, problem


def _check(thing: Opened, op: str) -> None:
    dtype = thing.array.dtype
    if dtype.kind not in "biufc":
        raise TypeError(f"expected numbers: got dtype {dtype}; make it one of numbers")
    if dtype.kind == "c" and op in ("max", "min"):
        raise TypeError(f"complex numbers have no {op}: got dtype {dtype}; take real parts")


def _wide(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    """What results are computed in: something that MPI knows, and no smaller."""
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
    """As `reduce_`; nan where any rank has nan, for which MPI promises nothing."""
    missing = np.isnan(flat)
    least = -np.inf if op == "max" else np.inf
    both = np.concatenate([np.where(missing, least, flat), np.where(missing, -least, least)])
    both = both.astype(flat.dtype)
    ranks.reduce_([both], op, what, comm)
    flat[:] = np.where(both[flat.size :] == -least, np.nan, both[: flat.size])


def _exact_(flat: Array, op: str, what: str, comm: Comm | None) -> None:
    """As `reduce_`, of 64-bit integers; first in float64, which shows what comes to the limits."""
    rough = flat.astype(np.float64)
    ranks.reduce_([rough], op, what, comm)
    limits = np.iinfo(flat.dtype)
    if rough.size and (rough.min() <= limits.min < 0 or rough.max() >= float(limits.max)):
        raise OverflowError(
            f"{what}: a result does not fit 64 bits: {rough.min():g} to {rough.max():g}; pass floats"
        )
    ranks.reduce_([flat], op, what, comm)


def _narrow(result: Array, dtype: np.dtype[Any], op: str, what: str) -> Array:
    """A result in the dtype that came in, where there is such a thing."""
    if dtype.kind == "b" and op in ("sum", "mean"):
        return result
    if op == "mean" and dtype.kind in "iu":
        return result
    if dtype.kind in "iu" and result.size:
        limits = np.iinfo(dtype)
        if result.min() < limits.min or result.max() > limits.max:
            raise OverflowError(
                f"{what}: a result does not fit {dtype}: {result.min()} to {result.max()}; pass "
                f"larger integers"
            )
    return result.astype(dtype)
