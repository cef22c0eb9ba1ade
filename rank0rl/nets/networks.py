"""The network of a policy or a value function: an MLP, one over convolutions of images, or one of your own.

Each has `forward` for torch, `numpy` for acting, and `weights` and `biases`, whose last ones are those of
the last layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.agent import Space
from rank0rl.nets.images import Convolutions
from rank0rl.nets.mlp import MLP
from rank0rl.options import OptionError, flag

Array = npt.NDArray[Any]

Hidden: TypeAlias = Sequence[int] | nn.Module
"""Units of each hidden layer, or a network of your own."""

_DIFFER = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
_LAYERS = ("hidden", "value_hidden", "activation", "layer_norm")  # options of built-in networks
_CPU_EPOCHS = 4  # usual for Atari games; configs/ppo.toml has 5


def network(
    shape: Sequence[int],
    hidden: Hidden,
    outputs: int,
    rng: np.random.Generator,
    last_gain: float,
    columns: Sequence[slice] | None = None,
    **layers: Any,
) -> MLP | _ConvNet | _OwnNetwork | _Columns | _OfBytes | Inputs:
    """Return a network for flattened observations: an MLP, over convolutions if their shape has three axes.

    Args:
        shape: (inputs,), or the shape of an image.
        hidden: units of each hidden layer; or a network of your own, which is then used.
        outputs: number of outputs.
        rng: draws the weights.
        last_gain: scale of the last layer's weights.
        columns: the inputs that it sees, if not all.
        layers: "activation" and "layer_norm", see `MLP`.

    Raises:
        OptionError: if a network of your own does not fit.
    """
    if columns:
        size = sum(some.stop - some.start for some in columns)
        return _Columns(network((size,), hidden, outputs, rng, last_gain, **layers), columns)
    inputs = math.prod(shape)
    if isinstance(hidden, nn.Module) and len(shape) == 3:
        return _OfBytes(network((inputs,), hidden, outputs, rng, last_gain))
    if isinstance(hidden, MLP):
        got = hidden.weights[0].shape[0], hidden.weights[-1].shape[1]
        if got != (inputs, outputs):
            raise OptionError(
                f"this MLP must have {(inputs, outputs)} inputs and outputs: got {got}"
            )
        return hidden
    if isinstance(hidden, nn.Module):
        return hidden if isinstance(hidden, Inputs) else _OwnNetwork(hidden, inputs, outputs)
    if len(shape) == 3:
        return _ConvNet(shape, hidden, outputs, rng, last_gain, **layers)
    return MLP([inputs, *hidden, outputs], rng, last_gain, **layers)


class Inputs(nn.Module):
    """In place of a network: its inputs, which are outputs of another one already."""

    weights: Sequence[nn.Parameter] = ()
    biases: Sequence[nn.Parameter] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs."""
        return x

    def numpy(self, x: Array) -> Array:
        """Return the inputs."""
        return x


class _RowByRow(nn.Module):
    """A network that torch computes, for acting too.

    torch rounds several rows differently from one, so rows that must not depend on B go one at a time.
    """

    def numpy(self, x: Array) -> Array:
        """Compute the outputs of NumPy arrays: of (N, inputs) at once, of (B, 1, inputs) row by row."""
        with torch.no_grad():
            if x.ndim == 2:
                return self(torch.from_numpy(x)).numpy()
            return np.stack([self(torch.from_numpy(row)).numpy() for row in x])


class _ConvNet(nn.Module):
    """Convolutions of an image, then an MLP. No kernel computes its gradient."""

    no_kernels = "has convolutions"

    def __init__(
        self,
        shape: Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        rng: np.random.Generator,
        last_gain: float,
        **layers: Any,
    ) -> None:
        super().__init__()
        self.images = Convolutions(shape, rng)
        self.mlp = MLP([self.images.size, *hidden, outputs], rng, last_gain, **layers)
        self.weights, self.biases = self.mlp.weights, self.mlp.biases

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.images(x))

    def numpy(self, x: Array) -> Array:
        return self.mlp.numpy(self.images.numpy(x))


class _OfBytes(nn.Module):
    """A network of your own for images, which sees numbers from 0 to 1 in place of bytes."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.weights, self.biases = net, net.weights, net.biases

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * (1 / 255))

    def numpy(self, x: Array) -> Array:
        return self.net.numpy(x * np.float32(1 / 255))


class _OwnNetwork(_RowByRow):
    """A torch module of your own, from (N, inputs) to (N, outputs). It stays in eval mode."""

    def __init__(self, module: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        for name, part in module.named_modules():
            if isinstance(part, _DIFFER):
                raise OptionError(
                    f"{type(part).__name__} ({name!r} of {type(module).__name__}) does another thing "
                    f"when it learns than when it acts, so ratios of probabilities would be wrong: "
                    f"use LayerNorm, or leave it out; observations are normalized already"
                )
        if not all(p.requires_grad for p in module.parameters()):
            raise OptionError(
                f"all parameters of {type(module).__name__} must learn: some have requires_grad False"
            )
        self.module, self.inputs = module.eval(), inputs
        try:
            with torch.no_grad():
                got: Any = tuple(module(torch.zeros(2, inputs)).shape)
        except Exception as error:  # whatever the user's module raises
            got = f"{type(error).__name__}: {error}"
        if got != (2, outputs):
            raise OptionError(
                f"{type(module).__name__} must return {(2, outputs)} for inputs {(2, inputs)}: got "
                f"{got}; see docs/policies.md"
            )
        last = _last_layer(module, inputs, outputs)
        self.weights = [last.weight] if last else []
        """Weights of the last layer, if it is linear."""
        self.biases = [last.bias] if last and last.bias is not None else []

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def _last_layer(module: nn.Module, inputs: int, outputs: int) -> nn.Linear | None:
    """Return the linear layer that gives the outputs, None without one: twice its weights give twice the outputs."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    x = torch.linspace(-1, 1, 2 * inputs).reshape(2, inputs)
    with torch.no_grad():
        try:
            module(x)
        except Exception:  # numbers that it does not take, such as for an embedding
            return None
    for layer in reversed([each for each in linear if each.out_features == outputs]):
        own = dict(layer.named_parameters(recurse=False))
        if own.keys() <= {"weight", "bias"}:
            before = {name: p.detach().clone() for name, p in own.items()}
            with torch.no_grad():
                for p in own.values():
                    p.add_(1)  # they may all be 0
                once = module(x)
                for p in own.values():
                    p.mul_(2)
                twice = module(x)
                for name, p in own.items():
                    p.copy_(before[name])
            if once.any() and torch.equal(twice, 2 * once):
                return layer
    return None


