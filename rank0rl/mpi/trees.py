"""Nested dicts and lists: walk through them, read their leaves as arrays, and build them again.

A function `items` says what counts as a container: it returns a container's keys and children, and
None for a leaf. Three of them are here: `dict_items`, `container_items` and `structure_items`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Path = tuple[Any, ...]
Items = Callable[[Any], Iterable[tuple[Any, Any]] | None]


def dict_items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a dict; None for a leaf, which is anything else."""
    return tree.items() if isinstance(tree, Mapping) else None


def container_items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and children of a dict, list or tuple; None for a leaf."""
    return enumerate(tree) if isinstance(tree, list | tuple) else dict_items(tree)


def structure_items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and children of a dict, list, tuple or dataclass; None for a leaf.

    None is a container without children.
    """
    if tree is None:
        return ()
    children = container_items(tree)
    if children is None and dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return children


def walk(tree: Any, items: Items = structure_items, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of every container and leaf; containers before their children."""
    yield path, tree
    for key, child in items(tree) or ():
        yield from walk(child, items, (*path, key))


def leaves(tree: Any, items: Items = structure_items) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of every leaf, in order."""
    return ((path, value) for path, value in walk(tree, items) if items(value) is None)


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a structure by name, such as "x['actor'][0]"."""
    return {"x" + "".join(f"[{key!r}]" for key in path): leaf for path, leaf in leaves(tree)}


def _same_kind(tree: Any, children: dict[Any, Any]) -> Any:
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


def plain(tree: Any, children: dict[Any, Any]) -> Any:
    """Return a dict of the children where `tree` is a mapping, else a list."""
    return children if isinstance(tree, Mapping) else list(children.values())


def rebuilt(
    tree: Any,
    new: Iterable[Any],
    items: Items = structure_items,
    build: Callable[[Any, dict[Any, Any]], Any] = _same_kind,
) -> Any:
    """Return a tree of the same form with other leaves.

    Args:
        tree: the form.
        new: the new leaves, in the order of `leaves(tree)`.
        items: what counts as a container.
        build: (container, key -> new child) -> new container; `_same_kind` or `plain`.
    """
    rest = iter(new)

    def build_from(old: Any) -> Any:
        children = items(old)
        if children is None:
            return next(rest)
        return build(old, {key: build_from(child) for key, child in children})

    return build_from(tree)


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a structure of fn(leaf, leaves of the other trees at the same path)."""
    each = [dict(leaves(other)) for other in others]
    return rebuilt(tree, [fn(leaf, *(o[p] for o in each)) for p, leaf in leaves(tree)])


Array = npt.NDArray[Any]

_ARRAYS = (np.ndarray, list, tuple)
_NUMBERS = (bool, int, float, complex, np.generic)


class Kind(NamedTuple):
    """Kind, dtype, shape and device of a value: the ranks must agree on them."""

    name: str
    """"number", "tensor", or "" for arrays and weights."""
    dtype: Any
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        plain = isinstance(self.dtype, np.dtype) and not self.dtype.names
        dtype = self.dtype.str if plain else self.dtype
        if self.name == "number":
            return f"number {dtype}"
        where = f", {self.device}" if self.device else ""
        return f"{self.name} {dtype} {tuple(self.shape)}{where}".strip()


class Value(NamedTuple):
    """A number, array or tensor as an array."""

    array: Array
    """Its numbers; it may share memory with the value."""
    restore: Callable[[Array], Any]
    """Makes a result of the value's kind from an array."""
    kind: Kind


def is_tensor(x: Any) -> bool:
    """Return True for a tensor. Torch is not loaded for that: who has not loaded it has no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_dense(x: Any) -> bool:
    """Return True for a tensor that has memory of its own, of which NumPy could have a view."""
    return is_tensor(x) and x.layout is sys.modules["torch"].strided and not x.is_meta


def as_value(x: Any) -> Value:
    """Return a number, array, tensor or list of numbers as an array.

    Raises:
        TypeError: if it is anything else.
        ValueError: if it is a tensor that has no such array.
    """
    if is_tensor(x):
        return _tensor_as_value(x)
    if isinstance(x, _ARRAYS):
        array = np.asarray(x)
        return Value(array, np.array, Kind("", array.dtype, array.shape, ""))
    if isinstance(x, _NUMBERS):
        array = np.asarray(x)
        plain = not isinstance(x, np.generic)
        kind = Kind("number", array.dtype, (), "")
        return Value(array, lambda a: a.item() if plain and a.ndim == 0 else a[()], kind)
    raise TypeError(
        f"expected a number, an array or a tensor: got {type(x).__name__}; make it one of these"
    )


def _tensor_as_value(x: Any) -> Value:
    torch = sys.modules["torch"]
    kind = ""
    if x.layout is not torch.strided:
        kind = "sparse; pass tensor.to_dense()"
    elif x.is_meta:
        kind = "on the meta device, where it has no data; make it on another device"
    if kind:
        raise ValueError(f"a tensor must be dense and hold data: got one that is {kind}")
    dtype, device = x.dtype, x.device
    try:
        there = x.detach().cpu()
        if there.is_conj() or there.is_neg():
            there = there.resolve_conj().resolve_neg()
        array = (there.float() if dtype == torch.bfloat16 else there).numpy()
    except (TypeError, ValueError, RuntimeError) as error:  # NumPy does not have all that torch has
        raise ValueError(
            f"a tensor of dtype {dtype} has no array ({error}); pass one that you have made of it, "
            f"such as tensor.float().cpu().numpy()"
        ) from error

    def restore(result: Array) -> Any:
        usable = result.flags.c_contiguous and result.flags.writeable
        back = torch.from_numpy(result if usable else np.array(result, order="C"))
        if result.dtype == array.dtype:
            return back if back.dtype == dtype and device.type == "cpu" else back.to(device, dtype)
        return back.to(device)

    return Value(array, restore, Kind("tensor", dtype, x.shape, device.type))


def tensor_restorer(dtype: str) -> Callable[[Array], Any]:
    """Return `Value.restore` of a tensor in main memory, for a rank that has no such tensor.

    Args:
        dtype: name of the tensor's dtype, such as "torch.float32".
    """
    import torch  # a rank that has not loaded it gets tensors of others now

    return as_value(torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))).restore


def as_values(things: Mapping[str, Any], op: str = "") -> dict[str, Value]:
    """Return things as arrays, sorted by name.

    Args:
        things: name -> number, array, tensor or list of numbers.
        op: what is to be computed with them, such as "max"; "" for nothing.

    Raises:
        ValueError: if one of them cannot be sent, or `op` cannot be computed with it.
    """
    values = {}
    for name in sorted(things):
        try:
            values[name] = as_value(things[name])
            check_numbers(values[name].array, op)
        except Exception as error:  # NumPy and torch have many
            raise ValueError(f"{name!r}: {error}") from error
    return values


def check_numbers(array: Array, op: str) -> None:
    """Raise TypeError unless an array holds numbers with which `op` can be computed."""
    if array.dtype.kind not in "biufc":
        raise TypeError(f"expected numbers: got dtype {array.dtype}; convert it to a numeric dtype")
    if array.dtype.kind == "c" and op in ("max", "min"):
        raise TypeError(f"complex numbers have no {op}: got dtype {array.dtype}; take real parts")
