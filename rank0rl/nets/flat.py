"""Flat parameters: one buffer to update, to broadcast and to hash; and Adam over it.

With every parameter a view of one vector, the optimizer, the norm clip and zeroing are a few
operations on one tensor, a broadcast is one message, and any loss still works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.batch import Batch

Array = npt.NDArray[Any]

NOT_FINITE = (
    "the gradient is not finite: look for inf or nan in observations, in rewards and in a loss of your own, "
    "or lower the step size"
)


class Flat:
    """All parameters of a module as one vector per dtype, and all gradients as another.

    Each parameter and its gradient become views, in place. Buffers are moved in behind the parameters
    of their dtype. Moving, casting or copying the module detaches the views: `check` finds that; then
    flatten again. `vectors` are for `Adam`, or any of torch's optimizers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.vectors: list[nn.Parameter] = []
        self._views: list[tuple[str, nn.Parameter, int, int]] = []
        named = dict(module.named_parameters())
        tensors: dict[str, Tensor] = {**named, **dict(module.named_buffers())}
        for dtype in {t.dtype: None for t in tensors.values()}:
            these = {name: t for name, t in tensors.items() if t.dtype == dtype}
            memory = torch.cat([t.detach().reshape(-1) for t in these.values()])
            length = sum(p.numel() for p in named.values() if p.dtype == dtype)
            vector = nn.Parameter(memory[:length], requires_grad=dtype.is_floating_point)
            start = 0
            for name, t in these.items():
                t.data = memory[start : start + t.numel()].view(t.shape)
                if name in named:
                    vector.grad = torch.zeros_like(vector) if vector.grad is None else vector.grad
                    t.grad = vector.grad[start : start + t.numel()].view(t.shape)
                    self._views.append((name, named[name], t.data_ptr(), t.grad.data_ptr()))
                start += t.numel()
            if length:
                self.vectors.append(vector)
        self._made = [vector.detach().clone() for vector in self.vectors]

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        for vector in self.vectors:
            assert vector.grad is not None
            vector.grad.zero_()

    def limit_norm(self, limit: float) -> Tensor:
        """Scale all gradients down, in place, if their norm exceeds a limit, without waiting for the device; return the norm."""
        grads = [v.grad for v in self.vectors if v.grad is not None]
        norm = torch.sqrt(sum(torch.dot(g, g) for g in grads))  # type: ignore[arg-type]
        scale = torch.clamp(limit / norm, max=1.0)
        for grad in grads:
            grad.mul_(scale)
        return norm

    @contextmanager
    def as_made(self) -> Iterator[np.random.Generator]:
        """Hold what it was made with, and some noise, for a check that finds the same in every start of a run.

        Returns:
            Random numbers, always the same.
        """
        rng, kept = np.random.default_rng(2), [vector.detach().clone() for vector in self.vectors]
        for vector, made in zip(self.vectors, self._made, strict=True):
            noise = torch.from_numpy(rng.standard_normal(len(made)))
            vector.data.copy_(made + (0.05 * noise).to(made.dtype))
        try:
            yield rng
        finally:
            for vector, before in zip(self.vectors, kept, strict=True):
                vector.data.copy_(before)

    def check(self, module: nn.Module) -> None:
        """Check that it holds the parameters of a module, and that they and their gradients still are views.

        Raises:
            RuntimeError: if one does not; the message names it.
        """
        held = {id(p) for _, p, _, _ in self._views}
        for name, p in module.named_parameters():
            if id(p) not in held:
                raise RuntimeError(
                    f"{name} is not in the flat vector: flatten the networks that learn, and give "
                    f"the vector an optimizer: flat = Flat(module), adam = Adam(flat)"
                )
        for name, p, address, grad_address in self._views:
            if p.data_ptr() != address:
                raise RuntimeError(f"{name} has left the flat vector: flatten after a copy or move")
            if p.grad is None or p.grad.data_ptr() != grad_address:
                raise RuntimeError(
                    f"the gradient of {name} has left the flat vector: use Flat.zero_grad, or "
                    f"zero_grad(set_to_none=False) of an optimizer of your own, and torch.autograd.grad for second "
                    f"derivatives"
                )


def place(parameter: Tensor, vector: Tensor) -> int:
    """Return where a parameter begins in the flat vector that holds it."""
    return (parameter.data_ptr() - vector.data_ptr()) // vector.element_size()


def tensors(rows: Batch) -> dict[str, Tensor]:
    """Return the arrays of a batch as tensors of the same memory."""
    return {name: torch.from_numpy(x) for name, x in rows.items()}


def derivatives(loss: Tensor, by: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the derivatives of a loss, (), by tensors; None by those that it does not depend on.

    They are those of `torch.autograd.grad`, whose checks take a quarter of the time for a few rows.
    """
    run = torch.autograd.Variable._execution_engine.run_backward
    return run((loss,), (torch.ones_like(loss),), False, False, tuple(by), True, False)


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors by which a loss has a gradient."""
    leaves, found, left = list[Tensor](), set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        found.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.append(leaf)
        more = node.next_functions if node else ()
        left += [each for each, _ in more if each and each not in found]
    return leaves


class Views:
    """The tensors of a module, its `_parameters` or `_buffers`, as NumPy arrays of the same memory.

    Flattening, moving or copying a module moves all of them. So the arrays are made anew only if the first
    tensor has moved: a call takes 0.1 us, not 2 for each array.
    """

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._tensors = tensors
        self._address, self._arrays = 0, list[Array]()

    def __call__(self) -> list[Array]:
        """Return the arrays."""
        first = next(iter(self._tensors.values()))
        assert first is not None
        address = first.data_ptr()
        if self._address != address:
            tensors = (t for t in self._tensors.values() if t is not None)
            self._address, self._arrays = address, [t.detach().numpy() for t in tensors]
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without arrays: in a copy, they would not be those of its tensors."""
        return {**vars(self), "_address": 0, "_arrays": []}


class Adam:
    """Adam over flat vectors: torch's kernel, without what `torch.optim.Adam` does around it.

    A step takes 14 us in place of 87 at 10,000 parameters. The results are the same bits.

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    def __init__(self, flat: Flat, eps: float = 1e-8) -> None:
        self.flat, self.eps = flat, eps
        self._first = [torch.zeros_like(v) for v in flat.vectors]
        self._second = [torch.zeros_like(v) for v in flat.vectors]
        self._counts = [torch.zeros((), device=v.device) for v in flat.vectors]

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """Make one step of size lr along the gradients."""
        for count in self._counts:
            count.add_(1)
        torch._fused_adam_(
            [*self.flat.vectors],
            [v.grad for v in self.flat.vectors if v.grad is not None],
            self._first,
            self._second,
            [],
            self._counts,
            lr=lr,  # type: ignore[arg-type] # or a number
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def moments(self) -> tuple[Array, Array]:
        """Return both moments of the only vector, as arrays that share its memory."""
        [first], [second] = self._first, self._second
        return first.numpy(), second.numpy()

    @property
    def steps(self) -> int:
        """Number of steps made."""
        return int(self._counts[0])

    @steps.setter
    def steps(self, made: int) -> None:
        for count in self._counts:
            count.fill_(made)

    def state(self) -> dict[str, Any]:
        """Return the moments and the number of steps, for an agent's `state`."""
        named = {"first": self._first, "second": self._second, "steps": self._counts}
        return {name: dict(enumerate(tensors)) for name, tensors in named.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        for name, tensors in self.state().items():
            for i, tensor in tensors.items():
                tensor.copy_(state[name][i])
