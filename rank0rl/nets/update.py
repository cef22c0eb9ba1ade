"""Gradient steps of an update: in compiled kernels where possible, by autograd elsewhere.

This module is the door to `nets.kernels`, and loads the compiler when it is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, minibatches
from rank0rl.nets.actor_critic import ActorCritic, Objective, ValueFunction
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.mlp import MLP
from rank0rl.nets.policies import Policy

if TYPE_CHECKING:
    from rank0rl.nets.kernels.steps import CompiledSteps

Array = npt.NDArray[Any]

GradientSteps: TypeAlias = Union["CompiledSteps", "AutogradSteps"]
"""Gradient steps of updates: in each, `begin`, `epoch` as often as needed, `end`."""

Product: TypeAlias = Callable[[Tensor], Tensor]


def has_kernels(*networks: Any) -> bool:
    """Return True if kernels know these policies and value functions: MLPs with tanh, of known classes.

    A class that kernels know has a method `tables`. A class derived from it may compute something else.
    """
    return all(
        "tables" in vars(type(n))
        and type(n.mlp) is MLP
        and n.mlp.activation == "tanh"
        and not n.mlp.norms
        for n in networks
    )


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
    known = type(objective) is Objective and objective.clip_ratio is not None and not nets.shared
    if bonus and getattr(nets.policy, "bounds", None):
        known = False  # the entropy of squashed actions has no kernel
    if device == "cpu" and known and has_kernels(nets.policy, nets.value):
        from rank0rl.nets.kernels.steps import CompiledSteps

        return CompiledSteps(trained, adam, objective, max_grad_norm, threads)
    return AutogradSteps(trained, adam, objective, max_grad_norm, device)


class AutogradSteps:
    """Gradient steps by autograd, on a copy of the modules, which may be on another device.

    The modules at home, on the CPU, act, are broadcast and are saved. The copy takes their weights at
    the start of an update and returns them at its end.

    The arguments are those of `gradient_steps`; `home` are the modules.
    """

    def __init__(
        self, home: nn.Module, adam: Adam, objective: Any, max_grad_norm: float, device: str
    ) -> None:
        self._home, self._home_adam = home, adam
        self._objective, self._max_grad_norm = objective, max_grad_norm
        self._device = torch.device(device)
        self._module = copy.deepcopy(home).to(self._device)
        self._flat = Flat(self._module)
        self._adam = Adam(self._flat, adam.eps)

    def begin(self, rows: Batch, objective: Any) -> dict[str, Any]:
        """Take the weights from home, and the objective of this update; return the rows, on the device."""
        self._objective = objective
        self._module.load_state_dict(self._home.state_dict())
        self._adam.load(self._home_adam.state())
        return {name: torch.from_numpy(x).to(self._device) for name, x in rows.items()}

    def epoch(
        self, rows: dict[str, Any], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, ...]:
        """Make the gradient steps of one epoch over what `begin` returned, in random order.

        Returns:
            What the loss gives to record, of all minibatches.
        """
        size = torch.tensor(lr, device=self._device)
        seen: list[list[Tensor]] = []
        epoch: Any = minibatches(rows, minibatch_size, rng)
        for minibatch in epoch:
            loss, told = self._objective.loss(self._module, **minibatch)
            self._flat.zero_grad()
            loss.backward()
            self._flat.limit_norm(self._max_grad_norm)
            self._adam.step(size)
            seen.append([x.detach() for x in told])
        return tuple(torch.cat(tensors).cpu().numpy() for tensors in zip(*seen, strict=True))

    def end(self) -> None:
        """Give weights and Adam's moments back to home."""
        self._home.load_state_dict(self._module.state_dict())
        self._home_adam.load(self._adam.state())


class ValueFit:
    """Minimizes E[(V - R)^2], with R in units of the value function's scale.

    The value function is flat, with gradients in place. The results do not depend on the threads.
    """

    def __init__(self, value: ValueFunction, adam: Adam, threads: int) -> None:
        self._value, self._adam = value, adam
        self._steps: CompiledSteps | None = None
        if has_kernels(value):
            from rank0rl.nets.kernels.steps import CompiledSteps

            loss = Objective(clip_ratio=np.inf, value_coef=1.0)
            nets = nn.ModuleDict({"value": value})
            self._steps = CompiledSteps(nets, adam, loss, np.inf, threads)

    def __call__(
        self,
        x: Array,
        ret: Array,
        rng: np.random.Generator,
        lr: float,
        epochs: int,
        minibatch_size: int,
    ) -> float:
        """Make the gradient steps, for inputs x (N, inputs) and returns (N,) in units of reward.

        Returns:
            Mean squared error over the last epoch, each minibatch's from before its step.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        rows, error = {"obs": x, "ret": ret / self._value.scale.numpy()}, np.empty(0)
        for _ in range(epochs):
            if self._steps:
                _, error, _ = self._steps.epoch(rows, minibatch_size, rng, lr)
            else:
                error = self._by_autograd(rows, minibatch_size, rng, lr)
        return float(np.square(error).mean())

    def _by_autograd(
        self, rows: Batch, minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> Array:
        """Make the gradient steps of one epoch; return the errors, (N,)."""
        errors = []
        for few in minibatches(rows, minibatch_size, rng):
            self._adam.flat.zero_grad()
            error = self._value(torch.from_numpy(few["obs"])) - torch.from_numpy(few["ret"])
            error.square().mean().backward()
            self._adam.step(lr)
            errors.append(error.detach().numpy())
        return np.concatenate(errors)


def fisher_products(
    policy: Policy, flat: Flat, damping: float, threads: int
) -> Callable[[Tensor, Tensor | None], Product]:
    """Return a function of observations (N, inputs) and masks that returns v -> F v + damping v.

    F is the Fisher matrix of the policy at these observations, which are normalized: the mean Hessian of
    KL(pi || pi') at pi' = pi. The masks are the choices that could be taken, (N, all choices), bool, or
    None. The results do not depend on the threads.
    """
    if has_kernels(policy):
        from rank0rl.nets.kernels.fisher import CompiledFisher

        return CompiledFisher(policy, flat.vectors[0], damping, threads)
    return partial(fisher_by_autograd, policy, damping)


def fisher_by_autograd(
    policy: Policy, damping: float, obs: Tensor, mask: Tensor | None = None
) -> Product:
    """Return v -> F v + damping v at these observations, for any policy."""
    params = list(policy.parameters())
    now = policy.distribution(obs, mask)
    kl = policy.kl(tuple(x.detach() for x in now), now).mean()
    gradient = _flat(torch.autograd.grad(kl, params, create_graph=True))

    def product(v: Tensor) -> Tensor:
        hessian_v = _flat(torch.autograd.grad(gradient @ v, params, retain_graph=True))
        return hessian_v + damping * v

    return product


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


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
