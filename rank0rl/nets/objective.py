"""The loss of policy-gradient agents: the policy's own, the value function's, and the entropy bonus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Objective:
    """The loss of a minibatch: policy loss + value_coef E[(V - R)^2] - entropy_coef H.

    Autograd takes the gradient of `loss`. For MLPs and PPO's clipped policy loss, compiled kernels do
    the same, several times faster. Both take a minibatch's arrays by name:

        obs: normalized, (n, inputs).
        act: actions, (n, *act).
        logp: log-probabilities of the actions under the acting policy, (n,).
        adv: advantages, (n,).
        ret: returns in units of the value function's scale, (n,).
        mask: the choices that could be taken, (n, all choices), bool, where not all could be.

    Both give the log of the ratio of new to old probability, (n,); the error of the value, (n,);
    and the entropy, (1,).
    """

    policy_loss: Callable[[Tensor, Tensor], Tensor]
    """Loss of the policy, (), for log ratios (n,) and advantages (n,)."""
    clip_ratio: float | None
    """Clip ratio r of a policy loss -E[min(r A, clip(r) A)], inf if it does not clip; None for any other loss."""
    value_coef: float
    """Weight of the value loss."""
    entropy_coef: float
    """Weight of the entropy bonus."""
    normalize: bool
    """True if advantages get mean 0 and standard deviation 1 within each minibatch."""

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
        """Return the loss, (), for autograd on any device; and what there is to record, as tensors."""
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
