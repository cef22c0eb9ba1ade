"""Gradient steps of an agent's loss by autograd, on the CPU or on another device; and Fisher products."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, minibatches
from rank0rl.nets.actor_critic import ClosedForm, Evaluate, Loss
from rank0rl.nets.flat import NOT_FINITE, Adam, Flat, tensors
from rank0rl.nets.policies import Policy

Array = npt.NDArray[Any]

Product: TypeAlias = Callable[[Tensor], Tensor]


class AutogradSteps:
    """Gradient steps by autograd: on the networks themselves on the CPU, on a copy on another device.

    The copy takes the weights at the start of an update and returns them at its end. The arguments are
    those of `update.GradientSteps`.
    """

    def __init__(
        self,
        nets: nn.ModuleDict,
        evaluate: Evaluate,
        adam: Adam,
        max_grad_norm: float,
        device: str = "cpu",
    ) -> None:
        self._home, self._home_adam, self._evaluate = nets, adam, evaluate
        self._max_grad_norm, self._device = max_grad_norm, torch.device(device)
        self._nets, self._adam = nets, adam
        if device != "cpu":
            self._nets = copy.deepcopy(nets).to(self._device)
            self._adam = Adam(Flat(self._nets), adam.eps)
        self._loss: Loss | None = None

    def begin(self, rows: Batch, loss: Loss, closed: ClosedForm | None = None) -> dict[str, Any]:
        """Take the loss, and the weights from home; return the rows, on the device."""
        self._loss = loss
        if self._nets is not self._home:
            self._nets.load_state_dict(self._home.state_dict())
            self._adam.load(self._home_adam.state())
        return {name: x.to(self._device) for name, x in tensors(rows).items()}

    def epoch(
        self, rows: dict[str, Any], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, Array, Array]:
        """Make the gradient steps of one epoch: see `update.GradientSteps.epoch`."""
        size = torch.tensor(lr, device=self._device)
        seen, norms = [], []
        epoch: Any = minibatches(rows, minibatch_size, rng)
        for minibatch in epoch:
            seen.append(self._backward(minibatch))
            norms.append(self._adam.flat.limit_norm(self._max_grad_norm))
            self._adam.step(size)
        if norms and not torch.stack(norms).isfinite().all():
            raise FloatingPointError(NOT_FINITE)
        log_ratio, error, entropy = (
            torch.cat(tensors).cpu().numpy() for tensors in zip(*seen, strict=True)
        )
        return log_ratio, error, entropy

    def end(self) -> None:
        """Give weights and Adam's moments back to home."""
        if self._nets is not self._home:
            self._home.load_state_dict(self._nets.state_dict())
            self._home_adam.load(self._adam.state())

    def gradient(self, rows: Batch, loss: Loss) -> list[Array]:
        """Return the gradient of the loss of some rows, and what `epoch` does."""
        seen = self._backward(self.begin(rows, loss))
        grads = [v.grad for v in self._adam.flat.vectors if v.grad is not None]
        return [torch.cat(grads).numpy().copy(), *(x.numpy() for x in seen)]

    def _backward(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradient of a minibatch; return log ratios, errors and the entropy, (1,)."""
        assert self._loss
        log_ratio, entropy, value, rows = self._evaluate(self._nets, rows)
        error = (value - rows["ret"]).detach()  # before the loss, which may change all in place
        seen = log_ratio.detach().clone(), error, entropy.detach().clone().reshape(1)
        loss = self._loss(log_ratio, entropy, value, rows)
        self._adam.flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return seen


def fisher_by_autograd(
    policy: Policy, damping: float, obs: Tensor, mask: Tensor | None = None
) -> Product:
    """Return v -> F v + damping v at these observations, for any policy."""
    params = list(policy.parameters())
    now = policy.distribution(obs, mask)
    kl = policy.kl(tuple(x.detach() for x in now), now).mean()
    gradient = _flat(_gradient(kl, params, create_graph=True))

    def product(v: Tensor) -> Tensor:
        hessian_v = _flat(_gradient(gradient @ v, params, retain_graph=True))
        return hessian_v + damping * v

    return product


def _gradient(number: Tensor, params: Sequence[Tensor], **kwargs: Any) -> list[Tensor]:
    """Return the gradient of a number; 0 by what it does not depend on."""
    found = torch.autograd.grad(number, params, allow_unused=True, **kwargs)
    return [torch.zeros_like(p) if by is None else by for p, by in zip(params, found, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])
