"""EvoRL's axes, which put all ranks in a grid, and its collectives of trees over the ranks along an axis."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rank0rl.mpi import comm, reduce
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.comm import Comm
from rank0rl.mpi.gather import gather_many
from rank0rl.mpi.values import SAME, as_value, as_values
from rank0rl.mpi.world import attempt

AxisName: TypeAlias = str | list[str] | tuple[str, ...] | None
"""Name of an axis; a tuple of names, for the ranks along all of them together; None for no axis."""

DP_AXIS_NAME = "DP"
"""Axis of the ranks that share the samples of one agent."""
POP_AXIS_NAME = "POP"
"""Axis of the ranks that share the agents of a population."""
PMAP_AXIS_NAME = "P"
"""Axis of all ranks, in versions of EvoRL that use jax.pmap."""


@dataclass(frozen=True)
class Mesh:
    """Grid of ranks with named axes."""

    sizes: Mapping[str, int]
    """Axis -> number of ranks along it."""
    comms: Mapping[frozenset[str], Comm | None]
    """Axes -> communicator of this rank's neighbours along them; None in a single process."""

    def index(self, axis_name: str) -> int:
        """Return this rank's place along an axis, from 0."""
        return comm.get_rank(self.comm(axis_name))

    def comm(self, axis_name: AxisName) -> Comm | None:
        """Return the communicator of the ranks along one axis or several; None in a single process.

        Raises:
            ValueError: if there is no such axis, or if one is named twice.
        """
        axes = _axis_names(axis_name)
        if frozenset(axes) not in self.comms or len(set(axes)) != len(axes):
            raise ValueError(
                f"axis_name must be None or one of {', '.join(self.sizes)}, or a tuple of different "
                f"ones: got {axis_name!r}; to have other axes, call use_axes"
            )
        return self.comms[frozenset(axes)]

    def order(self, axis_name: AxisName) -> list[int]:
        """Return the ranks of `comm` in the order of the named axes: neighbours differ along the last one."""
        axes, n = _axis_names(axis_name), comm.get_nworkers(self.comm(axis_name))
        sizes = {axis: size for axis, size in self.sizes.items() if axis in axes}
        if math.prod(sizes.values()) != n:  # before `use_axes`, each of them is all ranks
            return list(range(n))
        ranks = np.arange(n).reshape(tuple(sizes.values()))
        return ranks.transpose([list(sizes).index(axis) for axis in axes]).reshape(-1).tolist()


def _axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Return the names of the axes, of which there may be one, several or none."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, list | tuple) else (axis_name,)


_meshes: list[Mesh] = []  # the one in use is the last


def use_axes(**sizes: int) -> Mesh:
    """Lay all ranks out in a grid, whose axes have names that the other functions take.

    Before the first call, "DP", "POP" and "P" mean all ranks. `use_axes(DP=2, POP=3)` makes two
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


def _all_ranks() -> Mesh:
    n, everyone = comm.get_nworkers(), comm.world()
    names = (DP_AXIS_NAME, POP_AXIS_NAME, PMAP_AXIS_NAME)
    return Mesh(dict.fromkeys(names, n), dict.fromkeys(_sets(names), everyone))


def _along(sizes: Mapping[str, int]) -> dict[frozenset[str], Comm | None]:
    """Return, for each set of axes, the communicator of the ranks that differ from this one along them alone."""
    shape = tuple(sizes.values())
    place = dict(zip(sizes, np.unravel_index(comm.get_rank(), shape), strict=True))
    found: dict[frozenset[str], Comm | None] = {}
    for axes in _sets(sizes):
        others = [0 if axis in axes else int(at) for axis, at in place.items()]
        found[axes] = comm.split(int(np.ravel_multi_index(others, shape)))
    return found


def _sets(names: Collection[str]) -> list[frozenset[str]]:
    """Return all sets of one or more of the names, in an order that is the same on every rank."""
    sizes = range(1, len(names) + 1)
    return [frozenset(some) for k in sizes for some in itertools.combinations(names, k)]


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
    if not _axis_names(axis_name):
        return x
    mesh = current_mesh()
    gathered = gather_many(named(x), "all_gather", mesh.comm(axis_name))
    order = mesh.order(axis_name)
    if order != sorted(order):
        gathered = {name: a[order] for name, a in gathered.items()}
    return rebuilt(x, [_laid(a, axis, tiled) for a in gathered.values()])


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
    if not _axis_names(axis_name):
        return x
    along = current_mesh().comm(axis_name)
    leaves = named(x)
    values, problem = attempt(lambda: as_values(leaves), {})
    layout = {name: value.kind for name, value in values.items()}
    check_layout(layout, "unpmap", problem, SAME, along)
    first = {}
    for name, value in values.items():
        array = np.array(value.array, order="C")
        comm.bcast_(array, along)
        first[name] = value.restore(array)
    return rebuilt(x, [first[name] for name in leaves])


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
    if not _axis_names(axis_name):
        return x
    along = current_mesh().comm(axis_name)
    return rebuilt(x, reduce.reduce_many(named(x), op, what, along).values())


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


def named(tree: Any, name: str = "x") -> dict[str, Any]:
    """Return the leaves of a tree by name, such as "x['actor'][0]", in order."""
    children = _children(tree)
    if children is None:
        return {name: tree}
    found: dict[str, Any] = {}
    for key, child in children.items():
        found |= named(child, f"{name}[{key!r}]")
    return found


def _children(tree: Any) -> Mapping[Any, Any] | None:
    """Return key -> child of a dict, list, tuple or dataclass; {} for None; None for a leaf."""
    if tree is None or isinstance(tree, Mapping):
        return tree or {}
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def rebuilt(tree: Any, new: Iterable[Any]) -> Any:
    """Return a tree of the same form with other leaves, given in order."""
    rest = iter(new)

    def build(old: Any) -> Any:
        children = _children(old)
        return (
            next(rest)
            if children is None
            else _like(old, {k: build(c) for k, c in children.items()})
        )

    return build(tree)


def _like(tree: Any, children: dict[Any, Any]) -> Any:
    """Return a container of the same type as `tree`, with other children."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        filled = copy.copy(tree)  # keeps what else a subclass of dict knows
        filled.update(children)
        return filled
    if isinstance(tree, list | tuple):
        kind: Any = type(tree)
        return kind(*children.values()) if hasattr(tree, "_fields") else kind(children.values())
    return children if isinstance(tree, Mapping) else dataclasses.replace(tree, **children)


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a tree of fn(leaf, leaves of the other trees with the same name)."""
    each = [named(other) for other in others]
    return rebuilt(tree, [fn(leaf, *(o[name] for o in each)) for name, leaf in named(tree).items()])
