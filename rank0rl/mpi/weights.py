"""Weights of rank 0 on every rank, and hashes that show whether two ranks, or two runs, have the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.comm import Comm, among, bcast_
from rank0rl.mpi.world import attempt, collective

Array = npt.NDArray[Any]

_LARGE = 1 << 16  # bytes of a tensor that is worth a message of its own, which saves copies


def named_tensors(*things: Any, to_overwrite: bool = False) -> dict[str, Tensor]:
    """Return all tensors in modules and in nested dicts and lists of modules, tensors and arrays.

    Args:
        things: modules, tensors, arrays, and nested dicts and lists of them.
        to_overwrite: True to refuse what cannot be overwritten, and to sort by name, because dicts may
            have another order on another rank.

    Returns:
        Dotted name -> tensor of the same memory, in order; for a module its parameters, then its
        buffers. A name begins with the index of the thing, unless a dict is the only thing.

    Raises:
        TypeError: for anything else, naming it.
        ValueError: if two tensors have the same name; if one of them cannot be overwritten.
    """
    found: dict[str, Tensor] = {}
    alone = len(things) == 1 and isinstance(things[0], Mapping)
    for name, tensor in _tensors(things[0] if alone else things, (), to_overwrite):
        if name in found:
            raise ValueError(f"two weights are called {name!r}: give one of them another name")
        found[name] = tensor
    if to_overwrite:
        check_data(found)
        return dict(sorted(found.items()))
    return found


def _tensors(thing: Any, path: tuple[str, ...], to_overwrite: bool) -> Iterator[tuple[str, Tensor]]:
    name = ".".join(path)
    if isinstance(thing, Mapping | list | tuple):
        for key, child in thing.items() if isinstance(thing, Mapping) else enumerate(thing):
            yield from _tensors(child, (*path, str(key)), to_overwrite)
    elif isinstance(thing, nn.Module):
        for key, tensor in [*thing.named_parameters(), *thing.named_buffers()]:
            yield f"{name}.{key}", tensor.data
    elif isinstance(thing, Tensor):
        yield name, thing.data  # unlike detach(), it has a version of its own: autograd goes on
    elif isinstance(thing, np.ndarray) and not isinstance(thing, np.ma.MaskedArray):
        if to_overwrite and not thing.flags.writeable:
            raise ValueError(
                f"weights are overwritten in place: {name!r} is a read-only array; pass a copy of it"
            )
        yield name, torch.from_numpy(thing if thing.flags.writeable else thing.copy())
    else:
        raise TypeError(
            f"weights must be modules, tensors, arrays, or dicts and lists of them: got "
            f"{type(thing).__name__} at {name!r}; pass the module, as in rank0_bcast_wts(net, 'net'), or "
            f"what an optimizer holds, optimizer.state_dict()['state']"
        )


def check_data(*named: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless every tensor has memory of its own that can be sent."""
    for name, t in [item for tensors in named for item in tensors.items()]:
        kind = ""
        if t.layout is not torch.strided:
            kind = "is sparse"
        elif t.is_meta:
            kind = "is on the meta device, where it has no data"
        elif t.is_quantized:
            kind = "is quantized"
        elif t.is_conj() or t.is_neg():
            kind = "is a view that conjugates or negates another tensor"
        elif not t.is_contiguous() and any(
            step == 0 and n > 1 for step, n in zip(t.stride(), t.shape, strict=True)
        ):
            kind = "is expanded, so that numbers share memory"
        if kind:
            raise ValueError(f"{name!r} {kind}: a tensor must be dense and hold data")


def without_label(things: tuple[Any, ...], label: str) -> tuple[tuple[Any, ...], str]:
    """Return weights and their label, which mpi_util's scripts pass as the last of the things."""
    if not label and len(things) > 1 and isinstance(things[-1], str):
        return things[:-1], things[-1]
    return things, label


