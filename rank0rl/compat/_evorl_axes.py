"""EvoRL's axes, which put all ranks in a grid, and its collectives of trees over the ranks along an axis.

A tree is made of nested dicts, lists, tuples, namedtuples and dataclasses. Its leaves are arrays, tensors
and numbers. An axis is the name of some of the ranks: "DP", "POP" and "P" are all ranks, until `use_axes`
lays the ranks out in a grid. A tuple of names is the ranks along all of these axes together; None is this
rank alone. A function that takes an axis is collective: every rank of the axis calls it, in the same
order, with trees of the same form, dtypes and shapes. If these differ, or a leaf cannot be sent, every
rank of the axis raises the same ValueError. If there is no such axis, this rank alone raises one.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rank0rl.mpi import comm, reduce
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.arrays import SAME, as_value, as_values
from rank0rl.mpi.comm import Comm
from rank0rl.mpi.gather import gather_many
from rank0rl.mpi.world import attempt

AxisName: TypeAlias = str | list[str] | tuple[str, ...] | None

DP = "DP"
"""Axis of the ranks that share the samples of one agent."""
POP = "POP"
"""Axis of the ranks that share the agents of a population."""
P = "P"
"""Axis of all ranks, in versions of EvoRL that use jax.pmap."""


@dataclasses.dataclass(frozen=True)
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
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, list | tuple) else (axis_name,)


_meshes: list[Mesh] = []  # the one in use is the last


def use_axes(**sizes: int) -> Mesh:
    """Lay all ranks out in a grid, whose axes have names that the other functions take.

    `use_axes(DP=2, POP=3)` makes two rows of three: ranks 0, 1, 2 share a population, and so do ranks
    3, 4, 5; ranks 0 and 3 share an agent's samples. A call without arguments returns to the beginning.

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
    names = (DP, POP, P)
    sizes = dict.fromkeys(names, comm.get_nworkers())
    return Mesh(sizes, dict.fromkeys(_sets(names), comm.world()))


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


def _reduced(x: Any, axis_name: AxisName, op: str) -> Any:
    """Return sums, means, or largest or smallest values over the ranks of an axis, leaf by leaf.

    Leaves of one dtype are one message. Integers are exact, but their mean is float32, as in JAX. A sum that
    does not fit its dtype is the same OverflowError on every rank of the axis. Under torch.vmap, as in
    `evorl.shmap_vmap`, all rows of a rank are in the message.
    """
    if not _axis_names(axis_name):
        return x
    leaves = named(x)
    if any(map(_is_of_vmap, leaves.values())):
        return rebuilt(x, _all_rows(axis_name, op, *map(torch.as_tensor, leaves.values())))
    along = current_mesh().comm(axis_name)
    found = reduce.reduce_many(leaves, op, f"p{op}", along, _cut(leaves))
    return rebuilt(x, [_as_in_jax(found[name], leaf, op) for name, leaf in leaves.items()])


def _as_in_jax(mean: Any, leaf: Any, op: str) -> Any:
    """Return a result with the dtype that JAX gives it."""
    if op != "mean" or type(mean) is float or as_value(leaf).array.dtype.kind not in "biu":
        return mean
    return mean.float() if isinstance(mean, Tensor) else mean.astype(np.float32)


def _cut(leaves: Mapping[str, Any]) -> str:
    """Explain which gradient would be lost on the way through other ranks; return "" if there is none."""
    for name, leaf in leaves.items():
        if getattr(leaf, "grad_fn", None) is not None:
            return (
                f"no gradient flows through other ranks, and {name} has a graph: pass a tensor that is "
                f"detached, and average gradients with gradient_update"
            )
    return ""


