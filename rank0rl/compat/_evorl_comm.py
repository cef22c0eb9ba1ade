"""EvoRL's collectives: on trees of arrays, tensors and numbers, over the ranks of a named axis."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rank0rl.mpi import comm, reduce, trees
from rank0rl.mpi.comm import Comm

DP_AXIS_NAME = "DP"
"""Of the ranks that share the samples of one agent."""
POP_AXIS_NAME = "POP"
"""Of the ranks that share the agents of a population."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid of named axes."""

    sizes: Mapping[str, int]
    """Axis -> ranks along it."""
    comms: Mapping[str, Comm | None]
    """Axis -> the ranks that differ from this one along it alone; None in a single process."""

    def index(self, axis_name: str) -> int:
        """This rank's place along an axis."""
        return comm.get_rank(self.comm(axis_name))

    def comm(self, axis_name: str) -> Comm | None:
        """The ranks along an axis.

        Raises:
            ValueError: if there is no such axis.
        """
        if axis_name not in self.comms:
            raise ValueError(
                f"axis_name must be None or one of {', '.join(self.comms)}: got {axis_name!r}; "
                f"name the axes there are with use_axes"
            )
        return self.comms[axis_name]


_meshes: list[Mesh] = []  # the one in use is the last


def use_axes(**sizes: int) -> Mesh:
    """Lay all ranks out in a grid: from here on the names of its axes mean the ranks along each.

    Until then, "DP" and "POP" are both all ranks. `use_axes(DP=2, POP=3)` makes two rows of three:
    ranks 0, 1, 2 and 3, 4, 5 each share a population, ranks 0 and 3 an agent's samples. Without
    arguments, it is as in the beginning.

    Collective: every rank calls this, in the same order, with the same sizes.

    Args:
        sizes: axis -> ranks along it; the last axis is the one along which neighbours lie.

    Raises:
        ValueError: the same on every rank, if the sizes do not multiply to the number of ranks, or
            differ between ranks.
    """
    n = comm.get_nworkers()
    problem = ""
    if sizes and (min(sizes.values()) < 1 or math.prod(sizes.values()) != n):
        problem = f"sizes must multiply to the number of ranks, {n}: got {sizes}"
    layout = {axis: str(size) for axis, size in sizes.items()} | {"order": " ".join(sizes)}
    comm.check_layout(layout, "use_axes", problem, "axes and sizes")
    mesh = Mesh(sizes, _along(sizes)) if sizes else _all_ranks()
    for before in _meshes:
        for part in before.comms.values():
            if part and part != comm.world():
                part.Free()
    _meshes[:] = [mesh]
    return mesh


def current_mesh() -> Mesh:
    """The grid in use."""
    if not _meshes:
        _meshes.append(_all_ranks())
    return _meshes[-1]


def psum(x: Any, axis_name: str | None = None) -> Any:
    """Sums over the ranks of an axis, leaf by leaf, as one message for each dtype.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: array, tensor or number; or nested dicts, lists, tuples, namedtuples and dataclasses.
        axis_name: "DP", "POP", or what `use_axes` named; None for x as it is.

    Returns:
        As x. Integers are exact.

    Raises:
        ValueError: the same on every rank of the axis, if trees, dtypes or shapes differ between
            ranks, or something cannot be computed with; on this rank, if there is no such axis.
        OverflowError: the same on every rank of the axis, if an integer does not fit its dtype.
    """
    return _reduced(x, "sum", axis_name, "psum")


def pmean(x: Any, axis_name: str | None = None) -> Any:
    """Means over the ranks of an axis: see `psum`. Of integers, in float64.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "mean", axis_name, "pmean")


def pmax(x: Any, axis_name: str | None = None) -> Any:
    """The largest over the ranks of an axis, element by element: see `psum`.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "max", axis_name, "pmax")


