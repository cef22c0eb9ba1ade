"""Gradient steps of an agent's loss: in compiled kernels where these give the same, by autograd elsewhere.

This module is the door to `nets.kernels`, and loads the compiler when it is needed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch, minibatches, take
from rank0rl.nets.actor_critic import ClosedForm, Evaluate, Loss, Outputs, ValueFunction
from rank0rl.nets.flat import Adam, Flat, derivatives
from rank0rl.nets.kernels import CLOSED, OUTPUTS
from rank0rl.nets.mlp import MLP
from rank0rl.nets.policies import Policy

if TYPE_CHECKING:
    from rank0rl.nets.kernels.compiled import CompiledSteps

Array = npt.NDArray[Any]

Product: TypeAlias = Callable[[Tensor], Tensor]

_FEW, _LOOK = 256, 32  # rows of the first check, and of the later ones
_NEAR = (
    2e-4  # kernels and autograd round differently, by less than this share of the largest number
)
_EXACT = 1e-5  # the derivatives by log ratios, values and entropy, of one row each
_APART = 1e-3  # log ratios before the first step: at most 1e-5 were seen


class GradientSteps:
    """Gradient steps of an agent's loss on its networks. The loss that the agent gives is the one that trains.

    MLPs are computed in kernels, and so is the closed form of a loss. That is checked: before the first
    update, the gradient of some rows, with ratios from 0.1 to 8, is computed in kernels and by autograd
    of the agent's own loss, policy and value function. Where they differ, the next way is taken: the
    loss by torch, then policy and value function by torch too, then all by autograd. A loss may change,
    so it is compared with its closed form before every update.

    In each update: `begin`, `epoch` as often as needed, `end`.

    Args:
        nets: the networks by name, on the CPU, flat, with gradients in place.
        evaluate: what torch does with these networks.
        adam: over their parameters.
        max_grad_norm: norm to which a larger gradient is scaled down.
        device: where the steps compute, such as "cpu" or "cuda".
        threads: number of threads on the CPU; the results do not depend on it.
    """

    def __init__(
        self,
        nets: nn.ModuleDict,
        evaluate: Evaluate,
        adam: Adam,
        max_grad_norm: float,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        """Raise RuntimeError if Adam is not over the parameters of these networks."""
        adam.flat.check_holds(nets)
        self._nets, self._evaluate, self._adam = nets, evaluate, adam
        self._trained = [*nets.parameters()]
        self._compiled: CompiledSteps | None = None
        why = f"on {device}" if device != "cpu" else _why_not(nets)
        if not why:
            from rank0rl.nets.kernels.compiled import CompiledSteps

            self._compiled = CompiledSteps(nets, evaluate, adam, max_grad_norm, threads)
        self._autograd = AutogradSteps(nets, evaluate, adam, max_grad_norm, device)
        self._steps: CompiledSteps | AutogradSteps = self._compiled or self._autograd
        self._checked = False
        self.how = f"by autograd ({why})" if why else self._compiled.way if self._compiled else ""
        """Words about how updates are computed. That is checked when the first update begins."""

    def compile(self, closed: ClosedForm | None = None) -> None:
        """Compile what the first update is expected to need."""
        if self._compiled:
            self._compiled.compile(closed)
            self.how = self._compiled.way

    def begin(self, rows: Batch, loss: Loss, closed: ClosedForm | None = None) -> dict[str, Any]:
        """Take the rows and the loss of an update.

        Args:
            rows: arrays of the batch, (N, ...).
            loss: the loss of a minibatch.
            closed: the same for kernels.

        Returns:
            The rows, where the steps compute.
        """
        if self._steps is self._compiled and len(rows["obs"]):
            self._follow_loss(rows, loss, closed)
            if not self._checked:
                self._choose(rows, loss, closed)
        return self._steps.begin(rows, loss, closed)

    def epoch(
        self, rows: dict[str, Any], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, Array, Array]:
        """Make the gradient steps of one epoch over what `begin` returned, in random order.

        Returns:
            Log of the ratio of new to old probability of the actions, (N,); errors of the values, (N,);
            and the mean entropy, (minibatches,). Each is from before a minibatch's step.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        return self._steps.epoch(rows, minibatch_size, rng, lr)

    def end(self) -> None:
        """Bring the weights home."""
        self._steps.end()

    def _choose(self, rows: Batch, loss: Loss, closed: ClosedForm | None) -> None:
        """Take the first way whose gradient is that of autograd."""
        compiled = self._compiled
        if compiled is None or self._steps is not compiled:
            return
        few = _finite(_some(rows, _FEW))
        n = len(few["obs"])
        if not n:
            return
        with torch.no_grad():
            log_ratio = self._evaluate(self._nets, _tensors(few))[0].numpy()
        if "logp" in few:
            few["logp"] = few["logp"] + log_ratio - _spread(n).astype(few["logp"].dtype)
        wanted = self._autograd.gradient(few, loss)
        self._checked, before = True, compiled.way
        for way in compiled.ways[compiled.ways.index(compiled.way) :]:
            got = compiled.gradient(way, few, loss, closed)
            if got and _agree(got[:-1], wanted[:-1]):
                compiled.knows_entropy = _agree(got[-1:], wanted[-1:])
                if way != before:
                    self._take(way)
                break
        else:
            self._take(None, "policy or value function is not what kernels compute")
        apart = float(abs(log_ratio).max(initial=0))
        if apart > _APART and self._adam.steps == 0:
            self.how += (
                f"; but log_prob and logp of the policy differ, by up to {apart:.2g}: ratios of new to "
                f"old probability are not 1 before the first step"
            )

    def _follow_loss(self, rows: Batch, loss: Loss, closed: ClosedForm | None) -> None:
        """Take another way if the loss of this update needs it."""
        compiled = self._compiled
        if compiled is None or self._steps is not compiled:
            return
        few = _some(rows, _LOOK)
        n, dtype = len(few["obs"]), torch.from_numpy(few["ret"]).dtype
        log_ratio = torch.from_numpy(_spread(n)).to(dtype).requires_grad_()
        value = torch.linspace(-2, 2, n, dtype=dtype).requires_grad_()
        entropy = torch.ones((), dtype=dtype).requires_grad_()
        inputs = [log_ratio, value, entropy, *self._trained]
        by = derivatives(loss(log_ratio, entropy, value, _tensors(few)), inputs)
        given = [
            torch.zeros_like(x) if b is None else b for x, b in zip(inputs[:3], by, strict=False)
        ]
        if any(each is not None for each in by[3:]):
            self._take(None, "the loss computes networks itself")
        elif compiled.way != OUTPUTS and not compiled.knows_entropy and given[2] != 0:
            self._take(OUTPUTS)
        elif not all(x.isfinite().all() for x in given):
            pass  # the rows are not, which the first step will report
        elif compiled.way == CLOSED and not (
            closed
            and _agree(
                compiled.slopes(closed, few, log_ratio.detach().numpy(), value.detach().numpy()),
                [x.numpy() for x in given],
                _EXACT,
            )
        ):
            why = " (which is not its closed form)" if closed else ""
            self._take(compiled.ways[1] if len(compiled.ways) > 1 else None, why)

    def _take(self, way: str | None, why: str = "") -> None:
        """Take a way of the kernels, or autograd."""
        if way is None or self._compiled is None:
            self._steps, self.how = self._autograd, f"by autograd ({why})"
        else:
            self._compiled.way, self.how = way, way + why


