"""Numbers, arrays and tensors as NumPy arrays, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUMBERS = (bool, int, float, complex, np.generic)
SAME = "kinds, dtypes and shapes"  # what ranks must agree on, for messages


class Kind(NamedTuple):
    """Kind, dtype, shape and device of a value: the ranks must agree on them."""

    name: str
    """"number", "list", or "" for arrays, tensors and weights."""
    dtype: Any
    """NumPy's; torch's for a tensor."""
    shape: tuple[int, ...]
    device: str = ""

    def __str__(self) -> str:
        if self.name == "list":
            return "a list"
        plain = isinstance(self.dtype, np.dtype) and not self.dtype.names
        dtype = self.dtype.str if plain else self.dtype
        if self.name == "number":
            return f"one number, {dtype}"
        return f"{dtype} {tuple(self.shape)}" + (f", {self.device}" if self.device else "")


class Value(NamedTuple):
    """A number, array or tensor as an array."""

    array: Array
    """Its numbers; it may share memory with the value."""
    restore: Callable[[Array], Any]
    """Makes a result of the value's kind from an array."""
    kind: Kind

    @property
    def dtype(self) -> str:
        """Name of the dtype. A tensor of bfloat16 has an array of float32."""
        given = str(self.kind.dtype)
        return given if given == "torch.bfloat16" else str(self.array.dtype)


def is_tensor(x: Any) -> bool:
    """Return True for a tensor. Torch is not loaded for that: who has not loaded it has no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_value(x: Any) -> Value:
    """Return a number, array, tensor or list of numbers as an array.

    Raises:
        TypeError: if it is anything else, or an array with a mask, which would be lost.
        ValueError: if it is a tensor that has no such array.
    """
    if is_tensor(x):
        return _tensor_as_value(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            "a mask is not sent: got a masked array; pass x.filled(...) or x.compressed()"
        )
    if isinstance(x, np.ndarray | list | tuple):
        array = np.asarray(x)
        return Value(array, np.array, Kind("", array.dtype, array.shape))
    if isinstance(x, NUMBERS):
        array = np.asarray(x)
        plain = not isinstance(x, np.generic)
        kind = Kind("number", array.dtype, ())
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
        there = x.detach().cpu().resolve_conj().resolve_neg()
        array = (there.float() if dtype == torch.bfloat16 else there).numpy()
    except (TypeError, ValueError, RuntimeError) as error:  # NumPy does not have all that torch has
        raise ValueError(
            f"a tensor of dtype {dtype} has no array ({error}); pass one that you have made of it, "
            f"such as tensor.float().cpu().numpy()"
        ) from error

    def restore(result: Array) -> Any:
        usable = result.flags.c_contiguous and result.flags.writeable
        back = torch.from_numpy(result if usable else np.array(result, order="C"))
        return back.to(device, dtype if result.dtype == array.dtype else back.dtype)

    return Value(array, restore, Kind("", dtype, x.shape, device.type))


def fill(x: Any, array: Array) -> None:
    """Overwrite an array or a tensor with as many numbers, in any shape. No gradient flows through this.

    Raises:
        TypeError: for anything else.
        ValueError: if it is read-only.
        RuntimeError: if several of a tensor's numbers are in one place of memory.
    """
    if isinstance(x, np.ndarray):
        x[...] = array.reshape(x.shape)
    elif is_tensor(x):
        torch = sys.modules["torch"]
        with torch.no_grad():
            x.copy_(torch.from_numpy(array).reshape(x.shape))
    else:
        raise TypeError(f"expected an array or a tensor to write to: got {type(x).__name__}")


def as_values(things: Mapping[str, Any], op: str = "") -> dict[str, Value]:
    """Return numbers, arrays, tensors and lists of numbers as arrays, sorted by name.

    Args:
        things: name -> value.
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
