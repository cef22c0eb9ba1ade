"""Kernels of gradient steps: what the networks give, their gradient, clipping and Adam.

The gradient of a minibatch is a sum of tasks: each network by itself, and its rows in blocks whose
size does not depend on the number of threads. Whoever computes a task, the sums are added in one
order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.nets.kernels.compiler import ask, call, inner, kernel, meet, part
from rank0rl.nets.kernels.distributions import (
    choice_log_ratio,
    choice_slopes,
    normal_log_ratio,
    normal_slopes,
)
from rank0rl.nets.kernels.mlp import adam, backward, dot, forward, outputs

Array = npt.NDArray[Any]

SLICE = 2048  # parameters that a thread adds up and steps at once
_BLOCK = 128  # rows of a task at least, ...
_BLOCKS = 8  # ... and tasks of a minibatch and network at most: each has a gradient of its own


class Weights(NamedTuple):
    """Parameters and Adam's moments, vectors of the same length."""

    theta: Array
    first: Array
    second: Array


class Rows(NamedTuple):
    """Rows of a batch in the order of an epoch. Without a policy, there are only the first two."""

    obs: Array
    ret: Array
    act: Any = None
    logp: Any = None
    adv: Any = None
    mask: Any = None


class Room(NamedTuple):
    """Memory that the tasks share, and how the parameters are divided among threads."""

    grads: Array
    """Gradient of each task, (tasks, parameters)."""
    work: Array
    """Outputs of layers, (tasks, numbers)."""
    spare: Array
    """Derivatives by outputs of layers, (tasks, numbers)."""
    total: Array
    """Gradient of the minibatch, (parameters,)."""
    slices: Array
    """Start, end and network (its number) of each slice of the parameters, (slices, 3), int64."""
    squares: Array
    """Sum of squares of the gradient in each slice."""
    entropies: Array
    """Sum of the entropies of each task's rows."""
    by_log_ratio: Array
    """Derivatives of the loss of a minibatch by the log ratios, (rows,)."""
    by_value: Array
    """Derivatives by the values, (rows,)."""
    by_entropy: Array
    """Derivative by the mean entropy, (1,)."""
    goes_on: Array
    """(1,), 0 if the derivatives could not be computed: no step is made."""
    outputs: Array
    """Outputs of the policy's network, or the derivatives by them, (rows, outputs), where torch takes these."""


class Seen(NamedTuple):
    """Numbers that the networks give for the rows of an epoch, (N,), and the entropy of each minibatch."""

    log_ratio: Array
    value: Array
    entropy: Array


class Settings(NamedTuple):
    """Numbers of the closed form and of the optimizer; size is that of a minibatch."""

    size: int
    coef: float
    value_coef: float
    max_grad_norm: float
    lr: float
    eps: float


