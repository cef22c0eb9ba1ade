"""EvoRL's ways to run a function on shards: every rank on its rows, then all rows on every rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rank0rl.compat._evorl_comm import Mesh, current_mesh
from rank0rl.mpi import reduce, trees


def shmap_map(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any, **kwargs: Any
) -> Callable[..., Any]:
    """A function that runs fn on every row of its arguments, rows spread over ranks, one by one.

    Args:
        fn: called with one row of each argument, by position; its results are stacked.
        mesh: what `use_axes` returned; None for the grid in use.
        in_specs: name of the axis along whose ranks the rows of the arguments are spread, or None
            where every rank takes all rows; for all arguments, or a sequence with one for each.
        out_specs: the name of the axis along whose ranks rows are put together, or None where all
            ranks have come to the same; for the result, or a sequence with one for each of several.
        kwargs: of JAX's shard_map; without effect.

    Returns:
        A function of whole trees of arrays, tensors and numbers with rows, which returns such trees,
        whole on every rank. It is collective over the ranks of the axes that are named. It raises
        ValueError, the same on every rank, if the rows cannot be spread evenly, or arguments
        differ in their number.
    """
    return _shard_map(lambda *args: _in_sequence(fn, args), mesh, in_specs, out_specs)


def shmap_vmap(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any, **kwargs: Any
) -> Callable[..., Any]:
    """As `shmap_map`, all rows of a rank at once: with torch.vmap.

    Arrays reach fn as tensors; where all arguments are arrays, the results are arrays again. What
    is drawn at random in fn differs between rows.
    """
    return _shard_map(lambda *args: _batched(fn, args), mesh, in_specs, out_specs)


def tree_device_put(tree: Any, device: torch.device | str) -> Any:
    """A tree with its tensors on a device. Arrays and numbers become tensors there."""

    def put(leaf: Any) -> Tensor:
        return leaf.to(device) if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device)

    return trees.tree_map(put, tree)


def _shard_map(
    run: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    def sharded(*args: Any) -> Any:
        grid = mesh or current_mesh()
        axes = _axes(in_specs, len(args), "in_specs")
        parts = [_rows(x, axis, grid) for x, axis in zip(args, axes, strict=True)]
        counts = {len(leaf) for part in parts for leaf in trees.named(part).values()}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(
                f"arguments must have the same number of rows, 1 at least: got {sorted(counts)}"
            )
        out = run(*parts)
        if isinstance(out_specs, str) or out_specs is None:
            return _together(out, out_specs, grid)
        axes = _axes(out_specs, len(out), "out_specs")
        return tuple(_together(x, axis, grid) for x, axis in zip(out, axes, strict=True))

    return sharded


def _axes(specs: Any, n: int, what: str) -> list[str | None]:
    """The axis of each of n trees."""
    if isinstance(specs, str) or specs is None:
        return [specs] * n
    axes = [spec[0] if isinstance(spec, Sequence) and len(spec) == 1 else spec for spec in specs]
    if len(axes) != n or not all(isinstance(axis, str) or axis is None for axis in axes):
        raise ValueError(
            f"{what} must be an axis, None, or one of these for each of {n}: got {specs}"
        )
    return axes


def _rows(tree: Any, axis: str | None, mesh: Mesh) -> Any:
    """This rank's rows."""
    if axis is None:
        return tree
    place, ranks = mesh.index(axis), mesh.sizes[axis]

    def mine(leaf: Any) -> Any:
        each, left = divmod(len(leaf), ranks)
        if left:
            raise ValueError(
                f"rows must be a multiple of the {ranks} ranks along {axis}: got {len(leaf)}; fill "
                f"them up"
            )
        return leaf[place * each : (place + 1) * each]

    return trees.tree_map(mine, tree)


def _together(tree: Any, axis: str | None, mesh: Mesh) -> Any:
    """The rows of all ranks along an axis."""
    if axis is None:
        return tree
    whole = reduce.gather_many(trees.named(tree), "shmap", mesh.comm(axis))
    rows = [a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in whole.values()]
    return trees.rebuilt(tree, rows)


def _in_sequence(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    count = len(next(iter(trees.named(args).values())))
    rows = [trees.tree_map(operator.itemgetter(i), tuple(args)) for i in range(count)]
    results = [fn(*row) for row in rows]
    return trees.tree_map(_stacked, *results)


def _stacked(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else np.stack(values)


def _batched(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    arrays = not any(isinstance(leaf, Tensor) for leaf in trees.named(args).values())
    tensors = trees.tree_map(torch.as_tensor, tuple(args))
    results = torch.vmap(fn, randomness="different")(*tensors)
    return trees.tree_map(lambda t: t.numpy(), results) if arrays else results
