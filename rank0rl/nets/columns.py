"""A network that sees some of the observation: an actor and a critic that see different things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Space
from rank0rl.options import OptionError, flag

Array = npt.NDArray[Any]


class Columns(nn.Module):
    """A network over some columns of its inputs.

    Args:
        net: takes these columns.
        columns: slices of the inputs, one behind the other.
    """

    def __init__(self, net: Any, columns: Sequence[slice]) -> None:
        """Combine them."""
        super().__init__()
        self.net, self.columns = net, tuple(columns)
        self.weights, self.biases = net.weights, net.biases

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs (N, outputs) from inputs (N, inputs)."""
        return self.net(torch.cat([x[:, some] for some in self.columns], dim=1))

    def numpy(self, x: Array) -> Array:
        """Compute outputs (..., outputs) from inputs (..., inputs) in NumPy."""
        return self.net.numpy(np.concatenate([x[..., some] for some in self.columns], axis=-1))


def columns_of(space: Space, names: Sequence[str], option: str) -> tuple[slice, ...] | None:
    """Return the columns of some keys of a Dict observation; None if there are no names.

    Args:
        space: the space of observations, flattened.
        names: the keys.
        option: the option that has them, for the error.

    Raises:
        OptionError: if an observation has no such key, or one is named twice.
    """
    wrong = [name for name in names if name not in space.parts]
    if wrong:
        has = f"the keys {', '.join(space.parts)}" if space.parts else "no keys: it is no Dict"
        raise OptionError(
            f"{flag(option)} must name keys of the observation: got {wrong[0]!r}; this environment's "
            f"observation has {has}"
        )
    if len({*names}) < len(names):
        raise OptionError(f"{flag(option)} must name each key once: got {', '.join(names)}")
    return tuple(space.parts[name] for name in names) or None
