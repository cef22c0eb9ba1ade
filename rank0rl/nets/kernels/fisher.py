"""Products with the Fisher matrix of a policy in compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rank0rl.nets.kernels.compiler import Team, kernel, meet
from rank0rl.nets.kernels.distributions import METRICS, head_of, ready, times_metric
from rank0rl.nets.kernels.mlp import backward, forward, outputs, tangent
from rank0rl.nets.kernels.steps import SLICE, block_rows, kernel_block_rows

Array = npt.NDArray[Any]


@kernel
def _forward(
    thread: int,
    threads: int,
    barrier: Array,
    theta: Array,
    layers: Array,
    head: Any,
    obs: Array,
    mask: Array,
    work: Array,
) -> None:
    """Write the outputs of all layers to work, (blocks, numbers); logits become log-probabilities."""
    size = kernel_block_rows(len(obs))
    for block in range(thread, len(work), threads):
        a, b = block * size, min(block * size + size, len(obs))
        out = forward(theta, layers, obs[a:b], work[block])
        ready(head, out, mask[a:b])


@kernel
def _product(
    thread: int,
    threads: int,
    barrier: Array,
    theta: Array,
    layers: Array,
    head: Any,
    obs: Array,
    work: Array,
    vector: Array,
    damping: float,
    grads: Array,
    spare: Array,
    product: Array,
) -> None:
    """Compute F v + damping v, with F the mean Hessian of KL(pi || pi') at pi' = pi.

    For outputs y of the network, F is the mean of J' M J, where J = dy / d theta and M is the Hessian
    of the KL divergence by y. A first pass computes J v, a second one J' M J v.

    `work` is what `_forward` left there, `vector` is v, and `product` gets the result. There is room in
    `grads`, (blocks, parameters), and in `spare`, 5 numbers for each unit of the widest layer and row of
    a block. The other arguments are those of `steps.Epoch`.

    Source: Martens 2020, arXiv:1412.1193, section 6 (the Fisher matrix as a Gauss-Newton matrix).
    """
    n_all = len(obs)
    size = kernel_block_rows(n_all)
    for block in range(thread, len(work), threads):
        a, b = block * size, min(block * size + size, n_all)
        x, grad, room = obs[a:b], grads[block], spare[block]
        third = len(room) // 5
        by = tangent(vector, theta, layers, x, work[block], room[2 * third :])
        out = outputs(layers, work[block], b - a)
        times_metric(head, theta, vector, out, by, n_all, grad)
        backward(theta, layers, x, work[block], by, grad, room[: 2 * third])
    meet(threads, barrier)
    number = theta.dtype.type
    for begin in range(thread * SLICE, len(theta), threads * SLICE):
        for i in range(begin, min(begin + SLICE, len(theta))):
            total = number(damping) * vector[i]
            for block in range(len(work)):
                total += grads[block, i]
            product[i] = total
    meet(threads, barrier)


class CompiledFisher:
    """Makes products with the Fisher matrix of a policy, see `update.FisherProducts`."""

    def __init__(self, policy: Any, theta: Tensor, damping: float, threads: int) -> None:
        self._theta = theta.detach()
        self._layers = policy.mlp.table(theta)
        self._head = head_of(policy, theta)
        self.known = type(self._head) in METRICS
        """False for distributions without kernels."""
        self._damping, self._team = float(damping), Team(threads)
        if not self.known:
            return
        none = torch.zeros((0, int(self._layers[0, 2])), dtype=theta.dtype)
        self(none)(torch.zeros_like(self._theta))  # compiles

    def __call__(self, obs: Tensor, mask: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Compute what all products at these observations share; return the function v -> F v + damping v."""
        theta, n, rows = self._theta.numpy(), len(obs), block_rows(len(obs))
        blocks, number, layers = -(-n // rows), theta.dtype, self._layers
        x = np.ascontiguousarray(obs.numpy(), number)
        allowed = np.ascontiguousarray(np.zeros((n, 0), bool) if mask is None else mask.numpy())
        work = np.empty((blocks, rows * layers[-1, 7]), number)
        grads = np.zeros((blocks, len(theta)), number)
        spare = np.empty((blocks, 5 * rows * layers[:, 3].max()), number)
        result = np.empty(len(theta), number)
        self._team.run(_forward, blocks, theta, layers, self._head, x, allowed, work)

        def product(v: Tensor) -> Tensor:
            given = self._head, x, work, v.numpy(), self._damping
            self._team.run(_product, blocks, theta, layers, *given, grads, spare, result)
            return torch.from_numpy(result.copy())

        return product
