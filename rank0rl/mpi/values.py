"""Numbers, arrays and tensors as arrays, and results back as what came in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Value(NamedTuple):
    """A number, array or tensor as an array."""

    array: Array
    """Its numbers; it may share memory with the value."""
    restore: Callable[[Array], Any]
    """Makes a result of the value's kind from an array."""
    layout: str
    """Kind, dtype and shape."""


def is_tensor(x: Any) -> bool:
    """Return True for a tensor. Torch is not loaded for that: who has not loaded it has no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_value(x: Any) -> Value:
    """Return a number, array, tensor or list of numbers as an array.

    Raises:
        TypeError: if it is anything else.
        ValueError: if it is a tensor that has no such array.
    """
    if is_tensor(x):
        return _tensor_as_value(x)
    if isinstance(x, np.ndarray | list | tuple):
        array = np.asarray(x)
        return Value(array, np.array, f"{array.dtype.str} {array.shape}")
    if isinstance(x, bool | int | float | complex | np.generic):
        array = np.asarray(x)
        plain = not isinstance(x, np.generic)
        return Value(
            array,
            lambda a: a.item() if plain and a.ndim == 0 else a[()],
            f"number {array.dtype.str}",
        )
    raise TypeError(
        f"expected a number, an array or a tensor: got {type(x).__name__}; make it one of these"
    )


def _tensor_as_value(x: Any) -> Value:
    torch = sys.modules["torch"]
    kind = ""
    if x.layout != torch.strided:
        kind = "sparse; pass tensor.to_dense()"
    elif x.device.type == "meta":
        kind = "on the meta device, where it has no data; make it on another device"
    if kind:
        raise ValueError(f"a tensor must be dense and hold data: got one that is {kind}")
    dtype, device = x.dtype, x.device
    try:
        there = x.detach().cpu().resolve_conj().resolve_neg()
        array = (there.float() if dtype == torch.bfloat16 else there).numpy()
    except (TypeError, ValueError, RuntimeError) as error:  # NumPy does not have all that torch has
        raise ValueError(
            f"a tensor of dtype {dtype} has no array ({error}); pass one that you have made of it, "
            f"such as tensor.float().cpu().numpy()"
        ) from error

    def restore(result: Array) -> Any:
        back = torch.from_numpy(np.array(result, order="C"))
        return back.to(device, dtype if result.dtype == array.dtype else None)

    return Value(array, restore, f"tensor {dtype} {tuple(x.shape)}, {device.type}")


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
