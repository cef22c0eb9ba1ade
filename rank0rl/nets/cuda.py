"""Gradient steps on a GPU: a twin of the modules there, and one minibatch as a CUDA graph.

The modules at home, on the CPU, stay what acts, is broadcast and is saved; the twin takes their
weights at the beginning of an update, and gives them back at its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch
from rank0rl.nets.flat import Adam, flatten_

Loss = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""Takes the twin and a minibatch's arrays, by name; gives the loss, and what to record of it."""


def check_device(device: str) -> None:
    """Make sure that there is such a device.

    Raises:
        ValueError: if it is no CPU or CUDA device, or this machine or this torch has none of it.
    """
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:1: got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} needs a GPU that torch sees: torch {torch.__version__} sees none; "
            f"check nvidia-smi, and that torch is a CUDA build (pytorch.org/get-started), or leave "
            f"--device out"
        )
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(
            f"there is no device {device!r}: this machine has cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}"
        )


class Twin:
    """A copy of modules on another device, and of the Adam that trains them.

    Args:
        home: the modules, on the CPU.
        adam: over their flat parameters.
        loss: of a minibatch.
        max_grad_norm: to which a larger gradient is scaled down.
        device: such as "cuda".
    """

    def __init__(
        self,
        home: nn.Module,
        adam: Adam,
        loss: Loss,
        max_grad_norm: float,
        device: str,
    ) -> None:
        """Copy the modules."""
        self._home, self._home_adam = home, adam
        self._loss, self._max_grad_norm, self._device = loss, max_grad_norm, torch.device(device)
        self._module = copy.deepcopy(home).to(self._device)
        self._flat = flatten_(self._module)
        self._adam = adam.over(self._flat)
        self._lr = torch.zeros((), device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}  # of the graph
        self._outputs: tuple[Tensor, ...] = ()

    def begin(self, rows: Batch, minibatch_size: int) -> dict[str, Tensor]:
        """Take the weights from home, and move a batch: once for all of its epochs."""
        with self._current():
            return self._begin(rows, minibatch_size)

    def _begin(self, rows: Batch, minibatch_size: int) -> dict[str, Tensor]:
        on_device = {name: torch.from_numpy(x).to(self._device) for name, x in rows.items()}
        if self._device.type == "cuda":
            first = {name: x[:minibatch_size] for name, x in on_device.items()}
            if _shapes(first) != _shapes(self._inputs):
                self._capture(first)
        self._module.load_state_dict(self._home.state_dict())
        self._adam.load(self._home_adam.state())
        return on_device

    def step(self, part: dict[str, Tensor], lr: float) -> tuple[Tensor, ...]:
        """One gradient step on a minibatch.

        Returns:
            What the loss gives to record.
        """
        with self._current():
            return self._replay(part, lr)

    def _replay(self, part: dict[str, Tensor], lr: float) -> tuple[Tensor, ...]:
        self._lr.fill_(lr)
        if self._graph is None or _shapes(part) != _shapes(self._inputs):
            return self._step(part)
        for name, x in part.items():
            self._inputs[name].copy_(x)
        self._graph.replay()
        return tuple(x.clone() for x in self._outputs)

    def end(self) -> None:
        """Give weights and Adam's moments back."""
        self._home.load_state_dict(self._module.state_dict())
        self._home_adam.load(self._adam.state())

    def _current(self) -> AbstractContextManager[Any]:
        """What makes streams and graphs those of this device, where there are several."""
        on_gpu = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_gpu else nullcontext()

    def _step(self, part: dict[str, Tensor]) -> tuple[Tensor, ...]:
        loss, seen = self._loss(self._module, **part)
        self._flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._flat.limit_norm(self._max_grad_norm)
        self._adam.step(self._lr)
        return tuple(x.detach() for x in seen)

    def _capture(self, part: dict[str, Tensor]) -> None:
        """Record one step. It trains, on nonsense: `begin` loads the weights afterwards."""
        self._inputs = {name: x.clone() for name, x in part.items()}
        self._lr.zero_()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch.cuda.graph asks for: some steps before it records
            for _ in range(3):
                self._step(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._step(self._inputs)


def _shapes(part: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in part.items()}


def joined(parts: list[Any]) -> np.ndarray[Any, Any]:
    """Arrays or tensors of any device, as one array."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts).cpu().numpy()  # type: ignore[no-any-return]
    return np.concatenate(parts)
