"""Networks for images, and the choice between them and an MLP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.nets.columns import Columns
from rank0rl.nets.mlp import MLP
from rank0rl.nets.own import OwnNetwork, row_by_row
from rank0rl.options import OptionError

Array = npt.NDArray[Any]

Hidden: TypeAlias = Sequence[int] | nn.Module
"""Units of each hidden layer, or a network of one's own."""


_CPU_EPOCHS = 4  # usual for Atari games; the default for robots is 10


class ConvNet(nn.Module):
    """Convolutions that halve each side of an image, then an MLP. No kernel computes its gradient.

    In NumPy, a stack of rows (B, 1, inputs) is computed one row at a time, because a convolution of
    several images rounds differently.

    Args:
        shape: shape of an image: height and width, and channels (or frames) first or last. The
            channels are the shortest axis.
        hidden: units of each hidden layer of the MLP.
        outputs: number of outputs.
        rng: draws the weights.
        last_gain: scale of the last layer's weights.
        layers: "activation" and "layer_norm" of the MLP.
    """

    channels = (16, 32, 32)

    def __init__(
        self,
        shape: Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        rng: np.random.Generator,
        last_gain: float,
        **layers: Any,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self._shape, self._channels_last = tuple(shape), shape[2] <= shape[0]
        n, *sides = np.roll(shape, 1).tolist() if self._channels_last else shape
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.kernels, self.shifts = nn.ParameterList(), nn.ParameterList()
        for channels in self.channels:
            kernel = torch.empty(channels, n, 3, 3)
            nn.init.orthogonal_(kernel, math.sqrt(2), generator=torch_rng)
            self.kernels.append(nn.Parameter(kernel))
            self.shifts.append(nn.Parameter(torch.zeros(channels)))
            n, sides = channels, [(side + 1) // 2 for side in sides]
        self.mlp = MLP([n * math.prod(sides), *hidden, outputs], rng, last_gain, **layers)
        self.weights, self.biases = self.mlp.weights, self.mlp.biases

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs (N, outputs) from flattened images (N, inputs)."""
        x = x.reshape(-1, *self._shape)
        if self._channels_last:
            x = x.permute(0, 3, 1, 2)
        for kernel, shift in zip(self.kernels, self.shifts, strict=True):
            x = torch.relu(nn.functional.conv2d(x, kernel, shift, stride=2, padding=1))
        return self.mlp(x.flatten(1))

    def numpy(self, x: Array) -> Array:
        """Compute the outputs of NumPy arrays (N, inputs) or (B, 1, inputs)."""
        return row_by_row(self, x)


def is_image(shape: Sequence[int], dtype: str) -> bool:
    """Return True if observations are images: bytes with two sides and channels or frames."""
    return dtype == "uint8" and len(shape) == 3 and sorted(shape)[1] >= 8


def image_notes(networks: Iterable[Any], epochs: int, device: str) -> list[str]:
    """Return what updates on images cost, for the user, if they make many passes on a CPU.

    Args:
        networks: the agent's networks, and what else it has.
        epochs: passes over a batch.
        device: where updates compute.
    """
    parts = [part for n in networks if isinstance(n, nn.Module) for part in n.modules()]
    if device != "cpu" or epochs <= _CPU_EPOCHS or not any(isinstance(p, ConvNet) for p in parts):
        return []
    return [
        f"updates on images are slow on a CPU: use --device cuda, or few epochs (now {epochs}; "
        f"--epochs {_CPU_EPOCHS} or less); for example, ALE/Pong with 10 epochs made 49 steps/s, with "
        f"86 % of the time in updates, and the environment alone 1,686 steps/s"
    ]


def network(
    shape: Sequence[int],
    hidden: Hidden,
    outputs: int,
    rng: np.random.Generator,
    last_gain: float,
    columns: Sequence[slice] | None = None,
    **layers: Any,
) -> MLP | ConvNet | OwnNetwork | Columns:
    """Return a network for flattened observations: a ConvNet if their shape has three axes, else an MLP.

    Args:
        shape: (inputs,), or the shape of an image.
        hidden: units of each hidden layer; or a network of one's own, which is then used.
        outputs: number of outputs.
        rng: draws the weights.
        last_gain: scale of the last layer's weights.
        columns: the inputs that it sees, if not all.
        layers: "activation" and "layer_norm", see `MLP`.

    Raises:
        OptionError: if a network of one's own does not fit.
    """
    if columns:
        size = sum(some.stop - some.start for some in columns)
        return Columns(network((size,), hidden, outputs, rng, last_gain, **layers), columns)
    if isinstance(hidden, MLP):
        got, wanted = hidden.shape(), (math.prod(shape), outputs)
        if got != wanted:
            raise OptionError(f"this MLP must have {wanted} inputs and outputs: got {got}")
        return hidden
    if isinstance(hidden, nn.Module):
        return OwnNetwork(hidden, math.prod(shape), outputs)
    if len(shape) == 3:
        return ConvNet(shape, hidden, outputs, rng, last_gain, **layers)
    return MLP([math.prod(shape), *hidden, outputs], rng, last_gain, **layers)
