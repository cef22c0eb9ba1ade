"""EvoRL's axes: all ranks in a grid, whose axes have names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rank0rl.mpi import comm
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.comm import Comm

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
        axes = axis_names(axis_name)
        if frozenset(axes) not in self.comms or len(set(axes)) != len(axes):
            raise ValueError(
                f"axis_name must be None or one of {', '.join(self.sizes)}, or a tuple of different "
                f"ones: got {axis_name!r}; to have other axes, call use_axes"
            )
        return self.comms[frozenset(axes)]

    def order(self, axis_name: AxisName) -> list[int]:
        """Return the ranks of `comm` in the order of the named axes: neighbours differ along the last one."""
        axes, n = axis_names(axis_name), comm.get_nworkers(self.comm(axis_name))
        sizes = {axis: size for axis, size in self.sizes.items() if axis in axes}
        if math.prod(sizes.values()) != n:  # before `use_axes`, each of them is all ranks
            return list(range(n))
        ranks = np.arange(n).reshape(tuple(sizes.values()))
        return ranks.transpose([list(sizes).index(axis) for axis in axes]).reshape(-1).tolist()


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
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
