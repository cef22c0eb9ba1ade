"""EvoRL's distributed tools on arrays and tensors. A rank stands for one of EvoRL's devices.

Its axes and the collectives of trees over them are in `_evorl_axes`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rank0rl.compat import _evorl_axes
from rank0rl.compat._evorl_axes import AxisName, Mesh, current_mesh, laid, named, rebuilt, tree_map
from rank0rl.mpi import comm
from rank0rl.mpi.arrays import as_value
from rank0rl.mpi.gather import gather_many
from rank0rl.mpi.world import alone, attempt

__all__ = [
    "DP_AXIS_NAME",
    "PMAP_AXIS_NAME",
    "POP_AXIS_NAME",
    "Mesh",
    "TorchOptimizer",
    "agent_gradient_update",
    "all_gather",
    "get_global_ranks",
    "get_process_id",
    "gradient_update",
    "is_dist_initialized",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "shmap_map",
    "shmap_vmap",
    "split_key_to_devices",
    "tree_device_put",
    "unpmap",
    "use_axes",
]

DP_AXIS_NAME, POP_AXIS_NAME, PMAP_AXIS_NAME = _evorl_axes.DP, _evorl_axes.POP, _evorl_axes.P
use_axes, all_gather, unpmap = _evorl_axes.use_axes, _evorl_axes.all_gather, _evorl_axes.unpmap
psum, pmean = _evorl_axes.psum, _evorl_axes.pmean
pmax, pmin = _evorl_axes.pmax, _evorl_axes.pmin

Update = Callable[..., tuple[Any, Any, Any]]


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


@dataclasses.dataclass(frozen=True)
class TorchOptimizer:
    """One of torch's optimizers with the interface of optax. Each update copies its state.

    Args:
        make: function that makes an optimizer of a list of tensors, such as
            ``lambda params: torch.optim.Adam(params, lr=3e-4)``.
    """

    make: Callable[[list[Tensor]], torch.optim.Optimizer]

    def init(self, params: Any) -> dict[str, Any]:
        """Return the state before the first update."""
        return self.make(_copies(params)).state_dict()

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return what to add to the parameters, and the next state. `updates` are gradients.

        Raises:
            ValueError: if params is None.
        """
        if params is None:
            raise ValueError("torch's optimizers need the parameters: got None; pass params")
        before, after = named(params), _copies(params)
        optimizer = self.make(after)
        optimizer.load_state_dict(copy.deepcopy(state))
        for p, grad in zip(after, named(updates).values(), strict=True):
            p.grad = torch.as_tensor(grad, dtype=p.dtype).clone()
        optimizer.step()
        changes = [new.detach() - old for new, old in zip(after, before.values(), strict=True)]
        return rebuilt(params, changes), optimizer.state_dict()


def _copies(params: Any) -> list[Tensor]:
    return [torch.as_tensor(p).detach().clone().requires_grad_() for p in named(params).values()]


def _or_pmap_axis_name(function: Callable[..., Update]) -> Callable[..., Update]:
    """Let a function take `pmap_axis_name` as another name of `dp_axis_name`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Update:
        if "pmap_axis_name" in kwargs:
            if "dp_axis_name" in kwargs:
                raise TypeError("dp_axis_name and pmap_axis_name are one argument: got both")
            kwargs["dp_axis_name"] = kwargs.pop("pmap_axis_name")
        return function(*args, **kwargs)

    return call


@_or_pmap_axis_name
def gradient_update(
    loss_fn: Callable[..., Any], optimizer: Any, dp_axis_name: AxisName, has_aux: bool = False
) -> Update:
    """Return a function that makes one optimizer step down the gradient of a loss.

    Args:
        loss_fn: function of (params, ...) that returns the loss, a tensor of one number, or
            (loss, aux). params is a tree of tensors. Arrays are taken as tensors.
        optimizer: object with optax's `init` and `update`, such as a `TorchOptimizer`.
        dp_axis_name: axis of the ranks over which gradients are averaged. The keyword may be
            `pmap_axis_name` too.
        has_aux: True if loss_fn returns (loss, aux).

    Returns:
        A function of (opt_state, params, ...). It returns this rank's loss, or (loss, aux), then
        the new params and the new opt_state. It is collective over the ranks of the axis.
    """

    def update(opt_state: Any, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        params = tree_map(torch.as_tensor, params)
        value, grads = _value_and_grad(loss_fn, has_aux, params, *args, **kwargs)
        with torch.no_grad():
            changes, opt_state = optimizer.update(pmean(grads, dp_axis_name), opt_state, params)
            params = tree_map(lambda p, change: (p + change).to(p.dtype), params, changes)
        return value, params, opt_state

    return update


def _value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool, params: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Return the loss (and aux) without graph, and a tree of gradients: 0 for parameters it does not depend on."""
    live = [p.detach().requires_grad_() for p in named(params).values()]
    with torch.enable_grad():
        value = loss_fn(rebuilt(params, live), *args, **kwargs)
    loss = value[0] if has_aux else value
    grads = [torch.zeros_like(p) for p in live]
    if loss.requires_grad:
        grads = list(torch.autograd.grad(loss, live, allow_unused=True, materialize_grads=True))
    value = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)
    return value, rebuilt(params, grads)