class AutogradSteps:
    """Gradient steps by autograd: on the networks themselves on the CPU, on a copy on another device.

    The copy takes the weights at the start of an update and returns them at its end. The arguments are
    those of `GradientSteps`.
    """

    def __init__(
        self,
        nets: nn.ModuleDict,
        evaluate: Evaluate,
        adam: Adam,
        max_grad_norm: float,
        device: str = "cpu",
    ) -> None:
        self._home, self._home_adam, self._evaluate = nets, adam, evaluate
        self._max_grad_norm, self._device = max_grad_norm, torch.device(device)
        self._nets, self._adam = nets, adam
        if device != "cpu":
            self._nets = copy.deepcopy(nets).to(self._device)
            self._adam = Adam(Flat(self._nets), adam.eps)
        self._loss: Loss | None = None

    def begin(self, rows: Batch, loss: Loss, closed: ClosedForm | None = None) -> dict[str, Any]:
        """Take the loss, and the weights from home; return the rows, on the device."""
        self._loss = loss
        if self._nets is not self._home:
            self._nets.load_state_dict(self._home.state_dict())
            self._adam.load(self._home_adam.state())
        return {name: x.to(self._device) for name, x in _tensors(rows).items()}

    def epoch(
        self, rows: dict[str, Any], minibatch_size: int, rng: np.random.Generator, lr: float
    ) -> tuple[Array, Array, Array]:
        """Make the gradient steps of one epoch: see `GradientSteps.epoch`."""
        size = torch.tensor(lr, device=self._device)
        seen = []
        epoch: Any = minibatches(rows, minibatch_size, rng)
        for minibatch in epoch:
            seen.append(self._backward(minibatch))
            self._adam.flat.limit_norm(self._max_grad_norm)
            self._adam.step(size)
        log_ratio, error, entropy = (
            torch.cat(tensors).cpu().numpy() for tensors in zip(*seen, strict=True)
        )
        return log_ratio, error, entropy

    def end(self) -> None:
        """Give weights and Adam's moments back to home."""
        if self._nets is not self._home:
            self._home.load_state_dict(self._nets.state_dict())
            self._home_adam.load(self._adam.state())

    def gradient(self, rows: Batch, loss: Loss) -> list[Array]:
        """Return the gradient of the loss of some rows, and what `epoch` does."""
        seen = self._backward(self.begin(rows, loss))
        grads = [v.grad for v in self._adam.flat.vectors if v.grad is not None]
        return [torch.cat(grads).numpy().copy(), *(x.numpy() for x in seen)]

    def _backward(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradient of a minibatch; return log ratios, errors and the entropy, (1,)."""
        assert self._loss
        log_ratio, entropy, value, rows = self._evaluate(self._nets, rows)
        loss = self._loss(log_ratio, entropy, value, rows)
        self._adam.flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return log_ratio.detach(), (value - rows["ret"]).detach(), entropy.detach().reshape(1)


def _why_not(nets: nn.ModuleDict) -> str:
    """Return why networks are not compiled, "" if they are."""
    for name, net in nets.items():
        if name not in ("policy", "value"):
            return "policy and value function share a layer"
        if not has_kernels(net):
            return (
                f"the {'policy' if name == 'policy' else 'value function'} is a network of your own"
            )
    return ""


def has_kernels(*networks: Any) -> bool:
    """Return True if kernels compute the networks of these policies and value functions."""
    mlps = [getattr(net, "mlp", None) for net in networks]
    return all(type(mlp) is MLP for mlp in mlps)


@functools.cache
def _spread(n: int) -> Array:
    """Return log ratios of a check, (n,), of ratios from 0.1 to 8."""
    return np.random.default_rng(0).permutation(np.linspace(np.log(0.1), np.log(8), n))


def _some(rows: Batch, most: int) -> Batch:
    """Return at most so many rows, from all over a batch."""
    n = len(rows["obs"])
    return {name: x[:: -(-n // most)] for name, x in rows.items()}


def _finite(rows: Batch) -> Batch:
    """Return the rows that hold neither nan nor inf."""
    floats = [x.reshape(len(x), -1) for x in rows.values() if x.dtype.kind == "f"]
    return take(rows, np.logical_and.reduce([np.isfinite(x).all(axis=1) for x in floats]))


def _tensors(rows: Batch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x) for name, x in rows.items()}


def _agree(got: Sequence[Array], wanted: Sequence[Array], near: float = _NEAR) -> bool:
    """Return True if arrays are the same but for rounding."""
    pairs = zip(got, wanted, strict=True)
    return all(abs(x - y).max(initial=0) <= near * abs(y).max(initial=1e-9) for x, y in pairs)


class ValueFit:
    """Minimizes E[(V - R)^2], with R in units of the value function's scale.

    The value function is flat, with gradients in place. The results do not depend on the threads.
    """

    def __init__(self, value: ValueFunction, adam: Adam, threads: int) -> None:
        nets = nn.ModuleDict({"value": value})
        self._scale = value.scale
        self._steps = GradientSteps(nets, _values, adam, np.inf, threads=threads)
        self._steps.compile(_SQUARES)

    def __call__(
        self,
        x: Array,
        ret: Array,
        rng: np.random.Generator,
        lr: float,
        epochs: int,
        minibatch_size: int,
    ) -> float:
        """Make the gradient steps, for inputs x (N, inputs) and returns (N,) in units of reward.

        Returns:
            Mean squared error over the last epoch, each minibatch's from before its step.

        Raises:
            FloatingPointError: if a gradient is not finite.
        """
        rows = {"obs": x, "ret": ret / self._scale.numpy()}
        begun, error = self._steps.begin(rows, _squares, _SQUARES), np.empty(0)
        for _ in range(epochs):
            _, error, _ = self._steps.epoch(begun, minibatch_size, rng, lr)
        return float(np.square(error).mean())


_SQUARES = ClosedForm(None, value_coef=1.0)


def _values(nets: Any, rows: dict[str, Tensor]) -> Outputs:
    """Return the arguments of a loss of a value function alone."""
    value = nets["value"](rows["obs"])
    return torch.zeros_like(value), torch.zeros((), dtype=value.dtype), value, rows


def _squares(_ratio: Tensor, _entropy: Tensor, value: Tensor, rows: dict[str, Tensor]) -> Tensor:
    return (value - rows["ret"]).square().mean()


class FisherProducts:
    """Function of observations (N, inputs) and masks that returns v -> F v + damping v.

    F is the Fisher matrix of the policy at these observations, which are normalized: the mean Hessian of
    KL(pi || pi') at pi' = pi. The masks are the choices that could be taken, (N, all choices), bool, or
    None. The results do not depend on the threads. The first product in kernels is compared with that of
    autograd, which computes all of them if they differ.
    """

    def __init__(self, policy: Policy, flat: Flat, damping: float, threads: int) -> None:
        self._slow = functools.partial(fisher_by_autograd, policy, damping)
        self._fast: Callable[..., Product] | None = None
        self._checked = False
        if has_kernels(policy) and hasattr(policy, "tables"):
            from rank0rl.nets.kernels.fisher import CompiledFisher

            made = CompiledFisher(policy, flat.vectors[0], damping, threads)
            self._fast = made if made.known else None

    def __call__(self, obs: Tensor, mask: Tensor | None = None) -> Product:
        """Compute what all products at these observations share."""
        if self._fast is None:
            return self._slow(obs, mask)
        if not self._checked:
            few = obs[:_FEW], None if mask is None else mask[:_FEW]
            wanted = self._slow(*few)
            ones = torch.ones(
                sum(p.numel() for p in self._slow.args[0].parameters()), dtype=obs.dtype
            )
            got = self._fast(*few)(ones)
            self._checked = True
            if not _agree([got.numpy()], [wanted(ones).numpy()]):
                self._fast = None
                return self._slow(obs, mask)
        return self._fast(obs, mask)


def fisher_by_autograd(
    policy: Policy, damping: float, obs: Tensor, mask: Tensor | None = None
) -> Product:
    """Return v -> F v + damping v at these observations, for any policy."""
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


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ValueError: if it is not a CPU or CUDA device, or this machine or this torch lacks it.
    """
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:1: got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} needs a GPU that torch sees: torch {torch.__version__} sees none; "
            f"check nvidia-smi and that torch is a CUDA build (pytorch.org/get-started), or leave "
            f"out --device"
        )
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(
            f"there is no device {device!r}: this machine has cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}; set --device to one of them"
        )
