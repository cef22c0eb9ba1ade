"""Nested dicts, lists and the like: walk through them, and build the same tree with other leaves.

A function `items` says what counts as a container: it returns a container's keys and children, and
None for a leaf. Three of them are here: `dict_items`, `container_items` and `structure_items`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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


def same_kind(tree: Any, children: dict[Any, Any]) -> Any:
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
    build: Callable[[Any, dict[Any, Any]], Any] = same_kind,
) -> Any:
    """Return a tree of the same form with other leaves.

    Args:
        tree: the form.
        new: the new leaves, in the order of `leaves(tree)`.
        items: what counts as a container.
        build: (container, key -> new child) -> new container; `same_kind` or `plain`.
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
