"""Products with the Fisher matrix of a policy in compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rank0rl.nets.kernels.compiler import Team, kernel, meet, part
from rank0rl.nets.kernels.distributions import log_softmax, tables_of
from rank0rl.nets.kernels.mlp import backward, forward, layer
from rank0rl.nets.kernels.steps import SLICE, block_rows, kernel_block_rows

Array = npt.NDArray[Any]


@kernel
def _forward(
    thread: int,
    threads: int,
    barrier: Array,
    theta: Array,
    layers: Array,
    starts: Array | None,
    obs: Array,
    mask: Array,
    work: Array,
) -> None:
    """Write the outputs of all layers to work, (blocks, numbers); logits become log-probabilities."""
    size = kernel_block_rows(len(obs))
    for block in range(thread, len(work), threads):
        a, b = block * size, min(block * size + size, len(obs))
        out = forward(theta, layers, obs[a:b], work[block])
        if starts is not None:
            for row in range(b - a):
                for i in range(len(starts) - 1):
                    log_softmax(out[row], mask[a + row], starts[i], starts[i + 1])


@kernel
def _product(
    thread: int,
    threads: int,
    barrier: Array,
    theta: Array,
    layers: Array,
    std_place: Array | None,
    starts: Array | None,
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
    a block. The other arguments are those of `steps._make_steps`.

    Source: Martens 2020, arXiv:1412.1193, section 6 (the Fisher matrix as a Gauss-Newton matrix).
    """
    n_all = len(obs)
    size = kernel_block_rows(n_all)
    for block in range(thread, len(work), threads):
        a, b = block * size, min(block * size + size, n_all)
        x, grad, room = obs[a:b], grads[block], spare[block]
        third = len(room) // 5
        by = _tangent(vector, theta, layers, x, work[block], room[2 * third :])
        if std_place is not None:
            _normal_metric(theta, std_place, vector, by, n_all, grad)
        if starts is not None:
            end = 0
            for i in range(len(layers)):
                end += (b - a) * layers[i, 3]
            logp = work[block, end - by.size : end].reshape(by.shape)
            _choice_metric(starts, logp, by, n_all)
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


@part
def _tangent(
    vector: Array, theta: Array, layers: Array, x: Array, work: Array, room: Array
) -> Array:
    """Return J v (n, outputs), the change of the outputs along v, as a view of room."""
    n, start, third = len(x), 0, len(room) // 3
    one = theta.dtype.type(1)
    moved = x
    for i in range(len(layers)):
        weight, _ = layer(theta, layers, i)
        by_weight, by_bias = layer(vector, layers, i)
        width = len(by_bias)
        at = (i % 2) * third
        now = room[at : at + n * width].reshape(n, width)
        np.dot(x, by_weight, now)
        if i > 0:
            more = room[2 * third : 2 * third + n * width].reshape(n, width)
            np.dot(moved, weight, more)
            for row in range(n):
                for j in range(width):
                    now[row, j] += more[row, j]
        out = work[start : start + n * width].reshape(n, width)
        start += n * width
        for row in range(n):
            for j in range(width):
                now[row, j] += by_bias[j]
                if i < len(layers) - 1:
                    now[row, j] *= one - out[row, j] * out[row, j]
        moved, x = now, out
    return moved


@part
def _normal_metric(
    theta: Array, std_place: Array, vector: Array, by: Array, n_all: int, grad: Array
) -> None:
    """Multiply by M / N for normal actions, and write the product for the log standard deviations."""
    number = theta.dtype.type
    at, times, k = std_place[0], std_place[1], std_place[2]
    for j in range(k):
        std = along = number(0)
        for row in range(times):
            std += theta[at + row * k + j]
            along += vector[at + row * k + j]
        weight = np.exp(number(-2) * std) / number(n_all)
        for row in range(len(by)):
            by[row, j] *= weight
        for row in range(times):
            grad[at + row * k + j] = number(2 * len(by) / n_all) * along


@part
def _choice_metric(starts: Array, logp: Array, by: Array, n_all: int) -> None:
    """Multiply by M / N = (diag(p) - p p') / N for each choice."""
    number = by.dtype.type
    weight = number(1 / n_all)
    for row in range(len(by)):
        for i in range(len(starts) - 1):
            mean = number(0)
            for j in range(starts[i], starts[i + 1]):
                mean += np.exp(logp[row, j]) * by[row, j]
            for j in range(starts[i], starts[i + 1]):
                by[row, j] = weight * np.exp(logp[row, j]) * (by[row, j] - mean)


class CompiledFisher:
    """Makes products with the Fisher matrix of a policy, see `update.FisherProducts`."""

    def __init__(self, policy: Any, theta: Tensor, damping: float, threads: int) -> None:
        self._theta = theta.detach()
        self._layers = policy.mlp.table(theta)
        self._std_place, self._starts = tables_of(policy, theta)
        self.known = self._std_place is not None or self._starts is not None
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
        work = np.empty((blocks, rows * layers[:, 3].sum()), number)
        grads = np.zeros((blocks, len(theta)), number)
        spare = np.empty((blocks, 5 * rows * layers[:, 3].max()), number)
        result = np.empty(len(theta), number)
        self._team.run(_forward, blocks, theta, layers, self._starts, x, allowed, work)

        def product(v: Tensor) -> Tensor:
            given = self._std_place, self._starts, x, work, v.numpy(), self._damping
            self._team.run(_product, blocks, theta, layers, *given, grads, spare, result)
            return torch.from_numpy(result.copy())

        return product