def pmin(x: Any, axis_name: str | None = None) -> Any:
    """The smallest over the ranks of an axis, element by element: see `psum`.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "min", axis_name, "pmin")


def all_gather(x: Any, axis_name: str | None = None, *, axis: int = 0, tiled: bool = False) -> Any:
    """What all ranks of an axis have, leaf by leaf, in their order.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: as for `psum`, of the same dtypes and shapes on every rank.
        axis_name: as for `psum`.
        axis: which axis of the result counts the ranks.
        tiled: do without that axis: concatenate along the one which is there.

    Returns:
        As x, each leaf of shape (ranks, *its shape), if axis is 0; numbers become arrays.

    Raises:
        ValueError: as for `psum`.
    """
    if axis_name is None:
        return x
    along = current_mesh().comm(axis_name)
    gathered = reduce.gather_many(trees.named(x), "all_gather", along)
    return trees.rebuilt(x, [_laid(a, axis, tiled) for a in gathered.values()])


def is_dist_initialized() -> bool:
    """Whether there is more than one rank."""
    return comm.get_nworkers() > 1


def get_process_id() -> int:
    """The number of this rank's host among the hosts, from 0, in the order of their first ranks.

    Collective: every rank calls this; after the first time nothing is sent.
    """
    return list(dict.fromkeys(comm.hosts())).index(platform.node())


def get_global_ranks() -> npt.NDArray[np.int32]:
    """The unique rank of each device: of each process, 0 to n - 1. The same whole array on all."""
    return np.arange(comm.get_nworkers(), dtype=np.int32)


def split_key_to_devices(key: Any, devices: Sequence[Any]) -> list[Any]:
    """One key for each device, independent of each other and of the key itself.

    Every rank gets all of them, the same for the same key; device i, as a rule rank i, takes the
    i-th. The key is not changed, so that it gives the same keys again.

    Args:
        key: a seed, at least 0; a SeedSequence; a Generator, of which only the seed counts; or an
            array or tensor of integers.
        devices: as many as keys are wanted, such as `get_global_ranks()`.

    Returns:
        Keys of the same kind, dtype and shape.

    Raises:
        TypeError: if the key is something else.
    """
    return [_child(key, i) for i in range(len(devices))]


def _all_ranks() -> Mesh:
    n, everyone = comm.get_nworkers(), comm.world()
    names = (DP_AXIS_NAME, POP_AXIS_NAME)
    return Mesh(dict.fromkeys(names, n), dict.fromkeys(names, everyone))


def _along(sizes: Mapping[str, int]) -> dict[str, Comm | None]:
    """Axis -> the ranks whose places along all other axes are those of this one."""
    place = np.unravel_index(comm.get_rank(), tuple(sizes.values()))
    found: dict[str, Comm | None] = {}
    for i, axis in enumerate(sizes):
        others = [0 if i == j else int(at) for j, at in enumerate(place)]
        found[axis] = comm.split(int(np.ravel_multi_index(others, tuple(sizes.values()))))
    return found


def _reduced(x: Any, op: str, axis_name: str | None, what: str) -> Any:
    if axis_name is None:
        return x
    along = current_mesh().comm(axis_name)
    return trees.rebuilt(x, reduce.reduce_many(trees.named(x), op, what, along).values())


def _laid(stacked: Any, axis: int, tiled: bool) -> Any:
    """What has been stacked along the first axis, along another, or one after the other."""
    move = torch.movedim if isinstance(stacked, torch.Tensor) else np.moveaxis
    if not tiled:
        return move(stacked, 0, axis)
    if stacked.ndim < 2:
        raise ValueError("tiled must be False for numbers, which have no axis to be laid along")
    axis %= stacked.ndim - 1
    shape = list(stacked.shape[1:])
    shape[axis] *= stacked.shape[0]
    return move(stacked, 0, axis).reshape(shape)


def _child(key: Any, i: int) -> Any:
    if isinstance(key, np.random.SeedSequence):
        return np.random.SeedSequence(key.entropy, spawn_key=(*key.spawn_key, i))
    if isinstance(key, np.random.Generator):
        sequence = _child(key.bit_generator.seed_seq, i)
        return np.random.Generator(type(key.bit_generator)(sequence))
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(
            np.random.SeedSequence(int(key), spawn_key=(i,)).generate_state(1, np.uint64)[0] >> 1
        )
    thing = reduce.opened(key)
    if thing.array.dtype.kind not in "iu":
        raise TypeError(f"a key must be integers, a SeedSequence or a Generator: got {key!r}")
    words = np.ascontiguousarray(thing.array).reshape(-1).view(np.uint8).tolist()
    state = np.random.SeedSequence(words, spawn_key=(i,)).generate_state(len(words) // 4 + 1)
    drawn = state.view(np.uint8)[: len(words)].view(thing.array.dtype)
    return thing.closed(drawn.reshape(thing.array.shape))
