"""Gradient steps of MLPs in compiled kernels, in place, by one thread or several, with the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, count, take
from rank0rl.nets.actor_critic import Objective, ValueFunction, normalized
from rank0rl.nets.flat import Adam, place
from rank0rl.nets.kernels.descent import (
    SLICE,
    PolicyRows,
    Room,
    Seen,
    Settings,
    Weights,
    block_rows,
    ppo_steps,
    value_steps,
)
from rank0rl.nets.kernels.threads import Team

Array = npt.NDArray[Any]

_STEPS = 256  # of one call: a signal is heard between two
_SOME = 256  # rows whose entropy is recorded, where that takes long


class CompiledSteps:
    """Gradient steps of a policy and a value function, with the interface of `AutogradSteps`.

    The parameters' `.grad` is left as the gradient of the last minibatch.

    Args:
        nets: "policy" and "value", MLPs on the CPU, flat, with gradients in place.
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
        self._policy: Any = nets["policy"]
        self._value: Any = nets["value"]
        self._adam = adam
        self._objective, self._max_grad_norm = objective, max_grad_norm
        self._memory = _Memory(adam, [nets["policy"], nets["value"]], threads)
        self._compile()

    def _compile(self) -> None:
        """Compile what `epoch` needs, or load it from the cache: its arguments have the types of all others."""
        layers, _, starts = self._policy.tables(self._memory.theta)
        none, width = np.zeros(0, self._memory.dtype), layers[-1, 3]
        act = np.zeros((0, width if starts is None else len(starts) - 1), np.int64)
        rows = {"obs": np.zeros((0, layers[0, 2]), self._memory.dtype), "act": act}
        rows |= {"logp": none, "adv": none, "ret": none}
        self.epoch(rows, 1, np.random.default_rng(0), 0.0)

    def begin(self, rows: Batch, objective: Objective) -> dict[str, Any]:
        """Take the objective of this update; return the rows, which are where the steps compute."""
        self._objective = objective
        return rows

    def epoch(
        self, rows: Batch, minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, Array, Array]:
        """Make the gradient steps of one epoch.

        Args:
            rows: what `Objective` takes, N rows.
            minibatch_size: rows of a gradient step; the last one takes what is left.
            rng: draws the order of rows.
            lr: step size.

        Returns:
            What `Objective` gives to record, of all minibatches: (N,), (N,), (minibatches,).

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        objective, memory, policy = self._objective, self._memory, self._policy
        n, number, clip_ratio = count(rows), memory.dtype, objective.clip_ratio
        assert clip_ratio is not None
        shuffled = take(rows, rng.permutation(n))
        adv = shuffled["adv"]
        if objective.normalize and n:
            starts = range(0, n, minibatch_size)
            adv = np.concatenate([normalized(adv[a : a + minibatch_size]) for a in starts])
        layers, std_place, choices = policy.tables(memory.theta)
        act = shuffled["act"].reshape(n, math.prod(shuffled["act"].shape[1:]))
        of_policy = PolicyRows(
            obs=np.ascontiguousarray(shuffled["obs"], number),
            act=np.ascontiguousarray(act, np.int64 if std_place is None else number),
            logp=np.ascontiguousarray(shuffled["logp"], number),
            adv=np.ascontiguousarray(adv, number),
            ret=np.ascontiguousarray(shuffled["ret"], number),
            mask=np.ascontiguousarray(shuffled.get("mask", np.zeros((n, 0), bool))),
        )
        minibatches = -(-n // minibatch_size)
        seen = Seen(np.zeros(n, number), np.zeros(n, number), np.zeros(minibatches, number))
        settings = Settings(
            size=min(minibatch_size, max(n, 1)),
            clip_ratio=float(clip_ratio),
            value_coef=float(objective.value_coef),
            entropy_coef=float(objective.entropy_coef),
            max_grad_norm=float(self._max_grad_norm),
            lr=float(lr),
            eps=self._adam.eps,
        )
        memory.run(
            ppo_steps,
            layers=(layers, self._value.tables(memory.theta)),
            rows=(std_place, choices, of_policy),
            seen=seen,
            settings=settings,
            n=n,
        )
        return seen.log_ratio, seen.error, self._entropy(seen, of_policy.obs)

    def _entropy(self, seen: Seen, obs: Array) -> Array:
        """Return the entropy, (minibatches,). Of squashed actions, which kernels do not know, of some rows."""
        if getattr(self._policy, "bounds", None) is None or not len(obs):
            return seen.entropy
        with torch.no_grad():
            some = self._policy.distribution(torch.from_numpy(obs[:_SOME]))
            return self._policy.entropy(some).numpy().reshape(1)

    def end(self) -> None:
        """Do nothing: the weights are in place."""


class CompiledFit:
    """Gradient steps of a value function alone.

    Args:
        value: an MLP on the CPU, flat, with gradients in place.
        adam: over its parameters.
        threads: number of threads; the results do not depend on it.
    """

    def __init__(self, value: ValueFunction, adam: Adam, threads: int) -> None:
        self._value, self._adam = value, adam
        self._memory = _Memory(adam, [value], threads)
        dtype = self._memory.dtype
        x = np.zeros((0, value.tables(self._memory.theta)[0, 2]), dtype)
        self.epoch(x, np.zeros(0, dtype), 1, np.random.default_rng(0), 0.0)  # compiles

    def epoch(
        self, x: Array, ret: Array, minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> Array:
        """Make the gradient steps of one epoch; return the errors (N,), each from before its step.

        Args:
            x: inputs (N, inputs).
            ret: returns in units of the value function's scale, (N,).
            minibatch_size: rows of a gradient step; the last one takes what is left.
            rng: draws the order of rows.
            lr: step size.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        memory, n = self._memory, len(x)
        error, order = np.zeros(n, memory.dtype), rng.permutation(n)
        settings = Settings(
            size=min(minibatch_size, max(n, 1)),
            clip_ratio=np.inf,
            value_coef=1.0,
            entropy_coef=0.0,
            max_grad_norm=np.inf,
            lr=float(lr),
            eps=self._adam.eps,
        )
        memory.run(
            value_steps,
            layers=(self._value.tables(memory.theta),),
            rows=(np.ascontiguousarray(x[order], memory.dtype), ret[order].astype(memory.dtype)),
            seen=error,
            settings=settings,
            n=n,
        )
        return error