@collective
def rank0_bcast_wts(*things: Any, label: str = "", comm: Comm | None = None) -> None:
    """Overwrite weights, in place, with those of rank 0: parameters and buffers.

    Collective: every rank calls this, in the same order.

    Args:
        things: modules, tensors, arrays, and nested dicts and lists of them.
        label: name of these weights, for error messages. It may also be the last of the things.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, if names, dtypes or shapes differ between ranks, a tensor
            is sparse or holds no data, an array is read-only, or something else is passed.
    """
    comm = among(comm)
    if comm is None:
        return
    things, label = without_label(things, label)
    named, problem = attempt(lambda: named_tensors(*things, to_overwrite=True), {})
    layout = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in named.items()}
    layout["~memory"] = _shared(named.values())
    check_layout(layout, f"rank0_bcast_wts {label}".strip(), problem, comm=comm)
    large = [t for t in named.values() if t.nbytes >= _LARGE]
    small = [t for t in named.values() if t.nbytes < _LARGE]
    together = torch.cat([torch.empty(0, dtype=torch.uint8), *map(_bytes, small)])
    bcast_(together.numpy(), comm)
    parts = torch.split_with_sizes(together, [t.nbytes for t in small])
    new = [part.clone() for part in parts]  # which is aligned
    for t in large:
        new.append(_bytes(t))  # where t is, if it is contiguous and in main memory
        bcast_(new[-1].numpy(), comm)
    for t, sent in zip([*small, *large], new, strict=True):
        if comm.rank and sent.data_ptr() != t.data_ptr():
            t.copy_(sent.view(t.dtype).reshape(t.shape))


def _shared(tensors: Iterable[Tensor]) -> str:
    """Return which tensors have memory in common with others, and where it begins: in one vector or in many, they have none."""
    spans = sorted((t.data_ptr(), i, _extent(t)) for i, t in enumerate(tensors) if t.numel())
    shared, start, end, first = [], 0, 0, 0
    for at, i, length in spans:
        if at < end:
            shared.append((first, i, at - start))
        if at + length > end:
            start, end, first = at, at + length, i
    return f"shared as {sorted(shared)}"


def _extent(t: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last one."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


@collective
def chksum(
    *things: Any, label: str = "", before: Mapping[str, str] | None = None, comm: Comm | None = None
) -> str:
    """Raise ValueError unless every rank has the same weights, bit for bit; return one hash of them all, by name.

    Collective: every rank calls this, in the same order.

    Args:
        things: modules, tensors, arrays, and nested dicts and lists of them.
        label: name of these weights, for error messages. It may also be the last of the things.
        before: earlier result of `sha256_each` on this rank, if the weights must not have changed
            since.
        comm: the ranks; all of the job by default.

    Raises:
        ValueError: the same on every rank, naming a rank and a tensor that differ from rank 0's, or
            from what they were before; or if something else is passed.
    """
    things, label = without_label(things, label)
    each, problem = attempt(lambda: sha256_each(named_tensors(*things)), {})
    changed = [name for name in each if before is not None and before.get(name) != each[name]]
    if changed:
        problem = f"{changed[0]!r} has changed, and must not"
    what = f"chksum {label}".strip()
    check_layout(each, what, problem, same="weights, bit for bit", comm=comm)
    return hashlib.sha256(repr(sorted(each.items())).encode()).hexdigest()


def sha256_each(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name and the hash of each tensor. The name does not enter its hash."""
    return {name: sha256_tensors({"0": t}) for name, t in tensors.items()}


def sha256_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and bytes, in the order of the mapping."""
    digest = hashlib.sha256()
    for name, t in tensors.items():
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(_bytes(t.detach()).numpy().data)
    return digest.hexdigest()


def sha256_arrays(arrays: Mapping[str, Array]) -> str:
    """Return a hash of names, dtypes, shapes and bytes. The order of the names does not matter."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        if array.size:  # an empty array's memory cannot be cast
            digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def _bytes(t: Tensor) -> Tensor:
    flat = t.cpu().contiguous().reshape(-1)
    none = torch.empty(0, dtype=torch.uint8)  # an empty tensor may have no stride to view it by
    return flat.view(torch.uint8) if len(flat) else none
