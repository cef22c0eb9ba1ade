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
from rank0rl.nets.kernels.distributions import Block, by_outputs, log_ratios
from rank0rl.nets.kernels.mlp import adam, backward, forward, outputs
from rank0rl.nets.kernels.products import dot

Array = npt.NDArray[Any]

SLICE = 2048  # parameters that a thread adds up and steps at once
_BLOCK = 128  # rows of a task at least, ...
_BLOCKS = 8  # ... and tasks of a minibatch and network at most: each has a gradient of its own


class Rows(NamedTuple):
    """Rows of a batch in the order of an epoch, (N, ...)."""

    obs: Array
    ret: Array
    act: Array
    logp: Array
    adv: Array
    mask: Array


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
    """(1,), 1 if the derivatives are there; else no step is made."""
    outputs: Array
    """Outputs of the policy's network, or the derivatives by them, (rows, outputs), where torch takes these."""


class Seen(NamedTuple):
    """Numbers that the networks give for the rows of an epoch, (N,), and the entropy of each minibatch."""

    log_ratio: Array
    value: Array
    entropy: Array


class Epoch(NamedTuple):
    """All that the tasks of an epoch share. The vectors of parameters and of Adam's moments have one length."""

    theta: Array
    first: Array
    second: Array
    policy: Array
    """Table of the policy's layers, see `mlp`. Without rows, the value function learns alone."""
    value: Array
    """Table of the value function's layers."""
    head: Any
    """The policy's distribution, see `distributions`."""
    rows: Rows
    room: Room
    seen: Seen
    size: int
    """Rows of a minibatch."""
    slope: int
    """Address of `ClosedForm.slope`, or 0."""
    differentiate: int
    """0, or the address of a function of Python: it is called with the first row of a minibatch, whose outputs
    are known, writes the derivatives of the loss into `room`, and says so in `goes_on`."""
    coef: float
    value_coef: float
    max_grad_norm: float
    lr: float
    eps: float