class _Columns(nn.Module):
    """A network over some of its inputs, so that an actor and a critic can see different things."""

    no_kernels = "sees some keys of the observation"

    def __init__(self, net: Any, columns: Sequence[slice]) -> None:
        super().__init__()
        self.net, self.columns = net, tuple(columns)
        self.weights, self.biases = net.weights, net.biases

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.cat([x[:, some] for some in self.columns], dim=1))

    def numpy(self, x: Array) -> Array:
        return self.net.numpy(np.concatenate([x[..., some] for some in self.columns], axis=-1))


def columns_of(space: Space, names: Sequence[str], option: str) -> tuple[slice, ...] | None:
    """Return the columns of the keys of a Dict observation that an option names; None if it names none."""
    wrong = [name for name in names if name not in space.parts]
    if wrong:
        has = f"the keys {', '.join(space.parts)}" if space.parts else "no keys: it is no Dict"
        raise OptionError(
            f"{flag(option)} must name keys of the observation: got {wrong[0]!r}; this environment's "
            f"observation has {has}"
        )
    if len({*names}) < len(names):
        raise OptionError(f"{flag(option)} must name each key once: got {', '.join(names)}")
    return tuple(space.parts[name] for name in names) or None


def _without_effect(modules: Iterable[nn.Module], options: Any) -> Iterable[str]:
    """Return the options of layers that no network has, because networks are of the user's own."""
    networks = [n for n in modules if hasattr(n, "act") or hasattr(n, "predict")]
    own = [any(isinstance(part, _OwnNetwork) for part in n.modules()) for n in networks]
    if all(own):
        return _LAYERS if own else ()
    if any(own) and hasattr(networks[own.index(True)], "predict"):
        return ("value_hidden",)
    alone = getattr(options, "value_hidden", None) is not None  # it does not take --hidden
    return ("hidden",) if any(own) and alone else ()


def network_notes(networks: Iterable[Any], options: Any, device: str) -> list[str]:
    """Return notes for the user about networks that are slow, and options that these do not have.

    Args:
        networks: an agent's modules.
        options: the agent's options.
        device: where it updates.
    """
    notes = []
    modules = [n for n in networks if isinstance(n, nn.Module)]
    parts = [part for n in modules for part in n.modules()]
    acting = [part for n in modules if hasattr(n, "act") for part in n.modules()]
    if own := next((part for part in acting if isinstance(part, _OwnNetwork)), None):
        x = np.zeros((16, 1, own.inputs), np.float32)
        own.numpy(x)
        start = time.perf_counter()
        own.numpy(x)
        each = 1e6 * (time.perf_counter() - start) / len(x)
        notes.append(
            f"networks of your own act one row at a time, {each:.0f} us each, because torch rounds "
            f"several rows differently; the built-in network takes less than 10 us with --hidden 64 64"
        )
    if any(isinstance(part, nn.LSTM) for part in acting if own):
        notes.append(
            "torch's LSTM has other last bits on other types of CPU: for the same curve on all of them, use "
            "--recurrent lstm, or rank0rl.nets.layers.GRU"
        )
    mlps = [part for part in parts if isinstance(part, MLP)]
    flat = mlps and not any(len(mlp.weights) > 1 for mlp in mlps)
    alone = getattr(options, "recurrent", "") is None
    for where, names in (
        (
            "on networks of your own, unless make_networks reads them",
            _without_effect(modules, options),
        ),
        ("on networks without hidden layers of units", _LAYERS[2:] if flat and not own else ()),
        ("without --recurrent", ("memory_size", "chunk_steps") if alone else ()),
    ):
        changed = [n for n in names if getattr(options, n, None) != getattr(type(options), n, None)]
        if changed:
            notes.append(f"these options have no effect {where}: {', '.join(map(flag, changed))}")
    epochs = getattr(options, "epochs", 1)
    slow = device == "cpu" and epochs > _CPU_EPOCHS
    if slow and any(isinstance(part, Convolutions) for part in parts):
        notes.append(
            f"updates on images are slow on a CPU: use --device cuda, or few epochs (now {epochs}; "
            f"--epochs {_CPU_EPOCHS} or less); for example, with 1,024 steps of ALE/Pong in a batch, the "
            f"steps take 1 s of a core, and each epoch 0.9 s, divided among the cores that are free"
        )
    return notes
