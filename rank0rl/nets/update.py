"""Gradient steps of policies and value functions: in compiled kernels where they can, by autograd elsewhere.

The modules at home, on the CPU, act, are broadcast and are saved. The twin takes their weights at
the start of an update and returns them at its end.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, minibatches
from rank0rl.nets.actor_critic import ActorCritic, Objective, ValueFunction
from rank0rl.nets.flat import Adam, flatten_
from rank0rl.nets.mlp import has_kernels

Array = npt.NDArray[Any]


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ValueError: if it is not a CPU or CUDA device, or this machine or this torch lacks it.
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
            f"check nvidia-smi and that torch is a CUDA build (pytorch.org/get-started), or leave "
            f"out --device"
        )
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(
            f"there is no device {device!r}: this machine has cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}; set --device to one of them"
        )


class AutogradSteps:
    """A copy of modules on another device, and of the Adam that trains them.

    Args:
        home: the modules, on the CPU.
        adam: the optimizer of their flat parameters.
        objective: computes the loss of a minibatch.
        max_grad_norm: norm to which a larger gradient is scaled down.
        device: where the steps compute, such as "cuda".
    """

    def __init__(
        self,
        home: nn.Module,
        adam: Adam,
        objective: Any,
        max_grad_norm: float,
        device: str,
    ) -> None:
        """Copy the modules."""
        self._home, self._home_adam = home, adam
        self._objective, self._max_grad_norm = objective, max_grad_norm
        self._device = torch.device(device)
        self._module = copy.deepcopy(home).to(self._device)
        self._flat = flatten_(self._module)
        self._adam = adam.over(self._flat)
        self._lr = torch.zeros((), device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}  # the graph reads these
        self._outputs: tuple[Tensor, ...] = ()

    def compile(self) -> None:
        """Do nothing: a CUDA graph is captured from the first minibatch."""

    def begin(self, rows: Batch, minibatch_size: int, objective: Any) -> dict[str, Any]:
        """Take the weights from home, and move the rows to the device: once for all epochs.

        Args:
            rows: what the loss takes, N rows.
            minibatch_size: rows of a gradient step.
            objective: its `loss` is that of this update.

        Returns:
            The rows on the device.
        """
        if objective is not self._objective:
            self._objective, self._inputs = objective, {}  # a graph holds its coefficients
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

    def epoch(
        self, rows: dict[str, Any], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, ...]:
        """Make the gradient steps of one epoch.

        Args:
            rows: what `begin` returned, N rows.
            minibatch_size: rows of a gradient step; the last one takes what is left.
            rng: draws the order of rows.
            lr: step size.

        Returns:
            What the loss gives to record, of all minibatches.
        """
        with self._current():
            epoch: Any = minibatches(rows, minibatch_size, rng)
            seen = [self._replay(minibatch, lr) for minibatch in epoch]
        return tuple(torch.cat(tensors).cpu().numpy() for tensors in zip(*seen, strict=True))

    def _replay(self, minibatch: dict[str, Tensor], lr: float) -> tuple[Tensor, ...]:
        self._lr.fill_(lr)
        if self._graph is None or _shapes(minibatch) != _shapes(self._inputs):
            return self._step(minibatch)
        for name, x in minibatch.items():
            self._inputs[name].copy_(x)
        self._graph.replay()
        return tuple(x.clone() for x in self._outputs)

    def end(self) -> None:
        """Give weights and Adam's moments back to home."""
        self._home.load_state_dict(self._module.state_dict())
        self._home_adam.load(self._adam.state())

    def _current(self) -> AbstractContextManager[Any]:
        """Return a context in which streams and graphs are those of this device."""
        on_gpu = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_gpu else nullcontext()

    def _step(self, minibatch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        loss, seen = self._objective.loss(self._module, **minibatch)
        self._flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._flat.limit_norm(self._max_grad_norm)
        self._adam.step(self._lr)
        return tuple(x.detach() for x in seen)

    def _capture(self, minibatch: dict[str, Tensor]) -> None:
        """Record one step. That changes weights and moments, which `begin` loads afterwards."""
        self._inputs = {name: x.clone() for name, x in minibatch.items()}
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


def _shapes(minibatch: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in minibatch.items()}


if TYPE_CHECKING:
    from rank0rl.nets.kernels.steps import CompiledSteps

GradientSteps: TypeAlias = Union["CompiledSteps", AutogradSteps]
"""Gradient steps of one update: `begin`, `epoch` as often as needed, `end`. `compile` before the first."""


def gradient_steps(
    nets: ActorCritic,
    adam: Adam,
    objective: Objective,
    max_grad_norm: float,
    device: str = "cpu",
    threads: int = 1,
    bonus: bool = True,
) -> GradientSteps:
    """Return compiled gradient steps for MLPs and a clipped loss on the CPU, and those by autograd else.

    Args:
        nets: the networks, on the CPU, flat, with gradients in place.
        adam: over the parameters of policy and value function.
        objective: the loss of a minibatch.
        max_grad_norm: norm to which a larger gradient is scaled down.
        device: where the steps compute, such as "cpu" or "cuda".
        threads: number of threads on the CPU; the results do not depend on it.
        bonus: True if some objective will have an entropy bonus.
    """
    trained = nets.trained()
    known = type(objective) is Objective and objective.clip_ratio is not None
    if bonus and getattr(nets.policy, "bounds", None):
        known = False  # the entropy of squashed actions has no kernel
    if device == "cpu" and known and has_kernels(nets.policy, nets.value):
        from rank0rl.nets.kernels.steps import CompiledSteps

        return CompiledSteps(trained, adam, objective, max_grad_norm, threads)
    return AutogradSteps(trained, adam, objective, max_grad_norm, device)


class ValueFit:
    """Minimizes E[(V - R)^2], with R in units of the value function's scale.

    Args:
        value: the value function, flat, with gradients in place.
        adam: the optimizer of its parameters.
        threads: number of threads; the results do not depend on it.
    """

    def __init__(self, value: ValueFunction, adam: Adam, threads: int) -> None:
        """Compile the gradient steps if the network is an MLP, or load them from the cache."""
        self._value = value
        self._steps: Any = _AutogradFit(value, adam)
        if has_kernels(value):
            from rank0rl.nets.kernels.steps import (
                CompiledFit,  # the compiler, which only rank 0 needs
            )

            self._steps = CompiledFit(value, adam, threads)
            self._steps.compile()

    def __call__(
        self,
        x: Array,
        ret: Array,
        rng: np.random.Generator,
        *,
        lr: float,
        epochs: int,
        minibatch_size: int,
    ) -> float:
        """Make the gradient steps.

        Args:
            x: inputs, (N, inputs).
            ret: returns in units of reward, (N,).
            rng: draws the order of rows.
            lr: Adam's step size.
            epochs: passes over the rows.
            minibatch_size: rows per gradient step.

        Returns:
            Mean squared error over the last epoch, each minibatch's from before its step.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        ret, error = ret / self._value.scale.numpy(), np.empty(0)
        for _ in range(epochs):
            error = self._steps.epoch(x, ret, minibatch_size, rng, lr)
        return float(np.square(error).mean())


class _AutogradFit:
    """Does what `CompiledFit` does, for any network."""

    def __init__(self, value: ValueFunction, adam: Adam) -> None:
        self._value, self._adam = value, adam

    def epoch(
        self, x: Array, ret: Array, minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> Array:
        errors = []
        for few in minibatches({"x": x, "ret": ret}, minibatch_size, rng):
            self._adam.flat.zero_grad()
            error = self._value(torch.from_numpy(few["x"])) - torch.from_numpy(few["ret"])
            error.square().mean().backward()
            self._adam.step(lr)
            errors.append(error.detach().numpy())
        return np.concatenate(errors)
