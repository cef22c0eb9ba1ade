"""Nested dicts, lists, tuples, namedtuples and dataclasses: their leaves, and the same of other leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def leaves(tree: Any, path: str = "x") -> dict[str, Any]:
    """Path, such as "x['actor'][0]", -> leaf. None is a tree without leaves."""
    children = _children(tree)
    if children is None:
        return {path: tree}
    found: dict[str, Any] = {}
    for key, child in children.items():
        found |= leaves(child, f"{path}[{key!r}]")
    return found


def rebuilt(tree: Any, new: Mapping[str, Any], path: str = "x") -> Any:
    """A tree of the same form, whose leaves are those of these paths."""
    children = _children(tree)
    if children is None:
        return new[path]
    parts = {key: rebuilt(child, new, f"{path}[{key!r}]") for key, child in children.items()}
    if tree is None:
        return None
    if isinstance(tree, dict):
        filled = copy.copy(tree)  # keeps what else a kind of dict knows
        filled.update(parts)
        return filled
    if isinstance(tree, list | tuple):
        kind: Any = type(tree)
        return kind(*parts.values()) if hasattr(tree, "_fields") else kind(parts.values())
    return dataclasses.replace(tree, **parts)


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree of what a function makes of each leaf, and of those of other trees in the same place."""
    first, *rest = (leaves(each) for each in (tree, *others))
    return rebuilt(tree, {p: fn(leaf, *(each[p] for each in rest)) for p, leaf in first.items()})


def _children(tree: Any) -> dict[Any, Any] | None:
    """Key -> subtree; None for a leaf."""
    if tree is None:
        return {}
    if isinstance(tree, dict):
        return dict(tree)
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None
