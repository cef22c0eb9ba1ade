"""Networks of one's own: any torch modules, which act and learn through torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.options import OptionError

Array = npt.NDArray[Any]

_DIFFER = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


class OwnNetwork(nn.Module):
    """A torch module as a network of a policy or a value function. It stays in eval mode.

    A product of several rows rounds differently from that of one. So a stack of rows (B, 1, inputs) is
    computed one row at a time.

    Args:
        module: from normalized observations (N, inputs) to (N, outputs).
        inputs: number of inputs.
        outputs: number of outputs.

    Raises:
        OptionError: if it has another shape, or acts otherwise than it learns.
    """

    def __init__(self, module: nn.Module, inputs: int, outputs: int) -> None:
        """Check the module."""
        super().__init__()
        for name, part in module.named_modules():
            if isinstance(part, _DIFFER):
                raise OptionError(
                    f"{type(part).__name__} ({name!r} of {type(module).__name__}) does another thing "
                    f"when it learns than when it acts, so ratios of probabilities would be wrong: "
                    f"use LayerNorm, or leave it out; observations are normalized already"
                )
        self.module, self.inputs = module.eval(), inputs
        with torch.no_grad():
            got = tuple(module(torch.zeros(2, inputs)).shape)
        if got != (2, outputs):
            raise OptionError(
                f"{type(module).__name__} must return {(2, outputs)} for inputs {(2, inputs)}: got "
                f"{got}; see make_networks in the guide"
            )
        linear = [part for part in module.modules() if isinstance(part, nn.Linear)][-1:]
        last = [part for part in linear if part.out_features == outputs]
        self.weights = [part.weight for part in last]
        """Weights of the last layer, if that is linear."""
        self.biases = [part.bias for part in last if part.bias is not None]

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs (N, outputs) from inputs (N, inputs)."""
        return self.module(x)  # type: ignore[no-any-return]

    def numpy(self, x: Array) -> Array:
        """Compute the outputs of NumPy arrays (N, inputs) or (B, 1, inputs)."""
        return row_by_row(self, x)


def row_by_row(module: nn.Module, x: Array) -> Array:
    """Compute the outputs of NumPy arrays: of (N, inputs) at once, of (B, 1, inputs) row by row."""
    with torch.no_grad():
        if x.ndim == 2:
            return module(torch.from_numpy(x)).numpy()  # type: ignore[no-any-return]
        return np.stack([module(torch.from_numpy(row)).numpy() for row in x])


def cost_notes(networks: Iterable[Any]) -> list[str]:
    """Return what acting one row at a time costs, for the user, if these networks do so."""
    parts = [part for n in networks if isinstance(n, nn.Module) for part in n.modules()]
    for own in (part for part in parts if isinstance(part, OwnNetwork)):
        x = np.zeros((16, 1, own.inputs), np.float32)
        own.numpy(x)
        start = time.perf_counter()
        own.numpy(x)
        each = 1e6 * (time.perf_counter() - start) / len(x)
        return [
            f"networks of your own act one row at a time, {each:.0f} us each, because torch rounds "
            f"several rows differently; rank0rl.nets.mlp.MLP takes less than 10 us"
        ]
    return []
