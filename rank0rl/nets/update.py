"""Gradient steps of an agent's loss: in compiled kernels where these give the same, by autograd elsewhere.

This module is the door to `nets.kernels`, and loads the compiler when it is needed.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, library, nn

from rank0rl.batch import Batch, take
from rank0rl.nets import IS_PORTABLE
from rank0rl.nets.actor_critic import ClosedForm, Evaluate, Loss, Outputs, ValueFunction, whitened
from rank0rl.nets.autograd import AutogradSteps, Product, fisher_by_autograd
from rank0rl.nets.flat import Adam, Flat, derivatives, leaves_of, tensors
from rank0rl.nets.kernels import CLOSED, LOSS, OUTPUTS
from rank0rl.nets.mlp import MLP
from rank0rl.nets.policies import Policy, built_in

if TYPE_CHECKING:
    from rank0rl.nets.kernels.compiled import CompiledSteps

Array = npt.NDArray[Any]

_FEW, _LOOK = 256, 32  # rows whose gradient is checked, and whose entropy is taken
_NEAR = 2e-4  # kernels and autograd round differently, by less than this share of the largest
_EXACT = 1e-6  # derivatives by one log ratio, value or entropy: some roundings of float32
_FAR = 4.5  # times log ratios from log 0.1 to log 8: ratios from 0.00003 to 10,000, which clamps and caps change
_ALL = (CLOSED, LOSS, OUTPUTS)  # ways, the fastest first
_APART = 1e-3  # log ratios before the first step: at most 1e-5 were seen
_LARGE = 2**18  # multiplications of a product; a call of a kernel from torch takes 10 us more
_IN_PLACE = "the loss changes an argument in place: write x = x.clamp(...), not x.clamp_(...)"


class GradientSteps:
    """Gradient steps of an agent's loss on its networks. The loss that the agent gives is the one that trains.

    MLPs are computed in kernels, and so is the closed form of a loss. Before the first update, the gradient of some
    rows is computed in kernels and by autograd, near the weights that they began with. Where these differ, the next
    way is taken: the loss by torch, then policy and value function too, then all by autograd. A loss may change, so
    it is compared with its closed form before every update. In each: `begin`, `epoch` as often as needed, `end`.

    Args:
        nets: the networks by name, on the CPU, flat, with gradients in place.
        evaluate: what torch does with these networks.
        adam: over their parameters.
        max_grad_norm: norm to which a larger gradient is scaled down.
        device: where the steps compute, such as "cpu" or "cuda".
        threads: number of threads on the CPU; the results do not depend on it.
        normalize: True if advantages get mean 0 and standard deviation 1 over each minibatch.
    """

    def __init__(
        self,
        nets: nn.ModuleDict,
        evaluate: Evaluate,
        adam: Adam,
        max_grad_norm: float,
        device: str = "cpu",
        threads: int = 1,
        normalize: bool = False,
    ) -> None:
        """Raise RuntimeError if Adam is not over the parameters of these networks."""
        adam.flat.check(nets)
        self._nets, self._evaluate, self._adam, self._normalize = nets, evaluate, adam, normalize
        self._compiled: CompiledSteps | None = None
        why = f"on {device}" if device != "cpu" else _why_not(nets)
        if not why:
            from rank0rl.nets.kernels.compiled import CompiledSteps

            args = nets, evaluate, adam, max_grad_norm, threads, normalize
            self._compiled = CompiledSteps(*args)
        self._autograd = AutogradSteps(nets, evaluate, adam, max_grad_norm, device)
        self._steps: CompiledSteps | AutogradSteps = self._compiled or self._autograd
        self._ways = [*self._compiled.ways] if self._compiled else []  # those not known to be wrong
        self._right = set[str]()  # those that have been checked
        self._is_away, self._why, self._note = device != "cpu", "", ""
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
        broken = self._compiled.why_not(closed) if self._compiled else ""
        closed = None if broken else closed
        whole = whitened(loss) if self._normalize else loss
        if len(rows["obs"]) and (self._ways or self._is_away):
            try:
                with _unseen():
                    way, why = self._way(rows, loss, closed)
                    while way and way not in self._right and self._check(way, rows, whole, closed):
                        way, why = self._way(rows, loss, closed)  # by what the check found
            except RuntimeError as error:
                if "in-place operation" not in str(error):
                    raise
                raise ValueError(_IN_PLACE) from error
            if broken and way == LOSS:
                why = f" (its closed form does not compile: {broken})"
            if self._is_away and why:
                raise ValueError(
                    f"{why}, and on another device a copy of these learns: their gradient would be lost; give the "
                    f'agent devices = ("cpu",), or a loss of log ratios, entropy, values and rows alone'
                )
            if not self._is_away:
                self._take(way, why)
        return self._steps.begin(rows, whole, closed)

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
        if self._steps is not self._autograd:
            return self._steps.epoch(rows, minibatch_size, rng, lr)
        with compiled_products(self._nets, minibatch_size):
            return self._steps.epoch(rows, minibatch_size, rng, lr)

    def end(self) -> None:
        """Bring the weights home."""
        self._steps.end()

    def _way(self, rows: Batch, loss: Loss, closed: ClosedForm | None) -> tuple[str | None, str]:
        """Return the fastest way that is right for this loss, None for autograd, and why it is no faster one.

        It is computed with ratios from 0.1 to 8; with all that a limit would cut; and with log ratios near 0, and the others as they are.
        """
        same, bonus = closed is not None, False
        near, spread, values = _points(len(rows["obs"]))
        far = {**rows, "adv": 30 * rows["adv"] + 1} if "adv" in rows else rows
        with torch.no_grad():
            entropy = self._evaluate(self._nets, tensors(_some(rows, _LOOK)))[1]
        for x, v, e, seen in (
            (spread, values, entropy + 100, rows),
            (_FAR * spread, 20 * values, entropy - 100, far),
            (near, rows.get("val", rows["ret"]), entropy, rows),
        ):
            given = [torch.from_numpy(each.astype(rows["ret"].dtype)) for each in (x, v)]
            leaves = [each.requires_grad_() for each in (given[0], e.clone(), given[1])]
            whole = _checked(loss, *leaves, tensors(_copy(seen)))
            others = {id(x) for x in leaves_of(whole)} - {id(x) for x in leaves}
            if others - {id(x) for x in self._nets.parameters()}:
                return None, "the loss depends on parameters that Adam does not step"
            if others:
                return None, "the loss depends on weights besides its arguments"
            got = [np.zeros(()) if x is None else x.numpy() for x in derivatives(whole, leaves)]
            bonus = bonus or bool(got[1])
            if same and closed and self._compiled and CLOSED in self._ways:
                numbers = (each.detach().numpy() for each in given)
                form = self._compiled.slopes(closed, seen, *numbers)
                same = _equal([got[0], got[2], got[1]], form)
        if not self._compiled:
            return None, ""
        first = CLOSED if same else LOSS
        if bonus and not self._compiled.knows_entropy:
            first = OUTPUTS
        right = [way for way in self._ways if _ALL.index(way) >= _ALL.index(first)]
        if not right:
            return None, "kernels give another gradient, or the loss is nan for other rows"
        differ = closed and first == LOSS and CLOSED in self._ways
        return right[0], " (closed_form is of another loss)" if differ else ""

    def _check(self, way: str, rows: Batch, loss: Loss, closed: ClosedForm | None) -> bool:
        """Find out whether a way's gradient is that of autograd; return False if all rows hold nan or inf.

        Both take networks and rows of their own. So the outcome is that of every start of a run, and no
        gradient is one of roundings, as where values have come to equal returns.
        """
        compiled, few = self._compiled, _finite(_some(rows, _FEW))
        if compiled is None or not len(few["obs"]):
            return False
        if not self._adam.steps:
            self._compare_logp(few)
        with self._adam.flat.as_made() as rng:
            self._make_up(few, rng, with_obs=way == CLOSED)  # a loss may read them
            wanted = self._autograd.gradient(_copy(few), loss)
            got = compiled.gradient(way, _copy(few), loss, closed)
        by_network = compiled.by_network
        if got and _agree([*by_network(got[0]), *got[1:3]], [*by_network(wanted[0]), *wanted[1:3]]):
            self._right.add(way)
            if way != OUTPUTS:
                compiled.knows_entropy &= _agree(got[3:], wanted[3:])
        else:
            self._ways.remove(way)
        return True

    def _compare_logp(self, few: Batch) -> None:
        """Note if the policy gives another probability in torch than the one in the rows, before the first step."""
        with torch.no_grad():
            apart = float(self._evaluate(self._nets, tensors(few))[0].abs().max())
        if apart > _APART:
            self._note = (
                f"; but log_prob and logp of the policy differ, by up to {apart:.2g}: ratios of new to "
                f"old probability are not 1 before the first step"
            )

    def _make_up(self, few: Batch, rng: np.random.Generator, with_obs: bool) -> None:
        """Put other numbers into rows: draws, ratios from 0.1 to 8, advantages, returns, and observations if they are no more than numbers."""
        n = len(few["obs"])

        def normal(name: str) -> Array:
            return rng.standard_normal(few[name].shape).astype(few[name].dtype)

        nets: Any = self._nets
        policy = nets["policy"] if "logp" in few and "policy" in nets else None
        if with_obs and all(type(x) is ValueFunction or built_in(x) for x in nets.values()):
            few["obs"] = normal("obs")
        if policy and few["act"].dtype.kind == "f":
            draw = rng.random if policy.noise[0] == "uniform" else rng.standard_normal
            noise = draw((n, policy.noise[1])).astype(np.float32)
            act, extras = policy.act(few["obs"], noise, few.get("mask"))
            few["act"] = extras.get("draw", act).astype(few["act"].dtype)
        with torch.no_grad():
            log_ratio, _, value, _ = self._evaluate(nets, tensors(few))
        if policy:
            spread = _points(n)[1].astype(few["logp"].dtype)
            few["logp"] = few["logp"] + log_ratio.numpy() - spread
            few["adv"] = normal("adv")
        few["ret"] = value.numpy() + normal("ret")

    def _take(self, way: str | None, why: str) -> None:
        """Take a way of the kernels, or autograd."""
        if way is None or self._compiled is None:
            self._steps, self.how = self._autograd, f"by autograd ({why or self._why})"
        else:
            self._steps, self._compiled.way, self.how = self._compiled, way, way + why
        self._why = why or self._why
        self.how += self._note


@contextmanager
def _unseen() -> Iterator[None]:
    """Leave the global generators as they are, from which a loss of one's own may draw."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def _why_not(nets: nn.ModuleDict) -> str:
    """Return why networks are not compiled, "" if they are."""
    parameters = [id(p) for net in nets.values() for p in net.parameters()]
    if not {*nets} <= {"policy", "value"} or len({*parameters}) < len(parameters):
        return "policy and value function share a layer"
    for name, net in nets.items():
        if not has_kernels(net) or (name == "value" and type(net) is not ValueFunction):
            why = getattr(getattr(net, "mlp", None), "no_kernels", "is a network of your own")
            return f"the {'policy' if name == 'policy' else 'value function'} {why}"
    return ""


