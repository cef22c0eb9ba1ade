"""Weights and gradients, averaged over ranks: the other way to parallelize, without a rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rank0rl.mpi import comm as ranks
from rank0rl.mpi import weights
from rank0rl.mpi.comm import Comm

_SAME = "names, dtypes, shapes and kinds of devices"
_LEAST = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # that MPI can add
_WIDE = {torch.complex64: torch.complex128}
_LARGE = 1 << 14  # bytes


@torch.no_grad()
def all_avg_wts(*things: Any, label: str = "", comm: Comm | None = None) -> None:
    """Overwrite weights, in place, with their mean over ranks, of sums in float64.

    Counters and masks, which have no mean of their own kind, become those of rank 0.

    Collective: every rank calls this, in the same order.

    Args:
        things: modules, tensors, arrays, and nested dicts of them.
        label: what these weights are, for the message of an error.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, or a tensor is sparse or holds no data.
        TypeError: if something is neither a module, tensor nor array.
    """
    what = f"all_avg_wts {label}".strip()
    tensors = dict(sorted(weights.named_tensors(*things).items()))
    ranks.check_layout(_layout(tensors), what, weights.without_data(tensors), _SAME, comm=comm)
    of = {k: t for k, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    wide = {t.dtype: _WIDE.get(t.dtype, torch.float64) for t in of.values() if not t.is_complex()}
    _average_(of, {**_WIDE, **wide}, what, comm)
    weights.rank0_bcast_wts({k: t for k, t in tensors.items() if k not in of}, comm=comm)


@torch.no_grad()
def all_avg_grads(thing: nn.Module | Tensor, label: str = "", comm: Comm | None = None) -> None:
    """Overwrite the gradients of a module's parameters, in place, with their mean over ranks.

    Large ones travel as they are, small ones together. Where some ranks have a gradient and
    others have none, that of the others counts as 0, and every rank gets the mean; where nobody has
    one, nobody gets one.

    Collective: every rank calls this, in the same order.

    Args:
        thing: the module, or a single tensor that has a gradient.
        label: what these gradients are, for the message of an error.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, if names, dtypes, shapes or kinds of devices differ
            between ranks, or a gradient is sparse or holds no data.
    """
    what = f"all_avg_grads {label}".strip()
    named = dict(thing.named_parameters()) if isinstance(thing, nn.Module) else {"0": thing}
    grads = {name: p.grad for name, p in named.items() if p.grad is not None}
    for name, grad in average_grads_(named, grads, what, comm).items():
        named[name].grad = grad


@torch.no_grad()
def average_grads_(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], what: str, comm: Comm | None = None
) -> dict[str, Tensor]:
    """As `all_avg_grads`, of gradients that are not in the parameters' `grad`.

    Collective: every rank calls this, in the same order.

    Args:
        params: name -> parameter, the same on every rank.
        grads: name -> its gradient, to overwrite in place, where this rank has one.
        what: the name of the collective, for the message of an error.
        comm: the ranks; all of the job by default.

    Returns:
        Name -> gradient, where any rank has one, in the order of the parameters.
    """
    has = [name in grads for name in params]
    problem = weights.without_data({**params, **grads})
    everyone: Any = ranks.check_layout(
        _layout(params), what, problem, _SAME, comm=comm, numbers=has
    )
    used = everyone.any(axis=0).tolist()
    of = {
        name: grads[name] if name in grads else torch.zeros_like(p)
        for (name, p), anyone in zip(params.items(), used, strict=True)
        if anyone
    }
    _average_(of, _LEAST, what, comm)
    return of


def _average_(
    tensors: Mapping[str, Tensor],
    wide: Mapping[torch.dtype, torch.dtype],
    what: str,
    comm: Comm | None,
) -> None:
    """Means in place, of sums in a wider dtype where there is one.

    Large tensors are added where they are, which spares two copies; of the small ones, those of one
    dtype are put together, which spares messages.
    """
    once = {t.data_ptr(): t for t in tensors.values() if t.dtype not in wide}  # some are tied
    large = [t for t in once.values() if t.nbytes >= _LARGE and t.device.type == "cpu"]
    ids = {id(t) for t in large}
    small: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors.values():
        if id(t) not in ids:
            small.setdefault(t.dtype, []).append(t)
    sums = [t.contiguous() for t in large]  # itself, if it is
    for dtype, these in small.items():
        flat = torch.cat([t.reshape(-1) for t in these])
        sums.append(flat.to("cpu", wide.get(dtype, dtype)))
    ranks.reduce_([t.numpy() for t in sums], "sum", what, comm)
    for t in sums:
        t.div_(ranks.get_nworkers(comm))
    for t, mean in zip(large, sums, strict=False):
        if mean is not t:
            t.copy_(mean)
    for these, flat in zip(small.values(), sums[len(large) :], strict=True):
        parts = torch.split(flat, [t.numel() for t in these])
        torch._foreach_copy_(these, [p.view(t.shape) for p, t in zip(parts, these, strict=True)])


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{t.dtype} {tuple(t.shape)}, {t.device.type}" for name, t in tensors.items()}
