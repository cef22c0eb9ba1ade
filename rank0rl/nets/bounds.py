"""The bounds of actions, for policies whose draws all lie within them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rank0rl.agent import Space
from rank0rl.options import OptionError

Array = npt.NDArray[Any]


class Bounds:
    """Takes numbers in 0..1 to actions within an environment's bounds.

    Args:
        space: the space of actions, a box.
        kind: the distribution that needs bounds, for the error.

    Raises:
        OptionError: if a bound is missing or infinite.
    """

    def __init__(self, space: Space, kind: str) -> None:
        """Keep the bounds."""
        low, high = space.low, space.high
        with np.errstate(over="ignore", invalid="ignore"):
            width = None if low is None or high is None else high - low
        if low is None or high is None or width is None or not np.isfinite(width).all():
            raise OptionError(
                f"actions {kind!r} need finite bounds: this environment's are from {low} to {high}; "
                f"set --actions normal, or wrap it in RescaleAction or ClipAction"
            )
        self._shape = space.shape
        self._low = low.reshape(-1).astype(np.float32)
        self._width = high.reshape(-1).astype(np.float32) - self._low

    def numpy(self, share: Array) -> Array:
        """Return the actions, (B, *shape), for shares of the range, (B, k)."""
        act = self._low + self._width * share
        return act.reshape(-1, *self._shape)  # type: ignore[no-any-return]

    def torch(self, share: Tensor) -> Tensor:
        """Return the actions as `numpy` does."""
        act = torch.from_numpy(self._low) + torch.from_numpy(self._width) * share
        return act.reshape(-1, *self._shape)
