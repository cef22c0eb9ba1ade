"""Gradient steps of a policy and a value function: in closed form on the CPU, by autograd elsewhere.

The agent gives the policy's loss and its derivative. The value loss, the entropy bonus, the norm
clip and Adam are the same for every agent and live here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch
from rank0rl.nets.actor_critic import ActorCritic, normalized
from rank0rl.nets.conv import ConvNet
from rank0rl.nets.cuda import AutogradSteps
from rank0rl.nets.flat import Adam

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Objective:
    """The loss of a minibatch: policy loss + value_coef E[(V - R)^2] - entropy_coef H.

    It has two forms of the same values, for `nets["policy"]` and `nets["value"]`: `loss`, of which
    autograd takes the gradient, and `gradient`, in closed form, which is several times faster for
    small MLPs. Both take a minibatch's arrays by name:

        obs: normalized, (n, inputs).
        act: actions, (n, *act).
        logp: log-probabilities of the actions under the acting policy, (n,).
        adv: advantages, (n,).
        ret: returns in units of the value function's scale, (n,).
        mask: the choices that could be taken, (n, all choices), bool, where not all could be.

    Both return the log of the ratio of new to old probability, (n,); the error of the value, (n,);
    and the entropy, (1,).
    """

    policy_loss: Callable[[Tensor, Tensor], Tensor]
    """Loss of the policy, (), for log ratios (n,) and advantages (n,)."""
    policy_slope: Callable[[Array, Array], Array]
    """Derivatives of `policy_loss` by the log ratios, (n,), from the same arguments in NumPy."""
    value_coef: float
    """Weight of the value loss."""
    entropy_coef: float
    """Weight of the entropy bonus."""
    normalize: bool
    """True if advantages get mean 0 and standard deviation 1 within each minibatch."""

    def gradient(
        self,
        nets: Any,
        obs: Array,
        act: Array,
        logp: Array,
        adv: Array,
        ret: Array,
        mask: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Write the gradient of `loss` into the `.grad` of the networks, in closed form."""
        if self.normalize:
            adv = normalized(adv)
        new_logp, entropy, policy_pullback = nets["policy"].numpy(obs, act, mask)
        log_ratio = new_logp - logp
        policy_pullback(self.policy_slope(log_ratio, adv), -self.entropy_coef)
        val, value_pullback = nets["value"].numpy(obs)
        error = val - ret
        value_pullback(2 * self.value_coef / len(adv) * error)
        return log_ratio, error, np.array([entropy])

    def loss(
        self,
        nets: Any,
        obs: Tensor,
        act: Tensor,
        logp: Tensor,
        adv: Tensor,
        ret: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss, (), for autograd on any device; and what `gradient` returns, as tensors."""
        if self.normalize:
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
        policy = nets["policy"]
        now = policy.distribution(obs, mask)
        entropy = policy.entropy(now)
        log_ratio = policy.logp(now, act) - logp
        error = nets["value"](obs) - ret
        loss = (
            self.policy_loss(log_ratio, adv)
            + self.value_coef * error.square().mean()
            - self.entropy_coef * entropy
        )
        return loss, (log_ratio, error, entropy.reshape(1))


class ClosedForm:
    """Gradient steps in NumPy, in place, with the interface of `AutogradSteps`.

    Args:
        nets: the policy and the value function, flat, with gradients in place.
        adam: over their parameters.
        objective: the loss of a minibatch.
        max_grad_norm: norm to which a larger gradient is scaled down.
    """

    def __init__(
        self, nets: nn.ModuleDict, adam: Adam, objective: Objective, max_grad_norm: float
    ) -> None:
        """Keep the networks."""
        self._nets, self._adam = nets, adam
        self._objective, self._max_grad_norm = objective, max_grad_norm

    def begin(self, rows: Batch, minibatch_size: int) -> dict[str, Any]:
        """Return the rows: they and the weights are where the steps compute."""
        return rows

    def step(self, minibatch: dict[str, Any], lr: float) -> tuple[Array, Array, Array]:
        """Make one gradient step; return what `Objective.gradient` does.

        Raises:
            FloatingPointError: if the gradient is not finite.
        """
        seen = self._objective.gradient(self._nets, **minibatch)
        self._adam.flat.clip_norm(self._max_grad_norm)
        self._adam.step(lr)
        return seen

    def end(self) -> None:
        """Do nothing: the weights are in place."""


GradientSteps: TypeAlias = ClosedForm | AutogradSteps
"""Gradient steps of one update: `begin`, a `step` for each minibatch, `end`."""


def gradient_steps(
    nets: ActorCritic, adam: Adam, objective: Objective, max_grad_norm: float, device: str
) -> GradientSteps:
    """Return the gradient steps in closed form for MLPs on the CPU, and those by autograd else.

    Args:
        nets: the networks, on the CPU, flat, with gradients in place.
        adam: over the parameters of policy and value function.
        objective: the loss of a minibatch.
        max_grad_norm: norm to which a larger gradient is scaled down.
        device: where the steps compute, such as "cpu" or "cuda".
    """
    trained = nn.ModuleDict({"policy": nets.policy, "value": nets.value})
    if device == "cpu" and not isinstance(nets.value.mlp, ConvNet):
        return ClosedForm(trained, adam, objective, max_grad_norm)
    return AutogradSteps(trained, adam, objective.loss, max_grad_norm, device)


def joined(arrays: Sequence[Any]) -> Array:
    """Concatenate arrays, or tensors of any device, into one array."""
    if isinstance(arrays[0], Tensor):
        return torch.cat(tuple(arrays)).cpu().numpy()  # type: ignore[no-any-return]
    return np.concatenate(arrays)