def block_rows(n: int) -> int:
    """Return the number of rows in a block of a minibatch of n rows; the last block has what is left."""
    return max(_BLOCK, -(-n // _BLOCKS))


kernel_block_rows = part(block_rows)  # for kernels


@kernel
def apply(slope: int, log_ratio: Array, adv: Array, coef: float, out: Array) -> None:
    """Write what `ClosedForm.slope`, at this address, gives for each row."""
    for row in range(len(out)):
        out[row] = call(slope, log_ratio[row], adv[row], coef)


@kernel
def make_steps(
    thread: int,
    threads: int,
    barrier: Array,
    weights: Weights,
    policy: Array | None,
    value: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: Rows,
    room: Room,
    seen: Seen,
    settings: Settings,
    slope: int,
    differentiate: int,
    first: int,
    last: int,
    step: int,
) -> bool:
    """Make gradient steps on one minibatch after the other, from row first to row last.

    `policy` and `value` are tables of layers; without a policy, the value function learns alone. Normal
    actions have `std_place`: where the log standard deviations begin in theta, how many are summed, and
    of how many actions. Choices have `starts`, see `choice_log_ratio`. `step` steps were made before.

    The loss is a `ClosedForm`, whose slope has the address `slope`. Or `differentiate` is the address of
    a function of Python: it is called with the first row of a minibatch, whose outputs are known, and
    writes the derivatives of the loss into `room`. It returns 0 to stop.

    Returns:
        False if a gradient is not finite, or `differentiate` has stopped; that step and those after it are not made.
    """
    networks = 1 if policy is None else 2  # numba leaves out what does not apply
    for begin in range(first, last, settings.size):
        end = min(begin + settings.size, last)
        n = end - begin
        size = kernel_block_rows(n)
        blocks = -(-n // size)
        for task in range(thread, networks * blocks, threads):
            a = begin + task // networks * size
            b = min(a + size, end)
            _forward_rows(task, weights.theta, policy, value, std_place, starts, rows, room, seen,
                          begin, a, b)  # fmt: skip
            if not differentiate:
                _differentiate_rows(task, policy, rows, room, seen, settings, slope, n, begin, a, b)
                _backward_rows(task, weights.theta, policy, value, std_place, starts, rows, room,
                               n, begin, a, b)  # fmt: skip
        meet(threads, barrier)
        if thread == 0 and policy is not None:
            seen.entropy[begin // settings.size] = _mean_entropy(room, blocks, n)
        if differentiate:
            if thread == 0:
                room.goes_on[0] = ask(differentiate, begin)
            meet(threads, barrier)
            for task in range(thread, networks * blocks, threads):
                a = begin + task // networks * size
                b = min(a + size, end)
                _backward_rows(task, weights.theta, policy, value, std_place, starts, rows, room,
                               n, begin, a, b)  # fmt: skip
            meet(threads, barrier)
        step += 1
        if not _descend(thread, threads, barrier, weights, room, blocks, networks, settings, step):
            return False
    return True


@part
def _differentiate_rows(
    task: int,
    policy: Array | None,
    rows: Rows,
    room: Room,
    seen: Seen,
    settings: Settings,
    slope: int,
    n: int,
    begin: int,
    a: int,
    b: int,
) -> None:
    """Write the derivatives of a closed form by the log ratios or values of rows a to b of n."""
    number = room.by_value.dtype.type
    if policy is not None and task % 2 == 0:
        weight = number(1 / n)
        for row in range(a, b):
            by = call(slope, seen.log_ratio[row], rows.adv[row], settings.coef)
            room.by_log_ratio[row - begin] = weight * by
    else:
        factor = number(2 * settings.value_coef / n)
        for row in range(a, b):
            room.by_value[row - begin] = factor * (seen.value[row] - rows.ret[row])


@part
def _forward_rows(
    task: int,
    theta: Array,
    policy: Array | None,
    value: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: Rows,
    room: Room,
    seen: Seen,
    begin: int,
    a: int,
    b: int,
) -> None:
    """Compute what the network of a task gives for rows a to b of a minibatch that begins at `begin`."""
    x, work, spare = rows.obs[a:b], room.work[task], room.spare[task]
    is_policy = policy is not None and task % 2 == 0
    layers = value
    if policy is not None and task % 2 == 0:
        layers = policy
    out = forward(theta, layers, x, work)
    if not is_policy:
        for row in range(a, b):
            seen.value[row] = out[row - a, 0]
    elif std_place is not None:
        at, times, k = std_place[0], std_place[1], std_place[2]
        stds = theta[at : at + times * k].reshape(times, k)
        room.entropies[task] = normal_log_ratio(
            stds, out, rows.act[a:b], rows.logp[a:b], seen.log_ratio[a:b], spare[:k]
        )
    elif starts is not None:
        entropies = spare[: (b - a) * (len(starts) - 1)]
        room.entropies[task] = choice_log_ratio(
            starts,
            rows.mask[a:b],
            out,
            rows.act[a:b],
            rows.logp[a:b],
            seen.log_ratio[a:b],
            entropies,
        )
    else:
        room.outputs[a - begin : b - begin] = out


@part
def _backward_rows(
    task: int,
    theta: Array,
    policy: Array | None,
    value: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: Rows,
    room: Room,
    n: int,
    begin: int,
    a: int,
    b: int,
) -> None:
    """Write the gradient of a task, for rows a to b of n, from the derivatives that are in `room`."""
    x, work, grad, spare = rows.obs[a:b], room.work[task], room.grads[task], room.spare[task]
    is_policy = policy is not None and task % 2 == 0
    layers = value
    if policy is not None and task % 2 == 0:
        layers = policy
    out, slopes = outputs(layers, work, b - a), room.by_log_ratio[a - begin : b - begin]
    if not is_policy:
        for row in range(a, b):
            out[row - a, 0] = room.by_value[row - begin]
    elif std_place is not None:
        at, times, k = std_place[0], std_place[1], std_place[2]
        by_stds = grad[at : at + times * k].reshape(times, k)
        share = room.by_entropy[0] * (b - a) / n
        normal_slopes(out, rows.act[a:b], slopes, share, spare[:k], by_stds)
    elif starts is not None:
        entropies = spare[: (b - a) * (len(starts) - 1)]
        choice_slopes(starts, out, rows.act[a:b], slopes, room.by_entropy[0] / n, entropies)
    else:
        out[:] = room.outputs[a - begin : b - begin]
    backward(theta, layers, x, work, out, grad, spare)


@part
def _mean_entropy(room: Room, blocks: int, n: int) -> Any:
    total = room.entropies[0]
    for block in range(1, blocks):
        total += room.entropies[2 * block]
    return total / n


@inner
def _descend(
    thread: int,
    threads: int,
    barrier: Array,
    weights: Weights,
    room: Room,
    blocks: int,
    networks: int,
    settings: Settings,
    step: int,
) -> bool:
    """Make one step along the sum of the tasks' gradients, unless its norm is not finite: return False then."""
    slices, grads, total = room.slices, room.grads, room.total
    for i in range(thread, len(slices), threads):
        a, b, network = slices[i, 0], slices[i, 1], slices[i, 2]
        for j in range(a, b):
            total[j] = grads[network, j]
        for block in range(1, blocks):
            task = block * networks + network
            for j in range(a, b):
                total[j] += grads[task, j]
        room.squares[i] = dot(total[a:b], total[a:b])
    meet(threads, barrier)
    squares = 0.0
    for i in range(len(slices)):
        squares += room.squares[i]
    norm = math.sqrt(squares)
    if not np.isfinite(norm) or not room.goes_on[0]:
        return False
    scale = min(1.0, settings.max_grad_norm / norm) if norm > 0 else 1.0
    theta, first, second = weights.theta, weights.first, weights.second
    for i in range(thread, len(slices), threads):
        a, b = slices[i, 0], slices[i, 1]
        adam(
            theta[a:b], total[a:b], first[a:b], second[a:b], scale, settings.lr, step, settings.eps
        )
    meet(threads, barrier)
    return True
