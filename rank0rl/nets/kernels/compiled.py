"""Gradient steps of MLPs in compiled kernels, in place, by one thread or several, with the same bits.

Networks, clipping and Adam are always compiled. The loss is differentiated in one of three ways: by
its closed form, in the kernel; by torch, given log ratios, entropy and values; or by torch, given the
outputs of the networks. See `update.GradientSteps`, which takes the fastest that is right.
"""

from __future__ import annotations

import copy
import ctypes
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, count, take
from rank0rl.nets.actor_critic import ClosedForm, Evaluate, Loss, normalized
from rank0rl.nets.flat import NOT_FINITE, Adam, derivatives, place
from rank0rl.nets.kernels import CLOSED, LOSS, OUTPUTS
from rank0rl.nets.kernels.compiler import Team, scalar
from rank0rl.nets.kernels.distributions import Beta, ByTorch, Choices, head_of
from rank0rl.nets.kernels.steps import (
    SLICE,
    Epoch,
    Room,
    Rows,
    Seen,
    apply,
    block_rows,
    make_steps,
)

Array = npt.NDArray[Any]

_STEPS = 256  # of one call: a signal is heard between two
_SOME = 256  # rows whose entropy is recorded, where that takes long
_NAMES = ("obs", "act", "logp", "adv", "ret", "mask")  # rows that kernels take


