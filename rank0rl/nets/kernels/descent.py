"""Kernels that make gradient steps, by one thread or several, with the same bits.

The gradient of a minibatch is a sum of tasks: each network by itself, and its rows in blocks whose
size does not depend on the number of threads. Whoever computes a task, the sums are added in one
order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rank0rl.nets.kernels.compiler import inner, kernel, part
from rank0rl.nets.kernels.losses import choice_slopes, normal_slopes, value_slopes
from rank0rl.nets.kernels.mlp import adam, backward, forward, square
from rank0rl.nets.kernels.threads import meet

Array = npt.NDArray[Any]

SLICE = 2048  # parameters that a thread adds up and steps at once
_BLOCK = 128  # rows of a task at least, ...
_BLOCKS = 8  # ... and tasks of a minibatch and network at most: each has a gradient of its own


class Weights(NamedTuple):
    """Parameters and Adam's moments: vectors of the same length."""

    theta: Array
    first: Array
    second: Array


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


class PolicyRows(NamedTuple):
    """Rows of a batch in the order of an epoch."""

    obs: Array
    act: Array
    logp: Array
    adv: Array
    ret: Array
    mask: Array


class Seen(NamedTuple):
    """Arrays that an epoch fills for the record: see `Objective`."""

    log_ratio: Array
    error: Array
    entropy: Array


class Settings(NamedTuple):
    """Numbers of the objective and of the optimizer."""

    size: int
    """Rows of a minibatch."""
    clip_ratio: float
    value_coef: float
    entropy_coef: float
    max_grad_norm: float
    lr: float
    eps: float


def block_rows(n: int) -> int:
    """Return the number of rows in a block of a minibatch of n rows; the last block has what is left."""
    return max(_BLOCK, -(-n // _BLOCKS))


kernel_block_rows = part(block_rows)  # for kernels


@kernel
def ppo_steps(
    thread: int,
    threads: int,
    barrier: Array,
    weights: Weights,
    policy: Array,
    value: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: PolicyRows,
    room: Room,
    seen: Seen,
    settings: Settings,
    first: int,
    last: int,
    step: int,
) -> bool:
    """Make gradient steps on `Objective`, on one minibatch after the other.

    Args:
        thread: number of this thread.
        threads: number of threads.
        barrier: see `Team`.
        weights: changed in place.
        policy: layers of the policy.
        value: layers of the value function.
        std_place: of a policy with normal actions: where the log standard deviations begin in theta,
            how many are summed, and of how many actions, int64; else None.
        starts: of a policy that chooses: see `choice_slopes`; else None.
        rows: N rows.
        room: memory.
        seen: gets what is recorded.
        settings: numbers.
        first: first row of the first minibatch.
        last: row behind the last minibatch.
        step: number of steps made before.

    Returns:
        False if a gradient is not finite; that step and those after it are not made.
    """
    for begin in range(first, last, settings.size):
        end = min(begin + settings.size, last)
        size = kernel_block_rows(end - begin)
        blocks = -(-(end - begin) // size)
        for task in range(thread, 2 * blocks, threads):
            a = begin + task // 2 * size
            b = min(a + size, end)
            x, work, grad = rows.obs[a:b], room.work[task], room.grads[task]
            layers = policy if task % 2 == 0 else value
            out = forward(weights.theta, layers, x, work)
            if task % 2 == 0:
                room.entropies[task] = _policy_slopes(
                    weights.theta, std_place, starts, rows, settings, end - begin, a, b, out,
                    seen.log_ratio[a:b], grad, room.spare[task],
                )  # fmt: skip
            else:
                coef = settings.value_coef
                value_slopes(out, rows.ret[a:b], coef, end - begin, seen.error[a:b])
            backward(weights.theta, layers, x, work, out, grad, room.spare[task])
        meet(threads, barrier)
        if thread == 0:
            total = room.entropies[0]
            for block in range(1, blocks):
                total += room.entropies[2 * block]
            seen.entropy[begin // settings.size] = total / (end - begin)
        step += 1
        if not _descend(thread, threads, barrier, weights, room, blocks, 2, settings, step):
            return False
    return True


@kernel
def value_steps(
    thread: int,
    threads: int,
    barrier: Array,
    weights: Weights,
    value: Array,
    obs: Array,
    ret: Array,
    room: Room,
    error: Array,
    settings: Settings,
    first: int,
    last: int,
    step: int,
) -> bool:
    """Make gradient steps on the value loss alone; see `ppo_steps`."""
    for begin in range(first, last, settings.size):
        end = min(begin + settings.size, last)
        size = kernel_block_rows(end - begin)
        blocks = -(-(end - begin) // size)
        for task in range(thread, blocks, threads):
            a = begin + task * size
            b = min(a + size, end)
            x, work = obs[a:b], room.work[task]
            out = forward(weights.theta, value, x, work)
            value_slopes(out, ret[a:b], settings.value_coef, end - begin, error[a:b])
            backward(weights.theta, value, x, work, out, room.grads[task], room.spare[task])
        meet(threads, barrier)
        step += 1
        if not _descend(thread, threads, barrier, weights, room, blocks, 1, settings, step):
            return False
    return True


@part
def _policy_slopes(
    theta: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: PolicyRows,
    settings: Settings,
    n: int,
    a: int,
    b: int,
    out: Array,
    log_ratio: Array,
    grad: Array,
    spare: Array,
) -> Any:
    """Turn the policy's outputs for rows a to b into derivatives by them; n is the minibatch's rows.

    Returns:
        The sum of the rows' entropies.
    """
    act, logp, adv = rows.act[a:b], rows.logp[a:b], rows.adv[a:b]
    clip, bonus = settings.clip_ratio, settings.entropy_coef
    total = theta.dtype.type(0)
    if std_place is not None:  # numba leaves out what does not apply
        at, times, k = std_place[0], std_place[1], std_place[2]
        stds = theta[at : at + times * k].reshape(times, k)
        by_stds = grad[at : at + times * k].reshape(times, k)
        total = normal_slopes(stds, out, act, logp, adv, clip, bonus, n, log_ratio, by_stds, spare)
    if starts is not None:
        mask = rows.mask[a:b]
        total = choice_slopes(starts, mask, out, act, logp, adv, clip, bonus, n, log_ratio, spare)
    return total


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
    """Add up the tasks' gradients, limit the norm of the sum, and make one step of Adam.

    Returns:
        False if the norm is not finite; then there was no step.
    """
    slices, grads, total = room.slices, room.grads, room.total
    for i in range(thread, len(slices), threads):
        a, b, network = slices[i, 0], slices[i, 1], slices[i, 2]
        for j in range(a, b):
            total[j] = grads[network, j]
        for block in range(1, blocks):
            task = block * networks + network
            for j in range(a, b):
                total[j] += grads[task, j]
        room.squares[i] = square(total[a:b])
    meet(threads, barrier)
    squares = 0.0
    for i in range(len(slices)):
        squares += room.squares[i]
    norm = math.sqrt(squares)
    if not np.isfinite(norm):
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