def has_kernels(*networks: Any) -> bool:
    """Return True if kernels compute the networks of these policies and value functions."""
    return all(type(getattr(net, "mlp", None)) is MLP for net in networks)


@functools.lru_cache(maxsize=4)
def _points(n: int) -> tuple[Array, Array, Array]:
    """Return what checks take, (n,) each: log ratios near 0, those of ratios from 0.1 to 8, and values."""
    spread = np.random.default_rng(0).permutation(np.linspace(np.log(0.1), np.log(8), n))
    return 0.05 * np.random.default_rng(1).standard_normal(n), spread, np.linspace(-2, 2, n)


def _checked(loss: Loss, *given: Any) -> Tensor:
    """Return a loss; raise ValueError unless it is one number with a gradient."""
    got: Any = loss(*given)
    if isinstance(got, Tensor) and got.shape == () and got.requires_grad:
        return got
    what = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, Tensor) else f"{got!r:.50}"
    if isinstance(got, Tensor) and got.shape == ():
        what = "a number without one: it depends on neither log_ratio, entropy nor value"
    name = getattr(loss, "__qualname__", "loss")
    raise ValueError(f"{name} must return one number with a gradient, such as a mean(): got {what}")


def _some(rows: Batch, most: int) -> Batch:
    """Return a copy of at most so many rows, from all over a batch."""
    n = len(rows["obs"])
    return {name: x[:: -(-n // most)].copy() for name, x in rows.items()}


def _copy(rows: Batch) -> Batch:
    return {name: x.copy() for name, x in rows.items()}


def _finite(rows: Batch) -> Batch:
    """Return the rows that hold neither nan nor inf."""
    known = [rows[name] for name in ("obs", "act", "logp", "adv", "ret") if name in rows]
    floats = [x.reshape(len(x), -1) for x in known if x.dtype.kind == "f"]
    return take(rows, np.logical_and.reduce([np.isfinite(x).all(axis=1) for x in floats]))


def _equal(got: Sequence[Array], wanted: Sequence[Array]) -> bool:
    """Return True if each number is the same, but for some roundings of it and of the largest."""
    pairs = [(abs(x - y), abs(y)) for x, y in zip(got, wanted, strict=True)]
    return all((d <= _EXACT * (y + 0.1 * y.max(initial=0))).all() for d, y in pairs)


def _agree(got: Sequence[Array], wanted: Sequence[Array]) -> bool:
    """Return True if arrays are the same but for rounding."""
    pairs = zip(got, wanted, strict=True)
    return all(abs(x - y).max(initial=0) <= _NEAR * abs(y).max(initial=1e-9) for x, y in pairs)


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


@contextmanager
def compiled_products(net: nn.Module, rows: int) -> Iterator[None]:
    """Let a kernel compute torch's products of a network and so many rows, in this thread, if they are large.

    It does so with --cpu portable, where MKL's products take up to three times as long.
    """
    sizes = [p.numel() for p in net.parameters() if p.ndim == 2]
    if not (IS_PORTABLE and sizes and rows * sum(sizes) >= _LARGE * len(sizes)):
        yield
        return
    from rank0rl.nets.kernels.products import matmul  # half a second, for this alone

    thread, known = threading.get_ident(), (torch.float32, torch.float64)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        fits = a.shape[1:] == b.shape[:1] and a.dtype == b.dtype in known
        if threading.get_ident() != thread or not fits:  # torch names what is wrong
            return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
        return torch.from_numpy(matmul(a.detach().numpy(), b.detach().numpy()))

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if beta == alpha == 1:
            return mm(a, b).add_(c)
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))

    with library._scoped_library("aten", "IMPL") as of_torch:
        of_torch.impl("mm", mm, "CPU")
        of_torch.impl("addmm", addmm, "CPU")
        yield


class FisherProducts:
    """Function of observations (N, inputs) and masks that returns v -> F v + damping v.

    F is the Fisher matrix of the policy at these observations, which are normalized: the mean Hessian of
    KL(pi || pi') at pi' = pi. The masks are the choices that could be taken, (N, all choices), bool, or
    None. The results do not depend on the threads. Before the first product, one in kernels is compared with
    that of autograd, which computes all of them if they differ.
    """

    def __init__(self, policy: Policy, flat: Flat, damping: float, threads: int) -> None:
        self._slow, self._flat = functools.partial(fisher_by_autograd, policy, damping), flat
        self._fast: Callable[..., Product] | None = None
        self._checked = False
        if has_kernels(policy):
            from rank0rl.nets.kernels.fisher import CompiledFisher

            made = CompiledFisher(policy, flat.vectors[0], damping, threads)
            self._fast = made if made.known else None

    def __call__(self, obs: Tensor, mask: Tensor | None = None) -> Product:
        """Compute what all products at these observations share."""
        if self._fast is None:
            return self._slow(obs, mask)
        if not self._checked:
            self._checked = True
            ones = torch.ones_like(self._flat.vectors[0].detach())
            with self._flat.as_made() as rng:
                few = rng.standard_normal(obs[:_FEW].shape).astype(obs.numpy().dtype)
                rows = torch.from_numpy(few), None if mask is None else mask[:_FEW]
                products = [each(*rows)(ones).numpy() for each in (self._fast, self._slow)]
            if not _agree(products[:1], products[1:]):
                self._fast = None
                return self._slow(obs, mask)
        return self._fast(obs, mask)
