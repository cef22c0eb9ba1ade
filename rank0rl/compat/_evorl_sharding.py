"""EvoRL's sharded functions: every rank computes its rows, then every rank gets all rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rank0rl.compat._evorl_mesh import Mesh, current_mesh
from rank0rl.mpi import reduce, trees
from rank0rl.mpi.errors import alone, attempt


def shmap_map(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Return a function that runs fn on the rows of its arguments, one by one, spread over ranks.

    Args:
        fn: function of one row of each argument, by position. Its results are stacked.
        mesh: the grid that `use_axes` returned; None for the grid in use.
        in_specs: name of the axis over whose ranks the rows of the arguments are spread. None:
            every rank takes all rows. It holds for all arguments; a sequence has one for each of
            them.
        out_specs: name of the axis over whose ranks the rows of the result are gathered. None:
            every rank has the same result already. A sequence has one for each of several results.
        kwargs: options of JAX's shard_map; without effect.

    Returns:
        A function of whole trees, whose leaves have rows, that returns whole trees on every rank.
        It is collective over the ranks of the named axes. It raises the same ValueError on every
        rank if rows cannot be spread evenly, or if the arguments have different numbers of rows.
    """
    return _shard_map(lambda *args: _in_sequence(fn, args), mesh, in_specs, out_specs)


def shmap_vmap(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Return a function like that of `shmap_map`, which runs all rows of a rank at once by torch.vmap.

    Arrays reach fn as tensors. If all arguments are arrays, the results are arrays again. Random
    numbers that fn draws differ between rows.
    """
    return _shard_map(lambda *args: _batched(fn, args), mesh, in_specs, out_specs)


def tree_device_put(tree: Any, device: torch.device | str) -> Any:
    """Return the tree with all leaves as tensors on a device."""

    def put(leaf: Any) -> Tensor:
        return leaf.to(device) if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device)

    return trees.tree_map(put, tree)


def _shard_map(
    run: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    def sharded(*args: Any) -> Any:
        grid = mesh or current_mesh()
        shards, problem = attempt(lambda: _shards(args, in_specs, grid), [])
        if problem:
            _refuse(problem, out_specs, grid)
        out = run(*shards)
        if isinstance(out_specs, str) or out_specs is None:
            return _together(out, out_specs, grid)
        several = isinstance(out, list | tuple)
        results = out if several else (out,)
        axes = _axes(out_specs, len(results), "out_specs", "results")
        whole = tuple(_together(x, axis, grid) for x, axis in zip(results, axes, strict=True))
        return whole if several else whole[0]

    return sharded


def _shards(args: Sequence[Any], in_specs: Any, mesh: Mesh) -> list[Any]:
    """Return this rank's rows of all arguments."""
    axes = _axes(in_specs, len(args), "in_specs", "arguments")
    shards = [_rows(x, axis, mesh) for x, axis in zip(args, axes, strict=True)]
    counts = {len(leaf) for shard in shards for leaf in trees.named(shard).values()}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"all arguments must have the same number of rows, at least 1: got {sorted(counts)}"
        )
    return shards


def _refuse(problem: str, out_specs: Any, mesh: Mesh) -> None:
    """Raise ValueError on every rank that gathers the first of the results; on this rank if none is gathered."""
    specs = [out_specs] if isinstance(out_specs, str) or out_specs is None else out_specs
    axis = next(filter(None, _axes(specs, len(specs), "out_specs", "results")), None)
    if axis is None:
        raise alone(ValueError(problem))
    reduce.gather_many({}, "shmap", mesh.comm(axis), problem)


def _axes(specs: Any, n: int, what: str, trees_are: str) -> list[str | None]:
    """Return the axis of each of n trees, which are the arguments or the results of fn."""
    if isinstance(specs, str) or specs is None:
        return [specs] * n
    axes = [spec[0] if isinstance(spec, Sequence) and len(spec) == 1 else spec for spec in specs]
    if not all(isinstance(axis, str) or axis is None for axis in axes):
        raise ValueError(f"{what} must be an axis, None, or a sequence of these: got {specs}")
    if len(axes) != n:
        raise ValueError(
            f"{what} must have as many specs as fn has {trees_are}, {n}: got {len(axes)}; the name "
            f"of one axis, without a sequence, holds for all"
        )
    return axes


def _rows(tree: Any, axis: str | None, mesh: Mesh) -> Any:
    """Return this rank's rows of a tree."""
    if axis is None:
        return tree
    place, ranks = mesh.index(axis), mesh.sizes[axis]

    def mine(leaf: Any) -> Any:
        each, left = divmod(len(leaf), ranks)
        if left:
            raise ValueError(
                f"the number of rows must be a multiple of the {ranks} ranks along {axis}: got "
                f"{len(leaf)}; add rows"
            )
        return leaf[place * each : (place + 1) * each]

    return trees.tree_map(mine, tree)


def _together(tree: Any, axis: str | None, mesh: Mesh) -> Any:
    """Return the rows of all ranks along an axis."""
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
