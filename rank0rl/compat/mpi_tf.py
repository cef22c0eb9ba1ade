"""Spinning Up's `mpi_tf`, over torch: Adam with gradients that are averaged over ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rank0rl.compat.average import average_grads_
from rank0rl.mpi import weights
from rank0rl.mpi.world import alone

GradsAndVars = list[tuple[Tensor | None, Tensor]]

_number = itertools.count()
_live: WeakValueDictionary[int, MpiAdamOptimizer] = WeakValueDictionary()  # oldest first
_TF_ONLY = {"gate_gradients", "aggregation_method", "colocate_gradients_with_ops"}


class MpiAdamOptimizer:
    """Adam that makes the same steps on every rank, with gradients averaged over ranks.

    Before the first step with a variable, every rank gets rank 0's value of it. The gradients of
    that step were computed before: call `sync_all_params` on the modules before the first loss.
    After that, all ranks add the same numbers, bit for bit, so variables are not sent again. This
    is checked.

    Args:
        learning_rate, beta1, beta2, epsilon: options of torch's Adam, with TF1's names and
            defaults. torch adds epsilon after the bias correction, TF1 before it.
        use_locking, name: options of TF1; without effect.
        check_every: updates between two checks that all ranks have the same variables; 0: no
            checks.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-08,
        use_locking: bool = False,
        name: str = "Adam",
        *,
        check_every: int = 100,
    ) -> None:
        self._make_adam = functools.partial(
            torch.optim.Adam, lr=learning_rate, betas=(beta1, beta2), eps=epsilon
        )
        self._check_every, self._updates = check_every, 0
        self._adam: torch.optim.Adam | None = None
        self._variables: dict[str, Tensor] = {}
        _live[next(_number)] = self

    @property
    def variables(self) -> dict[str, Tensor]:
        """Variables that have been updated, by number and shape, in the order of their first update."""
        return dict(self._variables)

    def minimize(
        self,
        loss: Tensor,
        global_step: Tensor | None = None,
        var_list: Iterable[Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Compute the gradients, as `compute_gradients` does with these keywords, and apply them.

        Collective: every rank calls this, in the same order.
        """
        self.apply_gradients(self.compute_gradients(loss, var_list, **kwargs), global_step)

    def compute_gradients(
        self, loss: Tensor, var_list: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> GradsAndVars:
        """Return the gradients of the loss, averaged over ranks.

        Collective: every rank calls this, in the same order.

        Args:
            loss: this rank's loss, a single number.
            var_list: tensors that require a gradient, in the same order on every rank. None: those on
                which this loss depends, in the order of its graph, which must be the same on every rank.
            kwargs: `grad_loss`, the gradient with respect to the loss; `retain_graph`, as in torch,
                to differentiate the same loss again. TF1's other keywords have no effect.

        Returns:
            (gradient, variable) for each variable. A rank whose loss does not depend on a variable
            counts as 0. If no rank's loss depends on it, the gradient is None.

        Raises:
            ValueError: in the same cases as `all_avg_grads`.
            TypeError: if a keyword is unknown.
        """
        unknown = kwargs.keys() - _TF_ONLY - {"grad_loss", "retain_graph"}
        if unknown:
            raise TypeError(f"compute_gradients has no keyword {', '.join(sorted(unknown))}")
        named = _named(_variables_of(loss) if var_list is None else var_list)
        grads: dict[str, Tensor] = {}
        if loss.requires_grad and named:
            kept, outer = kwargs.get("retain_graph"), kwargs.get("grad_loss")
            found = torch.autograd.grad(
                loss, [*named.values()], outer, retain_graph=kept, allow_unused=True
            )
            mine = zip(named, found, strict=True)
            grads = {name: grad.clone() for name, grad in mine if grad is not None}  # may be a view
        mean = average_grads_(named, grads, "MpiAdamOptimizer.compute_gradients")
        return [(mean.get(name), variable) for name, variable in named.items()]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
        global_step: Tensor | None = None,
        name: str | None = None,
    ) -> None:
        """Make one step of Adam. It is the same on every rank if all pass the same gradients.

        Collective: every rank calls this, in the same order.

        Args:
            grads_and_vars: what `compute_gradients` returned. A variable without gradient is left
                as it is.
            global_step: tensor of one integer, to which 1 is added.
            name: option of TF1; without effect.

        Raises:
            ValueError: the same on every rank, if a variable has drifted from rank 0's (the message
                names the rank and the variable's number and shape), or if shapes differ between
                ranks.
            ValueError: if no variable has a gradient. It comes before any message; if it comes on
                some ranks only, the next collective is an error on every rank.
        """
        given = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        if not given:
            raise alone(ValueError("expected a gradient for at least one variable: got none"))
        adam = self._known([variable for _, variable in given])
        own = [(variable, variable.grad) for variable in self._variables.values()]
        for variable, _ in own:
            variable.grad = None  # Adam skips variables without gradient
        for grad, variable in given:
            variable.grad = grad
        adam.step()
        for variable, before in own:
            variable.grad = before
        self._updates += 1
        if self._check_every and self._updates % self._check_every == 0:
            weights.chksum(self._variables, label="MpiAdamOptimizer")
        if global_step is not None:
            with torch.no_grad():
                global_step.add_(1)

    def _known(self, variables: list[Tensor]) -> torch.optim.Adam:
        """Return Adam over these variables and earlier ones. New ones get rank 0's values first."""
        ids = {id(variable) for variable in self._variables.values()}
        new = [variable for variable in variables if id(variable) not in ids]
        if new:
            named = _named(new, len(ids))
            weights.rank0_bcast_wts(named, label="MpiAdamOptimizer")
            self._variables |= named
            if self._adam:
                self._adam.add_param_group({"params": new})
        self._adam = self._adam or self._make_adam(new)
        return self._adam


def _variables_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors that require a gradient and on which a loss depends, in the order of its graph."""
    found: dict[int, Tensor] = {}
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of torch's AccumulateGrad
        if variable is not None:
            found[id(variable)] = variable
        left += [before for before, _ in reversed(node.next_functions)]
    return [*found.values()]


def sync_all_params(*things: Any) -> None:
    """Overwrite weights, in place, with those of rank 0.

    Collective: every rank calls this, in the same order.

    Args:
        things: as in `rank0_bcast_wts`. The default is the variables that the MpiAdamOptimizers of
            this process have updated, because torch keeps no list of all.

    Raises:
        ValueError: in the same cases as `rank0_bcast_wts`, or if nothing is given and no variable
            has been updated yet.
    """
    known = {str(number): optimizer.variables for number, optimizer in _live.items()}
    if not things and not any(known.values()):
        raise alone(
            ValueError(
                "expected arguments, because no MpiAdamOptimizer has made an update yet: got none; "
                "pass the modules, as in sync_all_params(actor, critic)"
            )
        )
    weights.rank0_bcast_wts(*(things or [known]), label="sync_all_params")


def _named(variables: Iterable[Tensor], start: int = 0) -> dict[str, Tensor]:
    return {f"{i}, of shape {tuple(v.shape)}": v for i, v in enumerate(variables, start)}