def _is_of_vmap(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and torch._C._functorch.is_batchedtensor(leaf)


class _AllRows(torch.autograd.Function):
    """`_reduced` of tensors, and of all rows of torch.vmap together."""

    @staticmethod
    def forward(axis_name: AxisName, op: str, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(_reduced([*leaves], axis_name, op))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, axis_name: AxisName, op: str, *leaves: Tensor) -> Any:
        dims = in_dims[2:]
        rows = [
            x if dim is None else x.movedim(dim, 0) for x, dim in zip(leaves, dims, strict=True)
        ]
        out = _all_rows(axis_name, op, *rows)
        return out, tuple(None if dim is None else 0 for dim in dims)


_all_rows: Any = _AllRows.apply


def psum(x: Any, axis_name: AxisName = None) -> Any:
    """Return sums over the ranks of an axis. Collective: see `_reduced`."""
    return _reduced(x, axis_name, "sum")


def pmean(x: Any, axis_name: AxisName = None) -> Any:
    """Return means over the ranks of an axis. Collective: see `_reduced`."""
    return _reduced(x, axis_name, "mean")


def pmax(x: Any, axis_name: AxisName = None) -> Any:
    """Return the largest values over the ranks of an axis. Collective: see `_reduced`."""
    return _reduced(x, axis_name, "max")


def pmin(x: Any, axis_name: AxisName = None) -> Any:
    """Return the smallest values over the ranks of an axis. Collective: see `_reduced`."""
    return _reduced(x, axis_name, "min")


def all_gather(x: Any, axis_name: AxisName = None, *, axis: int = 0, tiled: bool = False) -> Any:
    """Stack what all ranks of an axis have, leaf by leaf, in the order of ranks. Numbers become arrays.

    With a tuple of names, neighbours differ along the axis that is named last.

    Args:
        x: tree.
        axis_name: name of the axis.
        axis: the axis of the result that counts the ranks.
        tiled: True to concatenate along an existing axis instead of adding one.
    """
    if not _axis_names(axis_name):
        return x
    order, leaves = current_mesh().order(axis_name), named(x)
    gathered = gather_many(leaves, "all_gather", current_mesh().comm(axis_name), _cut(leaves))
    return rebuilt(x, [laid(a[order], axis, tiled) for a in gathered.values()])


def laid(stacked: Any, axis: int, tiled: bool) -> Any:
    """Move the first axis, which counts ranks, to another place, or merge it into another axis."""
    axes = stacked.ndim - tiled
    if axes and not -axes <= axis < axes:
        raise ValueError(f"axis must be from {-axes} to {axes - 1} here: got {axis}")
    if not tiled:
        move = torch.movedim if isinstance(stacked, Tensor) else np.moveaxis
        return move(stacked, 0, axis)
    if stacked.ndim < 2:
        raise ValueError("tiled must be False for numbers, which have no axis: got True")
    join = torch.cat if isinstance(stacked, Tensor) else np.concatenate
    return join(tuple(stacked), axis)


def unpmap(x: Any, axis_name: AxisName = None) -> Any:
    """Return what the first rank of an axis has, leaf by leaf, on every rank of the axis."""
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


def _children(tree: Any) -> Mapping[Any, Any] | None:
    """Return key -> child of a dict, list, tuple or dataclass; {} for None; None for a leaf."""
    if tree is None or isinstance(tree, Mapping):
        return tree or {}
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def named(tree: Any, name: str = "x") -> dict[str, Any]:
    """Return the leaves of a tree by name, such as "x['actor'][0]", in order."""
    children = _children(tree)
    if children is None:
        return {name: tree}
    found: dict[str, Any] = {}
    for key, child in children.items():
        found |= named(child, f"{name}[{key!r}]")
    return found


def rebuilt(tree: Any, new: Iterable[Any]) -> Any:
    """Return a tree of the same form with other leaves, given in order."""
    rest = iter(new)

    def build(old: Any) -> Any:
        children = _children(old)
        if children is None:
            return next(rest)
        return _like(old, {key: build(child) for key, child in children.items()})

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
    if isinstance(tree, Mapping):
        return children
    filled = copy.copy(tree)  # a dataclass, whose fields may have no arguments of their own
    for name, child in children.items():
        object.__setattr__(filled, name, child)
    return filled


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a tree of fn(leaf, leaves of the other trees with the same name)."""
    each = [named(other) for other in others]
    new = [fn(leaf, *(leaves[name] for leaves in each)) for name, leaf in named(tree).items()]
    return rebuilt(tree, new)