def _attach_params(agent_state: Any, params: Any) -> Any:
    if dataclasses.is_dataclass(agent_state):
        return dataclasses.replace(agent_state, params=params)  # type: ignore[type-var]
    replace = getattr(agent_state, "_replace", None) or agent_state.replace
    return replace(params=params)


@_or_pmap_axis_name
def agent_gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    dp_axis_name: AxisName = None,
    has_aux: bool = False,
    attach_fn: Callable[[Any, Any], Any] = _attach_params,
    detach_fn: Callable[[Any], Any] = operator.attrgetter("params"),
) -> Update:
    """Do what `gradient_update` does, on an agent's state that holds the parameters.

    Args:
        loss_fn: function of (agent_state, ...) that returns the loss, or (loss, aux).
        optimizer: as in `gradient_update`.
        dp_axis_name: as in `gradient_update`.
        has_aux: as in `gradient_update`.
        attach_fn: function of (agent_state, params) that returns the state with these parameters.
            The default replaces `params` of a dataclass, of a namedtuple, or of an object with a
            method `replace`.
        detach_fn: function of agent_state that returns its parameters. The default returns
            `params`.

    Returns:
        A function of (opt_state, agent_state, ...). It returns the loss, or (loss, aux), then the
        new state and the new opt_state.
    """

    def loss_of_params(params: Any, agent_state: Any, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(attach_fn(agent_state, params), *args, **kwargs)

    step = gradient_update(loss_of_params, optimizer, dp_axis_name, has_aux)

    def update(opt_state: Any, agent_state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        params = detach_fn(agent_state)
        value, params, opt_state = step(opt_state, params, agent_state, *args, **kwargs)
        return value, attach_fn(agent_state, params), opt_state

    return update


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
    """Return a function like that of `shmap_map` that runs all rows of a rank at once, by torch.vmap.

    Arrays reach fn as tensors. If all arguments are arrays, the results are arrays again. Random
    numbers that fn draws differ between rows.
    """
    return _shard_map(lambda *args: _batched(fn, args), mesh, in_specs, out_specs)


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
    counts = {len(leaf) for shard in shards for leaf in named(shard).values()}
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
    gather_many({}, "shmap", mesh.comm(axis), problem)


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

    return tree_map(mine, tree)


def _together(tree: Any, axis: str | None, mesh: Mesh) -> Any:
    """Return the rows of all ranks along an axis."""
    if axis is None:
        return tree
    whole = gather_many(named(tree), "shmap", mesh.comm(axis))
    return rebuilt(tree, [laid(stacked, 0, tiled=True) for stacked in whole.values()])


def _in_sequence(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    count = len(next(iter(named(args).values())))
    rows = [tree_map(operator.itemgetter(i), tuple(args)) for i in range(count)]
    results = [fn(*row) for row in rows]
    return tree_map(_stacked, *results)


def _stacked(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else np.stack(values)


def _batched(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    leaves = named(tuple(args)).values()
    made: list[Any] = []

    def of_leaves(*parts: Tensor) -> tuple[Tensor, ...]:
        made.append(fn(*rebuilt(tuple(args), parts)))
        return tuple(map(torch.as_tensor, named(made[-1]).values()))

    results: Any = torch.vmap(of_leaves, randomness="different")(*map(torch.as_tensor, leaves))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        results = [t.detach().numpy() for t in results]
    return rebuilt(made[-1], results)


def tree_device_put(tree: Any, device: torch.device | str) -> Any:
    """Return the tree with all leaves as tensors on a device."""

    def put(leaf: Any) -> Tensor:
        return leaf.to(device) if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device)

    return tree_map(put, tree)
