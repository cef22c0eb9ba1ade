"""Averages over ranks and running statistics, for scripts in which every rank updates."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from rank0rl.mpi.agreement import check_layout, exchange
from rank0rl.mpi.arrays import Kind, check_numbers
from rank0rl.mpi.comm import Comm, among, get_nworkers, reduce_
from rank0rl.mpi.gather import gather_many
from rank0rl.mpi.weights import check_data, named_tensors, rank0_bcast_wts, without_label
from rank0rl.mpi.world import attempt, collective
from rank0rl.nets.normalize import Moments

Array = npt.NDArray[Any]

_SAME = "names, dtypes, shapes and kinds of devices"
_LARGE = 1 << 16  # bytes of a tensor that is worth a message of its own
# dtype -> dtype to add it in; others are added as they are. MPI cannot add 16-bit floats.
_WIDE_GRADS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_WIDE_COMPLEX = {torch.complex64: torch.complex128}


@collective
@torch.no_grad()
def all_avg_wts(*things: Any, label: str = "", comm: Comm | None = None) -> None:
    """Overwrite weights, in place, with their mean over ranks, computed from sums in float64.

    Integers and bools, such as counters and masks, become those of rank 0.

    Collective: every rank calls this, in the same order.

    Args:
        things: modules, tensors, arrays, and nested dicts and lists of them.
        label: name of these weights, for error messages. It may also be the last of the things.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, a tensor is sparse or holds no data, an array is read-only, or something
            else is passed.
    """
    things, label = without_label(things, label)
    what = f"all_avg_wts {label}".strip()
    tensors, problem = attempt(lambda: named_tensors(*things, to_overwrite=True), {})
    check_layout(_kinds(tensors), what, problem, _SAME, comm=comm)
    real = {k: t for k, t in tensors.items() if t.is_floating_point()}
    averaged = real | {k: t for k, t in tensors.items() if t.is_complex()}
    wide = {t.dtype: torch.float64 for t in real.values()}
    _average_(averaged, {**_WIDE_COMPLEX, **wide}, what, comm)
    rank0_bcast_wts({k: t for k, t in tensors.items() if k not in averaged}, comm=comm)


@torch.no_grad()
def all_avg_grads(thing: nn.Module | Tensor, label: str = "", comm: Comm | None = None) -> None:
    """Overwrite the gradients of a module's parameters, in place, with their mean over ranks.

    If only some ranks have a gradient, it counts as 0 on the others, and every rank gets the mean.
    If no rank has one, none gets one.

    Collective: every rank calls this, in the same order.

    Args:
        thing: the module, or a single tensor that has a gradient.
        label: name of these gradients, for error messages.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, a gradient is sparse or holds no data, or something else is passed.
    """
    comm = among(comm)
    if comm is None and isinstance(thing, nn.Module | Tensor):
        return  # they are their own mean
    named, problem = attempt(lambda: _parameters(thing), {})
    what = f"all_avg_grads {label}".strip()
    grads = {name: p.grad for name, p in named.items() if p.grad is not None}
    for name, grad in average_grads_(named, grads, what, comm, problem).items():
        named[name].grad = grad


@collective
@torch.no_grad()
def average_grads_(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    what: str,
    comm: Comm | None = None,
    problem: str = "",
) -> dict[str, Tensor]:
    """Average gradients that are not in the parameters' `grad`, in place, as `all_avg_grads` does.

    Return name -> gradient, where any rank has one, in the order of the parameters. A `problem` is what
    else is wrong on this rank; "" if nothing is. Error messages begin with `what`.

    Collective: every rank calls this, in the same order.
    """
    has = bytes([name in grads for name in params])
    _, wrong = attempt(lambda: check_data(params, grads), None)
    by_rank = exchange(_kinds(params), what, has, problem or wrong, _SAME, comm)
    averaged = {
        name: grads[name] if name in grads else torch.zeros_like(p)
        for (name, p), *of_ranks in zip(params.items(), *by_rank, strict=True)
        if any(of_ranks)
    }
    _average_(averaged, _WIDE_GRADS, what, comm)
    return averaged


def _parameters(thing: Any) -> dict[str, Tensor]:
    if isinstance(thing, nn.Module):
        return dict(thing.named_parameters())
    if isinstance(thing, Tensor):
        return {"0": thing}
    raise TypeError(f"expected a module or a tensor: got {type(thing).__name__}")


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    return {name: Kind("", t.dtype, t.shape, t.device.type) for name, t in tensors.items()}


def _average_(
    tensors: Mapping[str, Tensor],
    wide: Mapping[torch.dtype, torch.dtype],
    what: str,
    comm: Comm | None,
) -> None:
    """Overwrite tensors with their means, computed from sums in a wider dtype where there is one.

    Large tensors are added where they are, which saves two copies; one that shares memory with
    another is copied. The small ones of one dtype are put together, which saves messages.
    """
    large: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors.values():
        if t.nbytes >= _LARGE and t.dtype not in wide and t.device.type == "cpu":
            large.append(t)
        else:
            small.setdefault(t.dtype, []).append(t)
    apart = _apart(large)
    sums = [
        t if i in apart else t.clone(memory_format=torch.contiguous_format)
        for i, t in enumerate(large)
    ]
    for dtype, these in small.items():
        flat = torch.cat([t.reshape(-1).cpu() for t in these])
        sums.append(flat.to(wide.get(dtype, dtype)))
    reduce_([t.numpy() for t in sums], "sum", what, comm)
    for t in sums:
        t.div_(get_nworkers(comm))
    for t, mean in zip(large, sums, strict=False):
        if mean is not t:
            t.copy_(mean)
    for these, flat in zip(small.values(), sums[len(large) :], strict=True):
        means = _unflatten_dense_tensors(flat, these)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(these, means)


def _apart(tensors: Sequence[Tensor]) -> set[int]:
    """Return the indices of contiguous tensors of which no two share memory."""
    found, end = set(), 0
    for i, t in sorted(enumerate(tensors), key=lambda item: item[1].data_ptr()):
        if t.is_contiguous() and t.data_ptr() >= end:
            found.add(i)
            end = t.data_ptr() + t.nbytes
    return found


# Rows are counted in blocks of so many bytes: update by update takes several times as long.
_MANY_BYTES = 1 << 20
_NAMES = ("count", "mean", "var")


class RunningNorm:
    """Mean and variance of the rows that all ranks have seen before the last `merge`.

    Between two merges they stay as they are, so that all ranks scale alike, bit for bit. Before the
    first one they are 0 and 1. The names are those of the statistics in Gymnasium's wrappers
    (`obs_rms` and `return_rms`), whose place it can take.

    Args:
        shape: shape of one row.
    """

    def __init__(self, shape: Sequence[int] = ()) -> None:
        self.moments = Moments(shape)
        """The statistics as a torch module: for `state_dict`, and for `rank0_bcast_wts`."""
        self._new = Moments(shape)
        self._rows: list[Array] = []
        self._bytes = 0
        self._pid = os.getpid()

    @property
    def mean(self) -> Array:
        """Mean, (*shape), float64."""
        return self.moments.mean.numpy().copy()

    @property
    def var(self) -> Array:
        """Variance, (*shape), float64."""
        return self.moments.var.numpy().copy()

    @property
    def count(self) -> int:
        """Number of rows of all ranks."""
        return int(self.moments.count)

    def update(self, x: Array) -> None:
        """Keep rows that this rank has seen, (N, *shape), for the next `merge`.

        Raises:
            ValueError: if x has another shape.
            TypeError: if it does not hold real numbers.
            RuntimeError: in a process of the rank's, such as one of an AsyncVectorEnv.
        """
        parent = multiprocessing.parent_process()
        if parent and parent.pid == self._pid:
            raise RuntimeError(
                "a RunningNorm is merged by its rank, which does not see what another process, such as "
                "one of AsyncVectorEnv, gives its copy: put the environments into a SyncVectorEnv"
            )
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("a mask would be lost: got a masked array; pass its rows without one")
        rows = np.array(x)  # a copy: environments may return the same memory again
        check_numbers(rows, "max")
        shape = tuple(self.moments.mean.shape)
        if rows.ndim == 0 or rows.shape[1:] != shape:
            raise ValueError(f"rows must have the shape (N, *{shape}): got {rows.shape}")
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _MANY_BYTES:
            self._count()

    def merge(self, *others: RunningNorm) -> None:
        """Add the rows that all ranks have kept since the last call, in rank order. Call it once per iteration.

        Collective: every rank calls this, in the same order.

        Args:
            others: more statistics, each of which gets its own rows, by the same messages.

        Raises:
            ValueError: the same on every rank, if the ranks pass other numbers or shapes.
        """
        norms = (self, *others)
        new, problem = attempt(lambda: _new_moments(norms), {})
        by_rank = gather_many(new, "RunningNorm.merge", problem=problem)
        for i, norm in enumerate(norms):
            for count, mean, var in zip(
                *(by_rank[f"{name} of {i}"] for name in _NAMES), strict=True
            ):
                if count:
                    norm.moments.add(count, np.asarray(mean), np.asarray(var))
            norm._new = Moments(norm.mean.shape)

    def scale(self, x: Array) -> Array:
        """Return x, (..., *shape), as (x - mean) / std, float32, limited to +-10."""
        std = np.sqrt(self.var + 1e-8)  # 1e-8: some inputs never change
        return np.clip((x - self.mean) / std, -10, 10).astype(np.float32)

    def _count(self) -> None:
        """Add the rows of the last updates to the new statistics."""
        if self._bytes:
            self._new.merge(np.concatenate(self._rows))
        self._rows, self._bytes = [], 0


def _new_moments(norms: Sequence[RunningNorm]) -> dict[str, Array]:
    """Return the count, mean and variance of the rows that are not merged yet."""
    for i, norm in enumerate(norms):
        if not isinstance(norm, RunningNorm):
            raise TypeError(f"expected RunningNorms: got {type(norm).__name__}, number {i}")
        norm._count()
    return {
        f"{name} of {i}": getattr(norm._new, name).numpy()
        for i, norm in enumerate(norms)
        for name in _NAMES
    }
