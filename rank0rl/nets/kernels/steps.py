"""Gradient steps of MLPs in compiled kernels, in place, by one thread or several, with the same bits.

The gradient of a minibatch is a sum of tasks: each network by itself, and its rows in blocks whose
size does not depend on the number of threads. Whoever computes a task, the sums are added in one
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, count, take
from rank0rl.nets.actor_critic import Objective, normalized
from rank0rl.nets.flat import Adam, place
from rank0rl.nets.kernels.compiler import Team, inner, kernel, meet, part
from rank0rl.nets.kernels.losses import choice_slopes, normal_slopes, value_slopes
from rank0rl.nets.kernels.mlp import adam, backward, forward, square

Array = npt.NDArray[Any]

SLICE = 2048  # parameters that a thread adds up and steps at once
_BLOCK = 128  # rows of a task at least, ...
_BLOCKS = 8  # ... and tasks of a minibatch and network at most: each has a gradient of its own
_STEPS = 256  # of one call: a signal is heard between two
_SOME = 256  # rows whose entropy is recorded, where that takes long


class CompiledSteps:
    """Gradient steps of a policy and a value function, with the interface of `AutogradSteps`.

    The parameters' `.grad` is left as the gradient of the last minibatch.

    Args:
        nets: "policy" and "value", or "value" alone: MLPs on the CPU, flat, with gradients in place.
        adam: over their parameters.
        objective: the loss of a minibatch, with a clip ratio.
        max_grad_norm: norm to which a larger gradient is scaled down.
        threads: number of threads; the results do not depend on it.
    """

    def __init__(
        self,
        nets: nn.ModuleDict,
        adam: Adam,
        objective: Objective,
        max_grad_norm: float,
        threads: int,
    ) -> None:
        [vector] = adam.flat.vectors
        assert vector.grad is not None
        theta = vector.detach()
        self._theta, self._grad = theta.numpy(), vector.grad.numpy()
        self._adam, self._objective, self._max_grad_norm = adam, objective, max_grad_norm
        self._team, self._rooms = Team(threads), dict[int, _Room]()
        modules = dict(nets.items())
        policy: Any = modules.get("policy")
        self._policy = policy
        self._tables: Any = policy.tables(theta) if policy else (None, None, None)
        self._value: Array = modules["value"].tables(theta)  # type: ignore[operator]
        self._slices = [
            (a, min(a + SLICE, end), i)
            for i, network in enumerate(modules.values())
            for start, end in [_range(network, theta)]
            for a in range(start, end, SLICE)
        ]
        self.epoch(self._no_rows(), 1, np.random.default_rng(0), 0.0)  # compiles

    def begin(self, rows: Batch, objective: Objective) -> dict[str, Any]:
        """Take the objective of this update; return the rows, which are where the steps compute."""
        self._objective = objective
        return rows

    def epoch(
        self, rows: Mapping[str, Array], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, Array, Array]:
        """Make the gradient steps of one epoch: see `AutogradSteps.epoch`.

        Returns:
            What `Objective` gives to record, of all minibatches: (N,), (N,), (minibatches,).

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        objective, n, number = self._objective, count(rows), self._theta.dtype
        shuffled = take(rows, rng.permutation(n))
        size = min(minibatch_size, max(n, 1))
        given = self._in_order(shuffled, minibatch_size)
        seen = _Seen(*(np.zeros(k, number) for k in (n, n, -(-n // minibatch_size))))
        assert objective.clip_ratio is not None
        settings = _Settings(
            size=size,
            clip_ratio=float(objective.clip_ratio),
            value_coef=float(objective.value_coef),
            entropy_coef=float(objective.entropy_coef),
            max_grad_norm=float(self._max_grad_norm),
            lr=float(lr),
            eps=self._adam.eps,
        )
        policy, std_place, starts = self._tables
        nets = _Weights(self._theta, *self._adam.moments()), policy, self._value, std_place, starts
        room = self._room(size)
        for first in range(0, max(n, 1), size * _STEPS):  # once without rows, to compile
            last, made = min(first + size * _STEPS, n), self._adam.steps
            work = *nets, given, room, seen, settings, first, last, made
            if not self._team.run(_make_steps, len(room.grads), *work):
                raise FloatingPointError(
                    "the gradient is not finite: look for inf or nan in observations and rewards, or "
                    "lower the step size"
                )
            if last > first:  # else another thread may be loading a checkpoint
                self._adam.steps = made - (first - last) // size
        return seen.log_ratio, seen.error, self._entropy(seen, given.obs)

    def end(self) -> None:
        """Do nothing: the weights are in place."""

    def _no_rows(self) -> Batch:
        """Return rows with the types of all others."""
        none = np.zeros(0, self._theta.dtype)
        layers, _, starts = self._tables
        rows = {"obs": np.zeros((0, self._value[0, 2]), none.dtype), "ret": none}
        if layers is None:
            return rows
        act = np.zeros((0, layers[-1, 3] if starts is None else len(starts) - 1), np.int64)
        return {**rows, "act": act, "logp": none, "adv": none}

    def _in_order(self, shuffled: Batch, minibatch_size: int) -> _Rows:
        """Return the rows of an epoch as the kernel takes them."""
        number, n = self._theta.dtype, len(shuffled["ret"])
        obs, ret = (np.ascontiguousarray(shuffled[name], number) for name in ("obs", "ret"))
        if not self._policy:
            return _Rows(obs, ret)
        adv, act = shuffled["adv"], shuffled["act"]
        if self._objective.normalize and n:
            starts = range(0, n, minibatch_size)
            adv = np.concatenate([normalized(adv[a : a + minibatch_size]) for a in starts])
        kind = np.int64 if self._tables[1] is None else number
        return _Rows(
            obs=obs,
            ret=ret,
            act=np.ascontiguousarray(act.reshape(n, math.prod(act.shape[1:])), kind),
            logp=np.ascontiguousarray(shuffled["logp"], number),
            adv=np.ascontiguousarray(adv, number),
            mask=np.ascontiguousarray(shuffled.get("mask", np.zeros((n, 0), bool))),
        )

    def _entropy(self, seen: _Seen, obs: Array) -> Array:
        """Return the entropy, (minibatches,). Of squashed actions, which kernels do not know, of some rows."""
        if getattr(self._policy, "bounds", None) is None or not len(obs):
            return seen.entropy
        with torch.no_grad():
            some = self._policy.distribution(torch.from_numpy(obs[:_SOME]))
            return self._policy.entropy(some).numpy().reshape(1)

    def _room(self, size: int) -> _Room:
        """Return memory for minibatches of this size; the memory for other ones is given up."""
        if size not in self._rooms:
            rows, number = block_rows(size), self._theta.dtype
            tables = [self._value] if self._policy is None else [self._tables[0], self._value]
            tasks = len(tables) * -(-size // rows)
            widest = max(int(table[:, 3].max()) for table in tables)
            numbers = max(int(table[-1, 7]) for table in tables)
            self._rooms = {
                size: _Room(
                    grads=np.zeros((tasks, len(self._theta)), number),
                    work=np.zeros((tasks, rows * numbers), number),
                    spare=np.zeros((tasks, 2 * rows * widest), number),
                    total=self._grad,
                    slices=np.array(self._slices),
                    squares=np.zeros(len(self._slices), number),
                    entropies=np.zeros(tasks, number),
                )
            }
        return self._rooms[size]


def _range(network: nn.Module, theta: Tensor) -> tuple[int, int]:
    """Return where the parameters of a network begin and end in the flat vector."""
    places = [(place(p, theta), p.numel()) for p in network.parameters()]
    start, end = min(a for a, _ in places), max(a + n for a, n in places)
    assert end - start == sum(n for _, n in places), "a network's parameters lie side by side"
    return start, end


class _Weights(NamedTuple):
    """Parameters and Adam's moments, vectors of the same length."""

    theta: Array
    first: Array
    second: Array


class _Rows(NamedTuple):
    """Rows of a batch in the order of an epoch. Without a policy, there are only the first two."""

    obs: Array
    ret: Array
    act: Any = None
    logp: Any = None
    adv: Any = None
    mask: Any = None


class _Room(NamedTuple):
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


class _Seen(NamedTuple):
    """Arrays that an epoch fills for the record: see `Objective`."""

    log_ratio: Array
    error: Array
    entropy: Array


class _Settings(NamedTuple):
    """Numbers of the objective and of the optimizer; size is that of a minibatch."""

    size: int
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
def _make_steps(
    thread: int,
    threads: int,
    barrier: Array,
    weights: _Weights,
    policy: Array | None,
    value: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: _Rows,
    room: _Room,
    seen: _Seen,
    settings: _Settings,
    first: int,
    last: int,
    step: int,
) -> bool:
    """Make gradient steps on `Objective`, on one minibatch after the other, from row first to row last.

    `policy` and `value` are tables of layers; without a policy, the value function learns alone. Normal
    actions have `std_place`: where the log standard deviations begin in theta, how many are summed, and
    of how many actions. Choices have `starts`, see `choice_slopes`. `step` steps were made before.

    Returns:
        False if a gradient is not finite; that step and those after it are not made.
    """
    networks = 1 if policy is None else 2  # numba leaves out what does not apply
    for begin in range(first, last, settings.size):
        end = min(begin + settings.size, last)
        size = kernel_block_rows(end - begin)
        blocks = -(-(end - begin) // size)
        for task in range(thread, networks * blocks, threads):
            a = begin + task // networks * size
            b = min(a + size, end)
            x, work, grad = rows.obs[a:b], room.work[task], room.grads[task]
            layers = value
            if policy is not None and task % networks == 0:
                layers = policy
            out = forward(weights.theta, layers, x, work)
            if policy is not None and task % networks == 0:
                room.entropies[task] = _policy_slopes(
                    weights.theta, std_place, starts, rows, settings, end - begin, a, b, out,
                    seen.log_ratio[a:b], grad, room.spare[task],
                )  # fmt: skip
            else:
                coef = settings.value_coef
                value_slopes(out, rows.ret[a:b], coef, end - begin, seen.error[a:b])
            backward(weights.theta, layers, x, work, out, grad, room.spare[task])
        meet(threads, barrier)
        if thread == 0 and policy is not None:
            total = room.entropies[0]
            for block in range(1, blocks):
                total += room.entropies[2 * block]
            seen.entropy[begin // settings.size] = total / (end - begin)
        step += 1
        if not _descend(thread, threads, barrier, weights, room, blocks, networks, settings, step):
            return False
    return True


@part
def _policy_slopes(
    theta: Array,
    std_place: Array | None,
    starts: Array | None,
    rows: _Rows,
    settings: _Settings,
    n: int,
    a: int,
    b: int,
    out: Array,
    log_ratio: Array,
    grad: Array,
    spare: Array,
) -> Any:
    """Turn the policy's outputs for rows a to b of n into derivatives; return the sum of the entropies."""
    act, logp, adv = rows.act[a:b], rows.logp[a:b], rows.adv[a:b]
    clip, bonus = settings.clip_ratio, settings.entropy_coef
    total = theta.dtype.type(0)
    if std_place is not None:
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
    weights: _Weights,
    room: _Room,
    blocks: int,
    networks: int,
    settings: _Settings,
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