class CompiledSteps:
    """Gradient steps of a policy and a value function, with the interface of `AutogradSteps`.

    The parameters' `.grad` is left as the gradient of the last minibatch.

    Args:
        nets: "policy" and "value", or "value" alone: MLPs on the CPU, flat, with gradients in place.
        evaluate: what torch does with these networks: see `actor_critic.Evaluate`.
        adam: over their parameters.
        max_grad_norm: norm to which a larger gradient is scaled down.
        threads: number of threads; the results do not depend on it.
        normalize: True if advantages get mean 0 and standard deviation 1 over each minibatch.
    """

    def __init__(
        self,
        nets: nn.ModuleDict,
        evaluate: Evaluate,
        adam: Adam,
        max_grad_norm: float,
        threads: int,
        normalize: bool = False,
    ) -> None:
        [vector] = adam.flat.vectors
        assert vector.grad is not None
        theta = vector.detach()
        self._theta, self._grad = theta.numpy(), vector.grad.numpy()
        self._adam, self._max_grad_norm, self._normalize = adam, max_grad_norm, normalize
        self._team, self._rooms = Team(threads), dict[int, Room]()
        self._modules: dict[str, Any] = dict(nets.items())
        self._in_torch, self._evaluate = _InTorch(self._modules, theta), evaluate
        policy = self._modules.get("policy")
        self._value = self._modules["value"].mlp.table(theta)
        self._policy = policy.mlp.table(theta) if policy else self._value[:0]
        self._head = head_of(policy, theta)
        self._ranges = [_range(network, theta) for network in self._modules.values()]
        self._slices = [
            (a, min(a + SLICE, end), i)
            for i, (start, end) in enumerate(self._ranges)
            for a in range(start, end, SLICE)
        ]
        self.ways: tuple[str, ...] = (CLOSED,)
        """Ways to differentiate the loss, the fastest first."""
        if policy:
            unknown = isinstance(self._head, ByTorch)
            self.ways = (OUTPUTS,) if unknown else (CLOSED, LOSS, OUTPUTS)
        self.way = self.ways[0]
        """The one that is taken."""
        self.knows_entropy = isinstance(self._head, Beta) or not getattr(policy, "bounds", None)
        """False if kernels compute another entropy than the policy: that of draws, not of their tanh. Some rows' is then recorded, by torch."""
        self._loss: Loss | None = None
        self._closed: ClosedForm | None = None
        self._slope: Any = None  # the last one that was compiled, and numba's error
        self._error = ""

    def begin(self, rows: Batch, loss: Loss, closed: ClosedForm | None) -> dict[str, Any]:
        """Take the loss of this update; return the rows, which are where the steps compute."""
        self._loss, self._closed = loss, closed
        return rows

    def epoch(
        self, rows: Mapping[str, Array], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, Array, Array]:
        """Make the gradient steps of one epoch: see `AutogradSteps.epoch`.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        n, number = count(rows), self._theta.dtype
        size = min(minibatch_size, max(n, 1))
        order = rng.permutation(n)
        shuffled = take({name: rows[name] for name in _NAMES if name in rows}, order)
        seen = Seen(*(np.zeros(k, number) for k in (n, n, -(-n // size))))
        closed = self._closed if self.way == CLOSED else None
        head = ByTorch() if self.way == OUTPUTS else self._head
        first, second = self._adam.moments()
        room, raised = self._room(size), list[BaseException]()
        room.by_entropy[0] = -closed.entropy_coef if closed else 0.0
        room.goes_on[0] = 1
        by_torch = None if closed else self._by_torch(take(rows, order), size, room, seen, raised)
        address = ctypes.cast(by_torch, ctypes.c_void_p).value if by_torch else 0
        epoch = Epoch(
            theta=self._theta,
            first=first,
            second=second,
            policy=self._policy,
            value=self._value,
            head=head,
            rows=self._in_order(shuffled, minibatch_size, head),
            room=room,
            seen=seen,
            size=size,
            slope=scalar(closed.slope, number).address if closed and closed.slope else 0,
            differentiate=address or 0,
            coef=float(closed.coef) if closed else 0.0,
            value_coef=float(closed.value_coef) if closed else 0.0,
            max_grad_norm=float(self._max_grad_norm),
            lr=float(lr),
            eps=self._adam.eps,
        )
        self._make(epoch, raised)
        error = seen.value - shuffled["ret"] if "ret" in shuffled else seen.value
        return seen.log_ratio, error, self._entropy(seen, epoch.rows.obs)

    def end(self) -> None:
        """Do nothing: the weights are in place."""

    def compile(self, closed: ClosedForm | None) -> None:
        """Compile the kernels of the way that is taken, by a closed form if there is one."""
        self._closed = None if self.why_not(closed) else closed
        if self.way == CLOSED and self._closed is None:
            self.way = LOSS
        self.epoch(self._no_rows(), 1, np.random.default_rng(0), 0.0)

    def why_not(self, closed: ClosedForm | None) -> str:
        """Return why a closed form does not compile, "" if it does."""
        slope = closed.slope if closed else None
        if slope != self._slope:
            self._slope, self._error = slope, _error(slope, self._theta.dtype) if slope else ""
        return self._error

    def gradient(
        self, way: str, rows: Batch, loss: Loss, closed: ClosedForm | None
    ) -> list[Array] | None:
        """Return the gradient of the loss of some rows, by a way, and what `epoch` does, in order of the rows.

        Returns:
            None if this way cannot do it.
        """
        if way == CLOSED and closed is None:
            return None
        n, kept = len(rows["obs"]), (self._theta, *self._adam.moments())
        before, steps = [array.copy() for array in kept], self._adam.steps
        self.way = way
        self.begin(rows, loss, closed)
        try:
            seen = self.epoch(rows, n, np.random.default_rng(0), 0.0)
        except _OtherInputsError:
            return None
        except FloatingPointError:
            seen = np.full(n, np.nan), np.full(n, np.nan), np.full(1, np.nan)
        finally:
            for array, was in zip(kept, before, strict=True):
                array[:] = was
            self._adam.steps = steps
        order, of_rows = np.random.default_rng(0).permutation(n), np.empty((2, n), self._grad.dtype)
        of_rows[:, order] = seen[:2]
        return [self._grad.copy(), *of_rows, seen[2]]

    def by_network(self, gradient: Array) -> list[Array]:
        """Return the parts of a gradient, one for each network."""
        return [gradient[start:end] for start, end in self._ranges]

    def slopes(
        self, closed: ClosedForm, rows: Batch, log_ratio: Array, value: Array
    ) -> list[Array]:
        """Return the derivatives of a closed form by log ratios (n,), values (n,) and the entropy (), of n rows."""
        n, by = len(value), np.zeros(len(value), self._theta.dtype)
        if closed.slope:
            slope = scalar(closed.slope, self._theta.dtype).address
            adv = np.ascontiguousarray(rows["adv"], by.dtype)
            log_ratio = np.ascontiguousarray(log_ratio, by.dtype)
            apply(slope, log_ratio, adv, float(closed.coef), by)
        by_value = 2 * closed.value_coef * (value - rows["ret"])
        return [by / n, by_value / n, np.array(-closed.entropy_coef)]

    def _make(self, epoch: Epoch, raised: list[BaseException]) -> None:
        """Make the steps of an epoch. `raised` gets the errors of torch."""
        n, most = len(epoch.rows.obs), epoch.size * _STEPS
        for first in range(0, max(n, 1), most):  # once without rows, to compile
            last, made = min(first + most, n), self._adam.steps
            tasks = len(epoch.room.grads)
            with _heard(raised) if epoch.differentiate else nullcontext():
                finite = self._team.run(make_steps, tasks, epoch, first, last, made)
            if raised:
                raise raised[0]
            if not finite:
                raise FloatingPointError(NOT_FINITE)
            if last > first:  # else another thread may be loading a checkpoint
                self._adam.steps = made - (first - last) // epoch.size

    def _by_torch(
        self, rows: Batch, size: int, room: Room, seen: Seen, raised: list[BaseException]
    ) -> Any:
        """Return the function `differentiate` of `steps.Epoch`. Its errors go to `raised`: none can pass through a kernel."""
        split = {name: torch.split(torch.from_numpy(x), size) for name, x in rows.items()}
        by_torch = self._by_outputs if self.way == OUTPUTS else self._by_log_ratios

        def differentiate(first: int) -> int:
            try:
                few = {name: minibatches[first // size] for name, minibatches in split.items()}
                by_torch(few, room, seen, first // size, slice(first, first + len(few["obs"])))
                room.goes_on[0] = 1
            except BaseException as error:
                raised.append(error)
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(differentiate)

    def _by_log_ratios(
        self, few: dict[str, Tensor], room: Room, seen: Seen, minibatch: int, at: slice
    ) -> None:
        """Write the derivatives of the loss by log ratios, values and entropy."""
        log_ratio = torch.from_numpy(seen.log_ratio[at]).requires_grad_()
        value = torch.from_numpy(seen.value[at]).requires_grad_()
        entropy = torch.from_numpy(seen.entropy[minibatch : minibatch + 1])[0].requires_grad_()
        assert self._loss
        loss, n = self._loss(log_ratio, entropy, value, few), len(value)
        by = derivatives(loss, (log_ratio, value, entropy))
        room.by_log_ratio[:n] = 0 if by[0] is None else by[0].numpy()
        room.by_value[:n] = 0 if by[1] is None else by[1].numpy()
        room.by_entropy[0] = 0 if by[2] is None else by[2].numpy()

    def _by_outputs(
        self, few: dict[str, Tensor], room: Room, seen: Seen, minibatch: int, at: slice
    ) -> None:
        """Write the derivatives of the loss by the outputs of the networks, and by parameters beside them."""
        n = len(few["obs"])
        nets, outs = self._in_torch.given(few["obs"], room.outputs[:n], seen.value[at])
        log_ratio, entropy, value, few = self._evaluate(nets, few)
        wanted = (*outs, *self._in_torch.beside)
        assert self._loss
        loss = self._loss(log_ratio, entropy, value, few)
        by, by_value, *others = derivatives(loss, wanted)
        room.outputs[:n] = 0 if by is None else by.numpy()
        room.by_value[:n] = 0 if by_value is None else by_value[:, 0].numpy()
        for (network, where), each in zip(self._in_torch.places, others, strict=True):
            room.grads[:, where] = 0  # of the other blocks
            if each is not None:
                room.grads[network, where] = each.reshape(-1).numpy()
        seen.log_ratio[at] = log_ratio.detach().numpy()
        seen.value[at] = value.detach().numpy()
        seen.entropy[minibatch] = entropy.detach().numpy()

    def _no_rows(self) -> Batch:
        """Return rows with the types of all others."""
        none = np.zeros(0, self._theta.dtype)
        rows = {"obs": np.zeros((0, self._value[0, 2]), none.dtype), "ret": none}
        if not len(self._policy):
            return rows
        act = np.zeros((0, self._modules["policy"].noise[1]))
        return {**rows, "act": act, "logp": none, "adv": none}

    def _in_order(self, shuffled: Batch, minibatch_size: int, head: Any) -> Rows:
        """Return the rows of an epoch as the kernels take them."""
        number, n = self._theta.dtype, len(shuffled["obs"])
        ret, none = shuffled.get("ret", np.zeros(n)), np.zeros((n, 0), bool)
        adv, act = shuffled.get("adv", ret), shuffled.get("act", none)
        if self._normalize and n and self.way == CLOSED:
            starts = range(0, n, minibatch_size)
            adv = np.concatenate([normalized(adv[a : a + minibatch_size]) for a in starts])
        kind = np.int64 if isinstance(head, Choices) else number
        return Rows(
            obs=np.ascontiguousarray(shuffled["obs"], number),
            ret=np.ascontiguousarray(ret, number),
            act=np.ascontiguousarray(act.reshape(n, math.prod(act.shape[1:])), kind),
            logp=np.ascontiguousarray(shuffled.get("logp", ret), number),
            adv=np.ascontiguousarray(adv, number),
            mask=np.ascontiguousarray(shuffled.get("mask", none)),
        )

    def _entropy(self, seen: Seen, obs: Array) -> Array:
        """Return the entropy, (minibatches,), or that of some rows, (1,)."""
        policy = self._modules.get("policy")
        if policy is None or self.way == OUTPUTS or self.knows_entropy:
            return seen.entropy
        with torch.no_grad():
            some = policy.distribution(torch.from_numpy(obs[:_SOME]))
            return policy.entropy(some).numpy().reshape(1)

    def _room(self, size: int) -> Room:
        """Return memory for minibatches of this size; the memory for other ones is given up."""
        if size not in self._rooms:
            rows, number = block_rows(size), self._theta.dtype
            tables = [self._policy, self._value] if len(self._policy) else [self._value]
            tasks = len(tables) * -(-size // rows)
            widest = max(int(table[:, 3].max()) for table in tables)
            numbers = max(int(table[-1, 7]) for table in tables)
            self._rooms = {
                size: Room(
                    grads=np.zeros((tasks, len(self._theta)), number),
                    work=np.zeros((tasks, rows * numbers), number),
                    spare=np.zeros((tasks, 2 * rows * widest), number),
                    total=self._grad,
                    slices=np.array(self._slices),
                    squares=np.zeros(len(self._slices), number),
                    entropies=np.zeros(tasks, number),
                    by_log_ratio=np.zeros(size, number),
                    by_value=np.zeros(size, number),
                    by_entropy=np.zeros(1),  # float64, as the entropy coefficient
                    goes_on=np.ones(1, np.int64),
                    outputs=np.zeros((size, int(tables[0][-1, 3])), number),
                )
            }
        return self._rooms[size]


@contextmanager
def _heard(raised: list[BaseException]) -> Iterator[None]:
    """Append what a handler of signals raises where a kernel enters Python: ctypes would print it, and go on."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "ctypes callback" in (unraisable.err_msg or ""):
            raised.append(unraisable.exc_value)
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _error(slope: Any, dtype: Any) -> str:
    """Return the line of numba's error that says why a slope does not compile, "" if it does."""
    try:
        scalar(slope, dtype)
    except Exception as error:
        lines = str(error).splitlines()
        said = [line for line in lines if line and not line.startswith("Failed in nopython mode")]
        return said[0] if said else type(error).__name__
    return ""


