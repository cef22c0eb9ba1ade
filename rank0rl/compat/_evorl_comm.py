"""EvoRL's collectives: trees of arrays, tensors and numbers, over the ranks along named axes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rank0rl.compat._evorl_mesh import AxisName, axis_names, current_mesh
from rank0rl.mpi import comm, reduce, trees
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.errors import attempt
from rank0rl.mpi.trees import as_value, as_values


def psum(x: Any, axis_name: AxisName = None) -> Any:
    """Return sums over the ranks of an axis, leaf by leaf. Leaves of one dtype are one message.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: array, tensor or number, or a tree of them: nested dicts, lists, tuples, namedtuples and
            dataclasses.
        axis_name: "DP", "POP", "P", or a name that was given to `use_axes`. A tuple of names means
            the ranks of all these axes together. None returns x itself.

    Returns:
        A tree like x. Integers are exact.

    Raises:
        ValueError: the same on every rank of the axis, if trees, dtypes or shapes differ between
            ranks, or if a leaf is not numeric; on this rank alone, if there is no such axis.
        OverflowError: the same on every rank of the axis, if an integer does not fit its dtype.
    """
    return _reduced(x, "sum", axis_name, "psum")


def pmean(x: Any, axis_name: AxisName = None) -> Any:
    """Return means over the ranks of an axis, as `psum` does. The mean of integers is float64.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "mean", axis_name, "pmean")


def pmax(x: Any, axis_name: AxisName = None) -> Any:
    """Return the largest values over the ranks of an axis, element by element, as `psum` does.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "max", axis_name, "pmax")


def pmin(x: Any, axis_name: AxisName = None) -> Any:
    """Return the smallest values over the ranks of an axis, element by element, as `psum` does.

    Collective: every rank of the axis calls this, in the same order.
    """
    return _reduced(x, "min", axis_name, "pmin")


def all_gather(x: Any, axis_name: AxisName = None, *, axis: int = 0, tiled: bool = False) -> Any:
    """Stack what all ranks of an axis have, leaf by leaf, in the order of ranks.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: tree, as in `psum`, with the same dtypes and shapes on every rank.
        axis_name: name of the axis, as in `psum`.
        axis: the axis of the result that counts the ranks.
        tiled: True to concatenate along an existing axis instead of adding one.

    Returns:
        A tree like x. With axis 0, each leaf has shape (ranks, *its shape). Numbers become arrays.
        With a tuple of names, neighbours differ along the axis that is named last.

    Raises:
        ValueError: in the same cases as `psum`.
    """
    if not axis_names(axis_name):
        return x
    mesh = current_mesh()
    gathered = reduce.gather_many(trees.named(x), "all_gather", mesh.comm(axis_name))
    order = mesh.order(axis_name)
    if order != sorted(order):
        gathered = {name: a[order] for name, a in gathered.items()}
    return trees.rebuilt(x, [_laid(a, axis, tiled) for a in gathered.values()])


def unpmap(x: Any, axis_name: AxisName = None) -> Any:
    """Return what the first rank of an axis has, leaf by leaf, on every rank of the axis.

    Collective: every rank of the axis calls this, in the same order.

    Args:
        x: tree, as in `psum`, with the same dtypes and shapes on every rank.
        axis_name: name of the axis, as in `psum`.

    Returns:
        A tree like x.

    Raises:
        ValueError: in the same cases as `psum`.
    """
    if not axis_names(axis_name):
        return x
    along = current_mesh().comm(axis_name)
    leaves = trees.named(x)
    values, problem = attempt(lambda: as_values(leaves), {})
    layout = {name: value.kind for name, value in values.items()}
    check_layout(layout, "unpmap", problem, "kinds, dtypes and shapes", along)
    first = {}
    for name, value in values.items():
        array = np.array(value.array, order="C")
        comm.bcast_(array, along)
        first[name] = value.restore(array)
    return trees.rebuilt(x, [first[name] for name in leaves])


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


def _reduced(x: Any, op: str, axis_name: AxisName, what: str) -> Any:
    if not axis_names(axis_name):
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
