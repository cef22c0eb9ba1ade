"""Gradient steps of a policy and a value function: in compiled kernels where they can, by autograd elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

from rank0rl.nets.actor_critic import ActorCritic
from rank0rl.nets.cuda import AutogradSteps
from rank0rl.nets.flat import Adam
from rank0rl.nets.mlp import has_kernels
from rank0rl.nets.objective import Objective

if TYPE_CHECKING:
    from rank0rl.nets.compiled import CompiledSteps

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
        from rank0rl.nets.compiled import (
            CompiledSteps,  # loads the compiler, which only rank 0 needs
        )

        return CompiledSteps(trained, adam, objective, max_grad_norm, threads)
    return AutogradSteps(trained, adam, objective, max_grad_norm, device)
