"""Spinning Up's `mpi_tf`, by name, over torch: Adam whose gradients are averaged over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rank0rl.mpi import average, weights

GradsAndVars = list[tuple[Tensor | None, Tensor]]

_number = itertools.count()
_live: WeakValueDictionary[int, MpiAdamOptimizer] = WeakValueDictionary()  # oldest first
_TF_ONLY = {"gate_gradients", "aggregation_method", "colocate_gradients_with_ops"}


class MpiAdamOptimizer:
    """Adam of which every rank makes the same steps, with gradients averaged over ranks.

    A variable becomes rank 0's on every rank before the first step with it. The gradients of that step
    are from before: call `sync_all_params` on the modules before the first loss. From then on all ranks
    add the same numbers, bit for bit, which is checked, so that nothing more has to be sent.

    Args:
        learning_rate, beta1, beta2, epsilon: of torch's Adam, with TF1's names and defaults. torch
            adds epsilon after the correction for bias, TF1 before it.
        use_locking, name: TF1's; without effect.
        check_every: updates between two checks that all ranks have the same; 0 for none.
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
        """No variables are known yet."""
        self._options: dict[str, Any] = {
            "lr": learning_rate,
            "betas": (beta1, beta2),
            "eps": epsilon,
        }
        self._check_every, self._updates = check_every, 0
        self._adam: torch.optim.Adam | None = None
        self._variables: dict[str, Tensor] = {}
        _live[next(_number)] = self

    @property
    def variables(self) -> dict[str, Tensor]:
        """Number and shape -> variable that there has been an update of, in their order."""
        return dict(self._variables)

    def minimize(
        self, loss: Tensor, var_list: Iterable[Tensor], global_step: Tensor | None = None
    ) -> None:
        """Compute the gradients, and apply them.

        Collective: every rank calls this, in the same order.
        """
        self.apply_gradients(self.compute_gradients(loss, var_list), global_step)

    def compute_gradients(
        self, loss: Tensor, var_list: Iterable[Tensor], **kwargs: Any
    ) -> GradsAndVars:
        """Gradients of the loss, averaged over ranks.

        Collective: every rank calls this, in the same order.

        Args:
            loss: this rank's, a single number.
            var_list: tensors that require a gradient, in the same order on every rank.
            kwargs: `grad_loss`, the gradient of something with respect to the loss; `retain_graph`,
                torch's, to differentiate the same loss again. TF1's others are without effect.

        Returns:
            (gradient, variable) for each variable. Where only some ranks' losses depend on it, those
            of the others count as 0; where nobody's does, the gradient is None.

        Raises:
            ValueError: the same on every rank, if dtypes, shapes or kinds of devices differ between
                ranks, or a variable holds no data.
            TypeError: if a keyword is not known.
        """
        unknown = kwargs.keys() - _TF_ONLY - {"grad_loss", "retain_graph"}
        if unknown:
            raise TypeError(f"compute_gradients has no keyword {', '.join(sorted(unknown))}")
        named = _named(var_list)
        found: tuple[Tensor | None, ...] = (None,) * len(named)
        if loss.requires_grad and named:
            found = torch.autograd.grad(
                loss,
                list(named.values()),
                kwargs.get("grad_loss"),
                retain_graph=kwargs.get("retain_graph"),
                allow_unused=True,
            )
        mine = zip(named, found, strict=True)
        grads = {name: grad.clone() for name, grad in mine if grad is not None}  # may be a view
        mean = average.average_grads_(named, grads, "MpiAdamOptimizer.compute_gradients")
        return [(mean.get(name), variable) for name, variable in named.items()]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
        global_step: Tensor | None = None,
        name: str | None = None,
    ) -> None:
        """One step of Adam, the same on every rank, if all come with the same gradients.

        Collective: every rank calls this, in the same order.

        Args:
            grads_and_vars: what `compute_gradients` gave. Without gradient a variable stays.
            global_step: tensor of one integer, to count up.
            name: TF1's; without effect.

        Raises:
            ValueError: the same on every rank, naming a rank and a variable (its number, and its
                shape) that has drifted from rank 0's; or if shapes differ between ranks.
            ValueError: if no variable has a gradient.
        """
        given = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        if not given:
            raise ValueError("expected a gradient for one variable at least: got none")
        adam = self._known([variable for _, variable in given])
        own = [(variable, variable.grad) for variable in self._variables.values()]
        for variable, _ in own:
            variable.grad = None  # which Adam leaves alone
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
        """Adam of these variables and earlier ones; new ones become rank 0's."""
        ids = {id(variable) for variable in self._variables.values()}
        new = [variable for variable in variables if id(variable) not in ids]
        if new:
            named = _named(new, len(ids))
            weights.rank0_bcast_wts(named, label="MpiAdamOptimizer")
            self._variables |= named
            if self._adam:
                self._adam.add_param_group({"params": new})
        self._adam = self._adam or torch.optim.Adam(new, **self._options)
        return self._adam


def sync_all_params(*things: Any) -> None:
    """Overwrite weights, in place, with rank 0's.

    Collective: every rank calls this, in the same order.

    Args:
        things: modules, tensors, arrays, and nested dicts of them; by default the variables that the
            MpiAdamOptimizers of this process have updated, as torch has no list of all there are.

    Raises:
        ValueError: the same on every rank, if names, dtypes or shapes differ between ranks.
        ValueError: if nothing is given, and no variables are known.
    """
    known = {str(number): optimizer.variables for number, optimizer in _live.items()}
    if not things and not any(known.values()):
        raise ValueError(
            "torch has no list of all variables, and no MpiAdamOptimizer has made an update yet: "
            "pass the modules, sync_all_params(actor, critic)"
        )
    weights.rank0_bcast_wts(*(things or [known]), label="sync_all_params")


def _named(variables: Iterable[Tensor], start: int = 0) -> dict[str, Tensor]:
    return {f"{i}, of shape {tuple(v.shape)}": v for i, v in enumerate(variables, start)}
