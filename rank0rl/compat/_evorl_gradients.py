"""EvoRL's gradient updates: pure functions of parameters, which change nothing in place."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rank0rl.compat._evorl_comm import pmean
from rank0rl.compat._evorl_mesh import AxisName
from rank0rl.mpi import trees

Update = Callable[..., tuple[Any, Any, Any]]


class GradientTransformation(Protocol):
    """Optimizer with the interface of optax."""

    def init(self, params: Any) -> Any:
        """Return the state before the first update."""

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return what to add to the parameters, and the next state. `updates` are gradients."""


@dataclasses.dataclass(frozen=True)
class TorchOptimizer:
    """`GradientTransformation` made of one of torch's optimizers. Each update copies its state.

    Args:
        make: function that makes an optimizer of a list of tensors, such as
            ``lambda params: torch.optim.Adam(params, lr=3e-4)``.
    """

    make: Callable[[list[Tensor]], torch.optim.Optimizer]

    def init(self, params: Any) -> dict[str, Any]:
        """Return the state before the first update."""
        return self.make(_copies(params)).state_dict()

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return what to add to the parameters, and the next state.

        Raises:
            ValueError: if params is None.
        """
        if params is None:
            raise ValueError("torch's optimizers need the parameters: got None; pass params")
        before, after = trees.named(params), _copies(params)
        optimizer = self.make(after)
        optimizer.load_state_dict(copy.deepcopy(state))
        for p, grad in zip(after, trees.named(updates).values(), strict=True):
            p.grad = grad.clone()
        optimizer.step()
        changes = [new.detach() - old for new, old in zip(after, before.values(), strict=True)]
        return trees.rebuilt(params, changes), optimizer.state_dict()


def _or_pmap_axis_name(function: Callable[..., Update]) -> Callable[..., Update]:
    """Let a function take `pmap_axis_name` as another name of `dp_axis_name`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Update:
        if "pmap_axis_name" in kwargs:
            if "dp_axis_name" in kwargs:
                raise TypeError("dp_axis_name and pmap_axis_name are one argument: got both")
            kwargs["dp_axis_name"] = kwargs.pop("pmap_axis_name")
        return function(*args, **kwargs)

    return call


@_or_pmap_axis_name
def gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    dp_axis_name: AxisName,
    has_aux: bool = False,
) -> Update:
    """Return a function that makes one optimizer step down the gradient of a loss.

    Args:
        loss_fn: function of (params, ...) that returns the loss, a tensor of one number, or
            (loss, aux). params is a tree of tensors.
        optimizer: object with optax's `init` and `update`, such as a `TorchOptimizer`.
        dp_axis_name: axis of the ranks over which gradients are averaged, or a tuple of axes. None:
            no average. The keyword may be `pmap_axis_name` too.
        has_aux: True if loss_fn returns (loss, aux).

    Returns:
        A function of (opt_state, params, ...). It returns this rank's loss, or (loss, aux), then
        the new params and the new opt_state. It is collective over the ranks of the axis.
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


@_or_pmap_axis_name
def agent_gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    dp_axis_name: AxisName = None,
    has_aux: bool = False,
    attach_fn: Callable[[Any, Any], Any] = _attach_params,
    detach_fn: Callable[[Any], Any] = _detach_params,
) -> Update:
    """Return a function like that of `gradient_update`, on an agent's state that holds parameters.

    Args:
        loss_fn: function of (agent_state, ...) that returns the loss, or (loss, aux).
        optimizer: object with optax's `init` and `update`, as in `gradient_update`.
        dp_axis_name: axis to average over, as in `gradient_update`. The keyword may be
            `pmap_axis_name` too.
        has_aux: True if loss_fn returns (loss, aux).
        attach_fn: function of (agent_state, params) that returns the state with these parameters.
            The default replaces `params` of a dataclass, of a namedtuple, or of an object with a
            method `replace`.
        detach_fn: function of agent_state that returns its parameters. The default returns
            `params`.

    Returns:
        A function of (opt_state, agent_state, ...). It returns the loss, or (loss, aux), then the
        new state and the new opt_state.
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
    """Return the loss (and aux) without graph, and a tree of gradients: 0 for parameters it does not depend on."""
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