class _Given(nn.Module):
    """Stands for a network whose outputs are known: those of one minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.out = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if x is not self.x:
            raise _OtherInputsError("a loss or a policy computes a network for other inputs too")
        return self.out


class _OtherInputsError(RuntimeError):
    """A network is computed for other inputs than the rows: kernels do not follow that."""


class _InTorch:
    """The modules with the outputs of their networks given, and their parameters beside these networks."""

    def __init__(self, modules: dict[str, Any], theta: Tensor) -> None:
        self._nets: dict[str, Any] = {}
        self._given: list[_Given] = []
        self.beside: list[nn.Parameter] = []
        self.places: list[tuple[int, slice]] = []
        for network, (name, module) in enumerate(modules.items()):
            given, head = _Given(), copy.copy(module)
            head.__dict__["_modules"] = {**module._modules, "mlp": given}
            self._nets[name] = head
            self._given.append(given)
            for p in (p for p in head.parameters() if p.requires_grad):
                start = place(p, theta)
                self.beside.append(p)
                self.places.append((network, slice(start, start + p.numel())))

    def given(self, x: Tensor, out: Array, value: Array) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the modules for inputs x, and the outputs, by which to differentiate."""
        outs = [torch.from_numpy(out).clone(), torch.from_numpy(value).clone()[:, None]]
        for given, each in zip(self._given, outs[-len(self._given) :], strict=True):
            given.x, given.out = x, each.requires_grad_()
        return self._nets, outs


def _range(network: nn.Module, theta: Tensor) -> tuple[int, int]:
    """Return where the parameters of a network begin and end in the flat vector."""
    places = [(place(p, theta), p.numel()) for p in network.parameters()]
    start, end = min(a for a, _ in places), max(a + n for a, n in places)
    assert end - start == sum(n for _, n in places), "a network's parameters lie side by side"
    return start, end
