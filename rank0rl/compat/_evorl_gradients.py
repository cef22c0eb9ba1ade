"""EvoRL's updates by gradients: functions of parameters that change nothing in place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rank0rl.compat._evorl_comm import pmean
from rank0rl.mpi import trees

Update = Callable[..., tuple[Any, Any, Any]]


class GradientTransformation(Protocol):
    """What optax calls an optimizer."""

    def init(self, params: Any) -> Any:
        """The state before the first update."""

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """What to add to the parameters, and the next state. The first argument are gradients."""


@dataclasses.dataclass(frozen=True)
class TorchOptimizer:
    """A `GradientTransformation` out of one of torch's optimizers. Each update copies its state.

    Args:
        make: tensors -> optimizer, such as ``lambda params: torch.optim.Adam(params, lr=3e-4)``.
    """

    make: Callable[[list[Tensor]], torch.optim.Optimizer]

    def init(self, params: Any) -> dict[str, Any]:
        """The state before the first update."""
        return self.make(_copies(params)).state_dict()

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        """What to add to the parameters, and the next state.

        Raises:
            ValueError: if no parameters are given.
        """
        if params is None:
            raise ValueError("torch's optimizers compute with parameters: pass params")
        before, after = trees.named(params), _copies(params)
        optimizer = self.make(after)
        optimizer.load_state_dict(copy.deepcopy(state))
        for p, grad in zip(after, trees.named(updates).values(), strict=True):
            p.grad = grad.clone()
        optimizer.step()
        changes = [new.detach() - old for new, old in zip(after, before.values(), strict=True)]
        return trees.rebuilt(params, changes), optimizer.state_dict()


def gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    dp_axis_name: str | None,
    has_aux: bool = False,
) -> Update:
    """A function that takes one step down the gradient of a loss.

    Args:
        loss_fn: (params, ...) -> loss, a tensor of one number; or (loss, aux). params is a tree of
            tensors.
        optimizer: has optax's `init` and `update`; see `TorchOptimizer`.
        dp_axis_name: of the ranks over which gradients are averaged; None for this rank's alone.
        has_aux: whether loss_fn returns aux, too.

    Returns:
        (opt_state, params, ...) -> (loss, or (loss, aux); the new params; the new opt_state). The
        loss is this rank's. It is collective over the ranks of the axis.
    """

    def update(opt_state: Any, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        value, grads = _value_and_grad(loss_fn, has_aux, params, *args, **kwargs)
        with torch.no_grad():
            changes, opt_state = optimizer.update(pmean(grads, dp_axis_name), opt_state, params)
            params = trees.tree_map(lambda p, change: (p + change).to(p.dtype), params, changes)
        return value, params, opt_state

    return update


def _attach_params(agent_state: Any, params: Any) -> Any:
    if dataclasses.is_dataclass(agent_state):
        return dataclasses.replace(agent_state, params=params)  # type: ignore[type-var]
    replace = getattr(agent_state, "_replace", None) or agent_state.replace
    return replace(params=params)


def _detach_params(agent_state: Any) -> Any:
    return agent_state.params


def agent_gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    dp_axis_name: str | None = None,
    has_aux: bool = False,
    attach_fn: Callable[[Any, Any], Any] = _attach_params,
    detach_fn: Callable[[Any], Any] = _detach_params,
) -> Update:
    """As `gradient_update`, of an agent's state, some part of which are the parameters.

    Args:
        loss_fn: (agent_state, ...) -> loss, or (loss, aux).
        optimizer: as in `gradient_update`.
        dp_axis_name: as in `gradient_update`.
        has_aux: as in `gradient_update`.
        attach_fn: (agent_state, params) -> the same state with these parameters; by default those of
            a dataclass or namedtuple, or of what has a method `replace`, under the name `params`.
        detach_fn: agent_state -> its parameters; by default what it calls `params`.

    Returns:
        (opt_state, agent_state, ...) -> (loss, or (loss, aux); the new state; the new opt_state).
    """

    def loss_of_params(params: Any, agent_state: Any, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(attach_fn(agent_state, params), *args, **kwargs)

    step = gradient_update(loss_of_params, optimizer, dp_axis_name, has_aux)

    def update(opt_state: Any, agent_state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        params = detach_fn(agent_state)
        value, params, opt_state = step(opt_state, params, agent_state, *args, **kwargs)
        return value, attach_fn(agent_state, params), opt_state

    return update


def _value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool, params: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Loss (and aux) without history, and a tree of gradients: 0 for what the loss does not depend on."""
    live = [p.detach().requires_grad_() for p in trees.named(params).values()]
    with torch.enable_grad():
        value = loss_fn(trees.rebuilt(params, live), *args, **kwargs)
    loss = value[0] if has_aux else value
    grads = [torch.zeros_like(p) for p in live]
    if loss.requires_grad:
        grads = list(torch.autograd.grad(loss, live, allow_unused=True, materialize_grads=True))
    value = trees.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)
    return value, trees.rebuilt(params, grads)


def _copies(params: Any) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in trees.named(params).values()]
