"""Check what environments return from reset and step: the form that Gymnasium defines, and values that fit.

A full check takes microseconds. So `EnvBlock` makes it only at every reset, at the first step of every env in
an iteration, and where something that is not a bool ends an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLAGS = (bool, np.bool_)
"""Types of flags that need no further check."""


def check_reset(answer: Any, like: Array) -> None:
    """Raise ValueError unless a reset has returned an observation and an info.

    Args:
        answer: what the reset returned.
        like: an array of the shape and dtype that observations have here.
    """
    if not (has_length(answer, 2) and isinstance(answer[1], Mapping)):
        raise ValueError(
            f"reset must return an observation and an info, which is a dict, as gymnasium.Env "
            f"defines it: got {_short(answer)}"
        ) from None
    _check_value("the observation", answer[0], like.shape, like.dtype)


def check_step(answer: Any, like: Array) -> None:
    """Raise ValueError unless a step has returned an observation, a reward, two flags and an info.

    Args:
        answer: what the step returned.
        like: an array of the shape and dtype that observations have here.
    """
    if not has_length(answer, 5):
        raise ValueError(
            f"step must return an observation, reward, terminated, truncated and info, as "
            f"gymnasium.Env defines it: got {_short(answer)}"
        ) from None
    _check_value("the observation", answer[0], like.shape, like.dtype)
    _check_value("the reward", answer[1], (), np.dtype(np.float64))
    _check_value("terminated", answer[2], (), np.dtype(np.bool_))
    _check_value("truncated", answer[3], (), np.dtype(np.bool_))


def some_allowed(mask: Array, starts: Sequence[int]) -> Array:
    """Return, for each row of masks, whether it allows at least one value of each choice, (B,).

    Args:
        mask: masks, (B, all choices).
        starts: first column of each choice.
    """
    allowed: Array = np.logical_or.reduceat(mask, starts, axis=1)
    some: Array = np.all(allowed, axis=1)
    return some


def mask_of(info: Any, size: int) -> Array:
    """Return the action mask of an info, (size,). The masks of several choices are concatenated.

    Raises:
        ValueError: if the environment gave a mask before and does not now, or one of another size.
    """
    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None:
        raise ValueError(
            f'info["action_mask"] must come with every reset and every step once it has come: this '
            f"info is {_short(info)}"
        )
    mask = np.concatenate([np.ravel(each) for each in mask]) if isinstance(mask, tuple) else mask
    if np.size(mask) != size:
        raise ValueError(
            f'info["action_mask"] must have one entry for each of {size} choices: got shape '
            f"{np.shape(mask)}"
        )
    return np.ravel(mask)


def has_length(answer: Any, length: int) -> bool:
    """Return True if an answer is a tuple or list of this length."""
    return isinstance(answer, tuple | list) and len(answer) == length


def _check_value(what: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ValueError unless a value has this shape and fits into this dtype. Floats may be rounded."""
    try:
        array = np.asarray(value)
        fits = array.dtype.kind == dtype.kind and dtype.kind in "bf"
        if array.shape == shape and (fits or _is_equal(array, dtype)):
            return
    except (TypeError, ValueError, OverflowError):
        pass  # no numbers, or of several shapes
    kind = {"b": "True or False", "f": "real numbers"}.get(dtype.kind, f"numbers of {dtype}")
    raise ValueError(
        f"{what} must be {kind}, of shape {shape}: got {_short(value)}; make the environment return "
        f"what its spaces say"
    ) from None  # one error, and not numpy's before it


def _is_equal(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return True if the numbers stay the same in another dtype, such as int64 numbers in uint8."""
    return array.dtype.kind in "biufO" and bool((array.astype(dtype) == array).all())


def _short(value: Any) -> str:
    """Return a value in one line of text, with its dtype and shape if it is an array."""
    array = f"{value.dtype} {value.shape} " if isinstance(value, np.ndarray) else ""
    return array + " ".join(f"{value!r:.100}".split())
