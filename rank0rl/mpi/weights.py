"""Weights of rank 0 on every rank, and a check that all ranks still have the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.mpi import hashes, trees
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.comm import Comm, among, bcast_
from rank0rl.mpi.errors import attempt, collective
from rank0rl.mpi.trees import Kind

Array = npt.NDArray[Any]

_SMALL = 1 << 16  # bytes that are copied in less time than a message of their own takes


def named_tensors(*things: Any) -> dict[str, Tensor]:
    """Return all tensors in modules and in nested dicts and lists of modules, tensors and arrays.

    Returns:
        Dotted name -> tensor of the same memory, in order; for a module its parameters, then its
        buffers. A name begins with the index of the thing, unless a dict is the only thing.

    Raises:
        TypeError: for anything else, naming it.
        ValueError: if two tensors have the same name.
    """
    return _named_tensors(_named_things(*things))


def _named_tensors(named_things: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for place, thing in named_things:
        for name, tensor in _tensors(thing, place):
            if name in found:
                raise ValueError(f"two weights are called {name!r}: give one of them another name")
            found[name] = tensor
    return found


def _named_things(*things: Any) -> Iterator[tuple[str, Any]]:
    alone = len(things) == 1 and isinstance(things[0], Mapping)
    for path, thing in trees.leaves(things[0] if alone else things, trees.container_items):
        yield ".".join(map(str, path)), thing


def tensors_to_overwrite(*things: Any) -> dict[str, Tensor]:
    """Return `named_tensors`, sorted by name, because dicts may have another order on another rank.

    Raises:
        TypeError, ValueError: in the same cases as `named_tensors`.
        ValueError: if a tensor is sparse or holds no data, or an array is read-only.
    """
    named_things = list(_named_things(*things))
    for name, thing in named_things:
        if isinstance(thing, np.ndarray) and not thing.flags.writeable:
            raise ValueError(
                f"weights are overwritten in place: {name!r} is a read-only array; pass a copy of it"
            )
    tensors = dict(sorted(_named_tensors(named_things).items()))
    check_data(tensors)
    return tensors


def _tensors(thing: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, nn.Module):
        for key, tensor in [*thing.named_parameters(), *thing.named_buffers()]:
            yield f"{name}.{key}", tensor.detach()
    elif isinstance(thing, Tensor):
        yield name, thing.detach()
    elif isinstance(thing, np.ndarray):
        yield name, torch.from_numpy(thing)
    else:
        raise TypeError(
            f"weights must be modules, tensors, arrays, or dicts and lists of them: got "
            f"{type(thing).__name__} at {name!r}"
        )


def without_label(things: tuple[Any, ...], label: str) -> tuple[tuple[Any, ...], str]:
    """Return weights and their label, which mpi_util's scripts pass as the last of the things."""
    if not label and len(things) > 1 and isinstance(things[-1], str):
        return things[:-1], things[-1]
    return things, label


@collective
def rank0_bcast_wts(*things: Any, label: str = "", comm: Comm | None = None) -> None:
    """Overwrite weights, in place, with those of rank 0: parameters and buffers.

    Tensors that lie side by side in memory, such as views of one flat tensor, travel as one message.

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
    (tensors, staged, blocks), problem = attempt(lambda: _to_send(*things), ({}, {}, []))
    layout = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in tensors.items()}
    layout["~memory"] = f"blocks of {[block.size for block in blocks]} bytes"
    check_layout(layout, f"rank0_bcast_wts {label}".strip(), problem, comm=comm)
    _bcast_blocks(blocks, comm)
    for name, t in staged.items():
        tensors[name].copy_(t)


def _bcast_blocks(blocks: Sequence[Array], comm: Comm) -> None:
    """Overwrite memory with that of rank 0; many small blocks travel as one message."""
    small = [block for block in blocks if block.size < _SMALL]
    together = np.concatenate(small) if small else np.empty(0, np.uint8)
    bcast_(together, comm)
    ends = np.cumsum([block.size for block in small])
    for block, new in zip(small, np.split(together, ends[:-1]), strict=False):
        block[:] = new
    for block in blocks:
        if block.size >= _SMALL:
            bcast_(block, comm)


def _to_send(*things: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Array]]:
    """Return all tensors, contiguous copies in main memory of those that need one, and the memory to send."""
    tensors = tensors_to_overwrite(*things)
    staged = {
        name: t.cpu().contiguous()
        for name, t in tensors.items()
        if t.device.type != "cpu" or not t.is_contiguous()
    }
    return tensors, staged, _blocks({**tensors, **staged})


@collective
def chksum(
    *things: Any, label: str = "", before: Mapping[str, str] | None = None, comm: Comm | None = None
) -> str:
    """Raise ValueError unless every rank has the same weights, bit for bit; return their hash.

    Collective: every rank calls this, in the same order.

    Args:
        things: modules, tensors, arrays, and nested dicts and lists of them.
        label: name of these weights, for error messages. It may also be the last of the things.
        before: earlier result of `hashes.sha256_each` on this rank, if the weights must not have
            changed since.
        comm: the ranks; all of the job by default.

    Returns:
        One hash of all the weights.

    Raises:
        ValueError: the same on every rank, naming a rank and a tensor that differ from rank 0's, or
            from what they were before; or if something else is passed.
    """
    things, label = without_label(things, label)
    each, problem = attempt(lambda: hashes.sha256_each(named_tensors(*things)), {})
    changed = [name for name in each if before is not None and before.get(name) != each[name]]
    if changed:
        problem = f"{changed[0]!r} has changed, and must not"
    what = f"chksum {label}".strip()
    check_layout(each, what, problem, same="weights, bit for bit", comm=comm)
    return hashlib.sha256("".join(each.values()).encode()).hexdigest()


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Return name -> dtype, shape and kind of device, for `agreement.exchange`."""
    return {name: Kind("", t.dtype, t.shape, t.device.type) for name, t in tensors.items()}


def check_data(*named: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless every tensor has memory of its own that can be sent."""
    for name, t in [item for tensors in named for item in tensors.items()]:
        kind = ""
        if t.layout is not torch.strided:
            kind = "is sparse"
        elif t.is_meta:
            kind = "is on the meta device, where it has no data"
        elif t.is_conj() or t.is_neg():
            kind = "is a view that conjugates or negates another tensor"
        elif not t.is_contiguous() and any(
            step == 0 and n > 1 for step, n in zip(t.stride(), t.shape, strict=True)
        ):
            kind = "is expanded, so that numbers share memory"
        if kind:
            raise ValueError(f"{name!r} {kind}: a tensor must be dense and hold data")


def _blocks(tensors: dict[str, Tensor]) -> list[Array]:
    """Return the memory of contiguous tensors as few byte arrays: neighbours merged, in a fixed order."""
    storages: dict[int, list[tuple[int, int]]] = {}  # address -> start and end of each tensor
    memory: dict[int, Array] = {}
    for t in tensors.values():
        storage = t.untyped_storage()
        start = int(t.storage_offset()) * t.element_size()
        storages.setdefault(storage.data_ptr(), []).append((start, start + t.nbytes))
        memory[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    blocks = []
    for address, spans in storages.items():
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        blocks += [memory[address][start:end] for start, end in merged]
    return blocks