def block_rows(n: int) -> int:
    """Return the number of rows in a block of a minibatch of n rows; the last block has what is left."""
    return max(_BLOCK, -(-n // _BLOCKS))


def _task_of(turn: int, threads: int) -> int:
    """Return the task that a thread takes as this turn, of policy and value function.

    They change places in every second round of an even number of threads: else, one of two threads has all tasks of the
    policy, which take a fifth longer.
    """
    return turn ^ 1 if threads % 2 == 0 and turn // threads % 2 else turn


kernel_block_rows, kernel_task_of = part(block_rows), part(_task_of)


@kernel
def apply(slope: int, log_ratio: Array, adv: Array, coef: float, out: Array) -> None:
    """Write what `ClosedForm.slope`, at this address, gives for each row."""
    for row in range(len(out)):
        out[row] = call(slope, log_ratio[row], adv[row], coef)


@kernel
def make_steps(
    thread: int, threads: int, barrier: Array, epoch: Epoch, first: int, last: int, step: int
) -> bool:
    """Make gradient steps on one minibatch after the other, from row first to row last.

    `step` steps were made before.

    Returns:
        False if a gradient is not finite, or `differentiate` has stopped; that step and those after it are not made.
    """
    for begin in range(first, last, epoch.size):
        end = min(begin + epoch.size, last)
        n = end - begin
        for turn in range(thread, _tasks(epoch, n), threads):
            task = _task(epoch, turn, threads)
            block = _block(epoch, task, begin, end)
            _forward_rows(epoch, task, block)
            if not epoch.differentiate:
                _differentiate_rows(epoch, task, block, n)
                _backward_rows(epoch, task, block, n)
        meet(threads, barrier)
        if thread == 0 and _networks(epoch) == 2:
            epoch.seen.entropy[begin // epoch.size] = _mean_entropy(epoch, n)
        if epoch.differentiate:
            if thread == 0:
                epoch.room.goes_on[0] = 0
                ask(epoch.differentiate, begin)
            meet(threads, barrier)
            for turn in range(thread, _tasks(epoch, n), threads):
                task = _task(epoch, turn, threads)
                _backward_rows(epoch, task, _block(epoch, task, begin, end), n)
            meet(threads, barrier)
        step += 1
        if not _descend(thread, threads, barrier, epoch, n, step):
            return False
    return True


@part
def _networks(epoch: Epoch) -> int:
    return 2 if len(epoch.policy) else 1


@part
def _tasks(epoch: Epoch, n: int) -> int:
    """Return the number of tasks of a minibatch of n rows."""
    return _networks(epoch) * -(-n // kernel_block_rows(n))


@part
def _task(epoch: Epoch, turn: int, threads: int) -> int:
    return kernel_task_of(turn, threads) if _networks(epoch) == 2 else turn


@part
def _is_policy(epoch: Epoch, task: int) -> bool:
    """Return True if a task is one of the policy: its tasks and those of the value function take turns."""
    return len(epoch.policy) > 0 and task % 2 == 0


@part
def _block(epoch: Epoch, task: int, begin: int, end: int) -> Block:
    """Return the rows of a task of a minibatch, rows begin to end."""
    rows, room, seen = epoch.rows, epoch.room, epoch.seen
    size = kernel_block_rows(end - begin)
    i = task // _networks(epoch) * size
    j = min(i + size, end - begin)
    a, b = begin + i, begin + j
    return Block(
        rows.obs[a:b],
        rows.ret[a:b],
        rows.act[a:b],
        rows.logp[a:b],
        rows.adv[a:b],
        rows.mask[a:b],
        seen.log_ratio[a:b],
        seen.value[a:b],
        room.by_log_ratio[i:j],
        room.by_value[i:j],
        room.outputs[i:j],
        room.spare[task],
    )


@part
def _forward_rows(epoch: Epoch, task: int, block: Block) -> None:
    """Compute what the network of a task gives for its rows."""
    layers = epoch.policy if _is_policy(epoch, task) else epoch.value
    out = forward(epoch.theta, layers, block.obs, epoch.room.work[task])
    if _is_policy(epoch, task):
        epoch.room.entropies[task] = log_ratios(epoch.head, epoch.theta, out, block)
    else:
        for row in range(len(out)):
            block.value[row] = out[row, 0]


@part
def _differentiate_rows(epoch: Epoch, task: int, block: Block, n: int) -> None:
    """Write the derivatives of a closed form by the log ratios or values of a task's rows, of n."""
    number = epoch.theta.dtype.type
    if _is_policy(epoch, task):
        weight = number(1 / n)
        if not epoch.slope:
            block.by_log_ratio[:] = 0
            return
        for row in range(len(block.obs)):
            by = call(epoch.slope, block.log_ratio[row], block.adv[row], epoch.coef)
            block.by_log_ratio[row] = weight * by
    else:
        factor = number(2 * epoch.value_coef / n)
        for row in range(len(block.obs)):
            block.by_value[row] = factor * (block.value[row] - block.ret[row])


@part
def _backward_rows(epoch: Epoch, task: int, block: Block, n: int) -> None:
    """Write the gradient of a task from the derivatives of a loss of n rows that are in `room`."""
    room = epoch.room
    work, grad = room.work[task], room.grads[task]
    layers = epoch.policy if _is_policy(epoch, task) else epoch.value
    out = outputs(layers, work, len(block.obs))
    if _is_policy(epoch, task):
        by_outputs(epoch.head, out, block, room.by_entropy[0] / n, grad)
    else:
        for row in range(len(out)):
            out[row, 0] = block.by_value[row]
    backward(epoch.theta, layers, block.obs, work, out, grad, block.spare)


@part
def _mean_entropy(epoch: Epoch, n: int) -> Any:
    total = epoch.room.entropies[0]
    for task in range(2, _tasks(epoch, n), 2):
        total += epoch.room.entropies[task]
    return total / n


@inner
def _descend(thread: int, threads: int, barrier: Array, epoch: Epoch, n: int, step: int) -> bool:
    """Make one step along the sum of the tasks' gradients, unless its norm is not finite: return False then."""
    room, networks = epoch.room, _networks(epoch)
    slices, grads, total = room.slices, room.grads, room.total
    for i in range(thread, len(slices), threads):
        a, b, network = slices[i, 0], slices[i, 1], slices[i, 2]
        for j in range(a, b):
            total[j] = grads[network, j]
        for task in range(network + networks, _tasks(epoch, n), networks):
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
    scale = min(1.0, epoch.max_grad_norm / norm) if norm > 0 else 1.0
    theta, first, second = epoch.theta, epoch.first, epoch.second
    for i in range(thread, len(slices), threads):
        a, b = slices[i, 0], slices[i, 1]
        adam(theta[a:b], total[a:b], first[a:b], second[a:b], scale, epoch.lr, step, epoch.eps)
    meet(threads, barrier)
    return True
