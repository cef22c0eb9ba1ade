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
        if not all(p.requires_grad for p in module.parameters()):
            raise OptionError(
                f"all parameters of {type(module).__name__} must learn: some have requires_grad False"
            )
        self.module, self.inputs = module.eval(), inputs
        try:
            with torch.no_grad():
                got: Any = tuple(module(torch.zeros(2, inputs)).shape)
        except Exception as error:  # whatever the user's module raises
            got = f"{type(error).__name__}: {error}"
        if got != (2, outputs):
            raise OptionError(
                f"{type(module).__name__} must return {(2, outputs)} for inputs {(2, inputs)}: got "
                f"{got}; see docs/policies.md"
            )
        last = module
        while isinstance(last, nn.Sequential) and len(last):
            last = last[-1]
        linear = [last] if isinstance(last, nn.Linear) else []
        self.weights = [part.weight for part in linear]
        """Weights of the last layer, if the module is linear or ends with such a layer."""
        self.biases = [part.bias for part in linear if part.bias is not None]

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs (N, outputs) from inputs (N, inputs)."""
        return self.module(x)

    def numpy(self, x: Array) -> Array:
        """Compute the outputs of NumPy arrays (N, inputs) or (B, 1, inputs)."""
        return row_by_row(self, x)


def row_by_row(module: nn.Module, x: Array) -> Array:
    """Compute the outputs of NumPy arrays: of (N, inputs) at once, of (B, 1, inputs) row by row."""
    with torch.no_grad():
        if x.ndim == 2:
            return module(torch.from_numpy(x)).numpy()
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
