"""Products with the Fisher matrix of a policy: in compiled kernels for MLPs, by autograd elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rank0rl.nets.flat import Flat
from rank0rl.nets.mlp import has_kernels
from rank0rl.nets.policies import Policy

Product = Callable[[Tensor], Tensor]


class Fisher:
    """Makes products with the Fisher matrix of a policy: the mean Hessian of KL(pi || pi') at pi' = pi.

    Args:
        policy: the policy, flat.
        flat: its vector.
        damping: number added to the diagonal.
        threads: number of threads; the results do not depend on it.
    """

    def __init__(self, policy: Policy, flat: Flat, damping: float, threads: int) -> None:
        """Compile the products if the network is an MLP, or load them from the cache."""
        self._policy, self._theta, self._damping = policy, flat.vectors[0], damping
        self._compiled: Any = None
        if has_kernels(policy):
            from rank0rl.nets.kernels.fisher import CompiledFisher  # loads the compiler
            from rank0rl.nets.kernels.threads import Team

            self._compiled, self._team = CompiledFisher, Team(threads)
            none = torch.zeros((0, policy.mlp.weights[0].shape[0]), dtype=self._theta.dtype)
            self.at(none)(torch.zeros_like(self._theta).detach())

    def at(self, obs: Tensor, mask: Tensor | None = None) -> Product:
        """Return the function v -> F v + damping v at these observations.

        Args:
            obs: normalized, (N, inputs).
            mask: the choices that could be taken, (N, all choices), bool, if not all.
        """
        if self._compiled is None:
            return by_autograd(self._policy, obs, mask, self._damping)
        allowed = None if mask is None else mask.numpy()
        product: Product = self._compiled(
            *(self._policy, self._theta, obs.numpy(), allowed, self._damping, self._team)
        )
        return product


def by_autograd(policy: Policy, obs: Tensor, mask: Tensor | None, damping: float) -> Product:
    """Return what `Fisher.at` does, for any policy."""
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
