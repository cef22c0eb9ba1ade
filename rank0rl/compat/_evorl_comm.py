"""EvoRL's collectives: trees of arrays, tensors and numbers, over the ranks along a named axis."""

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
from rank0rl.mpi.layout import check_layout
from rank0rl.mpi.values import as_value

DP_AXIS_NAME = "DP"
"""Axis of the ranks that share the samples of one agent."""
POP_AXIS_NAME = "POP"
"""Axis of the ranks that share the agents of a population."""


@dataclass(frozen=True)
class Mesh:
    """Grid of ranks with named axes."""

    sizes: Mapping[str, int]
    """Axis -> number of ranks along it."""
    comms: Mapping[str, Comm | None]
    """Axis -> communicator of this rank's neighbours along it; None in a single process."""

    def index(self, axis_name: str) -> int:
        """Return this rank's place along an axis, from 0."""
        return comm.get_rank(self.comm(axis_name))

    def comm(self, axis_name: str) -> Comm | None:
        """Return the communicator of the ranks along an axis; None in a single process.

        Raises:
            ValueError: if there is no such axis.
        """
        if axis_name not in self.comms:
            raise ValueError(
                f"axis_name must be None or one of {', '.join(self.comms)}: got {axis_name!r}; "
                f"to have other axes, call use_axes"
            )
        return self.comms[axis_name]


_meshes: list[Mesh] = []  # the one in use is the last


def use_axes(**sizes: int) -> Mesh:
    """Lay all ranks out in a grid, whose axes have names that the other functions take.

    Before the first call, "DP" and "POP" both mean all ranks. `use_axes(DP=2, POP=3)` makes two
    rows of three: ranks 0, 1, 2 share a population, and so do ranks 3, 4, 5; ranks 0 and 3 share an
    agent's samples. A call without arguments returns to the beginning.

    Collective: every rank calls this, in the same order, with the same sizes.

    Args:
        sizes: axis -> number of ranks along it. Consecutive ranks are neighbours along the last
            axis.

    Raises:
        ValueError: the same on every rank, if the product of the sizes is not the number of ranks,
            or if the sizes differ between ranks.
    """
    n = comm.get_nworkers()
    problem = ""
    if sizes and (min(sizes.values()) < 1 or math.prod(sizes.values()) != n):
        problem = f"the product of the sizes must be the number of ranks, {n}: got {sizes}"
    layout = {axis: str(size) for axis, size in sizes.items()} | {"order": " ".join(sizes)}
    check_layout(layout, "use_axes", problem, "axes and sizes")
    mesh = Mesh(sizes, _along(sizes)) if sizes else _all_ranks()
    for before in _meshes:
        for along in before.comms.values():
            if along and along != comm.world():
                along.Free()
    _meshes[:] = [mesh]
    return mesh


def current_mesh() -> Mesh:
    """Return the grid in use."""
    if not _meshes:
        _meshes.append(_all_ranks())
    return _meshes[-1]


def psum(x: Any, axis_name: str | None = None) -> Any:
    """Return sums over the ranks of an axis, leaf by leaf. Leaves of one dtype are one message.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: array, tensor or number, or a tree of them: nested dicts, lists, tuples, namedtuples and
            dataclasses.
        axis_name: "DP", "POP", or a name that was given to `use_axes`. None returns x itself.

    Returns:
        A tree like x. Integers are exact.

    Raises:
        ValueError: the same on every rank of the axis, if trees, dtypes or shapes differ between
            ranks, or if a leaf is not numeric; on this rank alone, if there is no such axis.
        OverflowError: the same on every rank of the axis, if an integer does not fit its dtype.
    """
    return _reduced(x, "sum", axis_name, "psum")


def pmean(x: Any, axis_name: str | None = None) -> Any:
    """Return means over the ranks of an axis, as `psum` does. The mean of integers is float64.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "mean", axis_name, "pmean")


def pmax(x: Any, axis_name: str | None = None) -> Any:
    """Return the largest values over the ranks of an axis, element by element, as `psum` does.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "max", axis_name, "pmax")


def pmin(x: Any, axis_name: str | None = None) -> Any:
    """Return the smallest values over the ranks of an axis, element by element, as `psum` does.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "min", axis_name, "pmin")


def all_gather(x: Any, axis_name: str | None = None, *, axis: int = 0, tiled: bool = False) -> Any:
    """Stack what all ranks of an axis have, leaf by leaf, in the order of ranks.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: tree, as in `psum`, with the same dtypes and shapes on every rank.
        axis_name: name of the axis, as in `psum`.
        axis: the axis of the result that counts the ranks.
        tiled: True to concatenate along an existing axis instead of adding one.

    Returns:
        A tree like x. With axis 0, each leaf has shape (ranks, *its shape). Numbers become arrays.

    Raises:
        ValueError: in the same cases as `psum`.
    """
    if axis_name is None:
        return x
    along = current_mesh().comm(axis_name)
    gathered = reduce.gather_many(trees.named(x), "all_gather", along)
    return trees.rebuilt(x, [_laid(a, axis, tiled) for a in gathered.values()])


def is_dist_initialized() -> bool:
    """Return True if there is more than one rank."""
    return comm.get_nworkers() > 1


def get_process_id() -> int:
    """Return the number of this rank's host, from 0, in the order of the hosts' first ranks.

    Collective: every rank calls this. After the first time nothing is sent.
    """
    return list(dict.fromkeys(comm.hosts())).index(platform.node())


def get_global_ranks() -> npt.NDArray[np.int32]:
    """Return the ranks of all processes, 0 to n - 1: the whole array on every rank."""
    return np.arange(comm.get_nworkers(), dtype=np.int32)


def split_key_to_devices(key: Any, devices: Sequence[Any]) -> list[Any]:
    """Return one key for each device, independent of each other and of the key itself.

    Every rank gets all keys, and rank i usually takes number i. The same key always gives the same
    keys, because it is not changed.

    Args:
        key: a seed, at least 0; a SeedSequence; a Generator, of which only the seed counts; or an
            array or tensor of integers.
        devices: sequence with one item for each key, such as `get_global_ranks()`.

    Returns:
        Keys of the same kind, dtype and shape as the key.

    Raises:
        TypeError: if the key is of another kind.
    """
    return [_child(key, i) for i in range(len(devices))]


def _all_ranks() -> Mesh:
    n, everyone = comm.get_nworkers(), comm.world()
    names = (DP_AXIS_NAME, POP_AXIS_NAME)
    return Mesh(dict.fromkeys(names, n), dict.fromkeys(names, everyone))


def _along(sizes: Mapping[str, int]) -> dict[str, Comm | None]:
    """Return, for each axis, the communicator of the ranks that differ from this one along it alone."""
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
    """Move the first axis, which counts ranks, to another place, or merge it into another axis."""
    move = torch.movedim if isinstance(stacked, torch.Tensor) else np.moveaxis
    if not tiled:
        return move(stacked, 0, axis)
    if stacked.ndim < 2:
        raise ValueError("tiled must be False for numbers, which have no axis: got True")
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
    thing = as_value(key)
    if thing.array.dtype.kind not in "iu":
        raise TypeError(f"key must be integers, a SeedSequence or a Generator: got {key!r}")
    words = np.ascontiguousarray(thing.array).reshape(-1).view(np.uint8).tolist()
    state = np.random.SeedSequence(words, spawn_key=(i,)).generate_state(len(words) // 4 + 1)
    drawn = state.view(np.uint8)[: len(words)].view(thing.array.dtype)
    return thing.restore(drawn.reshape(thing.array.shape))
