"""Products with the Fisher matrix of a policy in compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rank0rl.nets.curvature import fisher_forward, fisher_product
from rank0rl.nets.descent import block_rows
from rank0rl.nets.policies import head
from rank0rl.nets.team import Team

Array = npt.NDArray[Any]


class CompiledFisher:
    """Products with the Fisher matrix of a policy at some inputs.

    Args:
        policy: an MLP on the CPU, flat.
        theta: its flat vector.
        obs: normalized, (N, inputs).
        mask: the choices that could be taken, (N, all choices), bool, if not all.
        damping: number added to the diagonal.
        team: computes.
    """

    def __init__(
        self,
        policy: Any,
        theta: Tensor,
        obs: Array,
        mask: Array | None,
        damping: float,
        team: Team,
    ) -> None:
        """Compute what all products share."""
        self._theta = theta.detach().numpy()
        self._layers, number = policy.mlp.table(theta), self._theta.dtype
        self._log_std, self._starts = head(policy, theta)
        self._obs, self._damping, self._team = np.ascontiguousarray(obs, number), damping, team
        n = len(obs)
        rows = block_rows(n)
        blocks = -(-n // rows)
        self._work = np.empty((blocks, rows * self._layers[:, 3].sum()), number)
        self._grads = np.zeros((blocks, len(theta)), number)
        self._spare = np.empty((blocks, 5 * rows * self._layers[:, 3].max()), number)
        self._product = np.empty(len(theta), number)
        allowed = np.ascontiguousarray(np.zeros((n, 0), bool) if mask is None else mask)
        self._team.run(
            *(fisher_forward, blocks, self._theta, self._layers, self._starts),
            *(self._obs, allowed, self._work),
        )

    def __call__(self, v: Tensor) -> Tensor:
        """Return F v + damping v, with F the mean Hessian of KL(pi || pi') at pi' = pi."""
        self._team.run(
            *(fisher_product, len(self._work), self._theta, self._layers),
            *(self._log_std, self._starts, self._obs, self._work, v.numpy()),
            *(float(self._damping), self._grads, self._spare, self._product),
        )
        return torch.from_numpy(self._product.copy())