class _Memory:
    """Holds what kernels share between epochs: the weights, the threads, and the memory of their tasks."""

    def __init__(self, adam: Adam, networks: list[Any], threads: int) -> None:
        [vector] = adam.flat.vectors
        assert vector.grad is not None
        self.theta: Tensor = vector.detach()
        self._grad = vector.grad.numpy()
        self.dtype = self.theta.numpy().dtype
        self._adam, self._networks, self._team = adam, networks, Team(threads)
        self._room: dict[int, Room] = {}

    def run(
        self,
        kernel: Any,
        *,
        layers: tuple[Array, ...],
        rows: tuple[Any, ...],
        seen: Any,
        settings: Settings,
        n: int,
    ) -> None:
        """Run a kernel that makes the gradient steps of n rows.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        weights = Weights(self.theta.numpy(), *self._adam.moments())
        room, size = self._room_for(settings.size, layers), settings.size
        for first in range(0, max(n, 1), size * _STEPS):  # once without rows, to compile
            last, made = min(first + size * _STEPS, n), self._adam.steps
            given = (*layers, *rows, room, seen, settings, first, last, made)
            if not self._team.run(kernel, len(room.grads), weights, *given):
                raise FloatingPointError(
                    "the gradient is not finite: look for inf or nan in observations and rewards, or "
                    "lower the step size"
                )
            if last > first:  # else another thread may be loading a checkpoint
                self._adam.steps = made - (first - last) // size

    def _room_for(self, size: int, layers: tuple[Array, ...]) -> Room:
        if size not in self._room:
            rows = block_rows(size)
            tasks = len(layers) * -(-size // rows)
            widest = max(int(table[:, 3].max()) for table in layers)
            numbers = max(int(table[:, 3].sum()) for table in layers)
            number = self.dtype
            slices: list[tuple[int, int, int]] = []
            for i, network in enumerate(self._networks):
                start, end = _range(network, self.theta)
                slices += [(a, min(a + SLICE, end), i) for a in range(start, end, SLICE)]
            self._room = {
                size: Room(
                    grads=np.zeros((tasks, len(self.theta)), number),
                    work=np.zeros((tasks, rows * numbers), number),
                    spare=np.zeros((tasks, 2 * rows * widest), number),
                    total=self._grad,
                    slices=np.array(slices),
                    squares=np.zeros(len(slices), number),
                    entropies=np.zeros(tasks, number),
                )
            }
        return self._room[size]


def _range(network: nn.Module, theta: Tensor) -> tuple[int, int]:
    """Return where the parameters of a network begin and end in the flat vector."""
    places = [(place(p, theta), p.numel()) for p in network.parameters()]
    start, end = min(a for a, _ in places), max(a + n for a, n in places)
    assert end - start == sum(n for _, n in places), "a network's parameters lie side by side"
    return start, end
