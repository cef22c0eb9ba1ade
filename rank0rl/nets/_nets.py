"""MLPs, a value function, an observation normalizer.

Each network works over one memory in two ways: in torch, where autograd takes the gradient of any
loss, and in NumPy, for acting and for gradients in closed form, a few times faster at these sizes.
In NumPy, a stack of one-row products (B, 1, d) gives rows whose bits do not depend on B, which a
product (B, d) does not; that is what makes a run the same for every number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rank0rl.learners import ALONE, Learners

Array = npt.NDArray[Any]


class MLP(nn.Module):
    """Fully connected layers with tanh between them, orthogonal weights and zero biases.

    Args:
        sizes: numbers of inputs, of each hidden layer's units, and of outputs.
        rng: for the weights.
        last_gain: scale of the last layer's weights; the hidden layers have sqrt(2).

    Source: Saxe et al. 2014, arXiv:1312.6120 (orthogonal); Andrychowicz et al. 2021,
    arXiv:2006.05990 (a last policy layer of 0.01).
    """

    def __init__(self, sizes: Sequence[int], rng: np.random.Generator, last_gain: float) -> None:
        """Draw the weights."""
        super().__init__()
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.weights = nn.ParameterList()  # (inputs, outputs) each
        self.biases = nn.ParameterList()
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            gain = last_gain if i == len(sizes) - 2 else math.sqrt(2)
            weight = nn.init.orthogonal_(torch.empty(n_in, n_out), gain, generator=torch_rng)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(n_out)))
        self._parts = tuple(zip(self.weights, self.biases, strict=True))
        self._addresses: tuple[int, int] = (0, 0)
        self._layers: list[_Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs) -> (N, outputs)."""
        *hidden, last = zip(self.weights, self.biases, strict=True)
        for weight, bias in hidden:
            x = torch.tanh(torch.addmm(bias, x, weight))
        return torch.addmm(last[1], x, last[0])

    def numpy(self, x: Array) -> list[Array]:
        """The same on NumPy arrays: the input, every hidden layer's output, and the last one's.

        Args:
            x: (..., inputs). The bits of a row depend on the shape of the last two axes only: pass
                (B, 1, inputs) where they must not depend on B.

        Returns:
            Arrays (..., units), of which the last is (..., outputs). `backward` needs them all.
        """
        values = [x]
        *hidden, last = self._arrays()
        for layer in hidden:
            x = x @ layer.weight
            x += layer.bias
            np.tanh(x, out=x)
            values.append(x)
        return [*values, x @ last.weight + last.bias]

    def backward(self, values: list[Array], grad: Array) -> None:
        """Write the gradient of a loss into the `.grad` of weights and biases.

        Args:
            values: what `numpy` gave for inputs (N, inputs); those of hidden layers are overwritten.
            grad: derivatives of the loss by the outputs, (N, outputs).

        Raises:
            ValueError: if there are no gradients to write to.
        """
        ones = np.ones(len(grad), grad.dtype)
        for i, layer in reversed([*enumerate(self._arrays())]):
            if layer.weight_grad is None:
                raise ValueError("gradients are written in place: flatten_ the module first")
            x = values[i]
            np.matmul(x.T, grad, out=layer.weight_grad)
            np.matmul(ones, grad, out=layer.bias_grad)  # half the time of a sum
            if i > 0:
                grad = grad @ layer.weight.T
                np.multiply(x, x, out=x)  # the derivative of tanh, 1 - x^2, from its value
                x *= grad
                grad -= x

    def __getstate__(self) -> dict[str, Any]:
        """Without arrays, which in a copy would not be those of the copied parameters."""
        return {**vars(self), "_addresses": (0, 0), "_layers": []}

    def _arrays(self) -> list[_Layer]:
        """NumPy views of weights and gradients, made anew when these have moved in memory."""
        first = self._parts[0][0]
        addresses = (first.data_ptr(), 0 if first.grad is None else first.grad.data_ptr())
        if self._addresses != addresses:
            self._layers = [_Layer(*part) for part in self._parts]
            self._addresses = addresses
        return self._layers


class ConvNet(nn.Module):
    """For images: convolutions that halve each side, then an MLP. It has no closed form.

    In NumPy, a stack of rows (B, 1, inputs) is computed one row at a time, because a convolution of
    several images rounds differently.

    Args:
        shape: of an image: of height, width and channels (or frames), the channels are the shortest
            axis, first or last.
        hidden: units of each hidden layer of the MLP.
        outputs: how many.
        rng: for the weights.
        last_gain: scale of the last layer's weights.
    """

    channels = (16, 32, 32)

    def __init__(
        self,
        shape: Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        rng: np.random.Generator,
        last_gain: float,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self._shape, self._channels_last = tuple(shape), shape[2] <= shape[0]
        n, *sides = np.roll(shape, 1).tolist() if self._channels_last else shape
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.kernels, self.shifts = nn.ParameterList(), nn.ParameterList()
        for channels in self.channels:
            kernel = torch.empty(channels, n, 3, 3)
            nn.init.orthogonal_(kernel, math.sqrt(2), generator=torch_rng)
            self.kernels.append(nn.Parameter(kernel))
            self.shifts.append(nn.Parameter(torch.zeros(channels)))
            n, sides = channels, [(side + 1) // 2 for side in sides]
        self.mlp = MLP([n * math.prod(sides), *hidden, outputs], rng, last_gain)
        self.weights, self.biases = self.mlp.weights, self.mlp.biases

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs), flattened images -> (N, outputs)."""
        x = x.reshape(-1, *self._shape)
        if self._channels_last:
            x = x.permute(0, 3, 1, 2)
        for kernel, shift in zip(self.kernels, self.shifts, strict=True):
            x = torch.relu(nn.functional.conv2d(x, kernel, shift, stride=2, padding=1))
        return self.mlp(x.flatten(1))  # type: ignore[no-any-return]

    def numpy(self, x: Array) -> list[Array]:
        """The same on NumPy arrays, (N, inputs) or (B, 1, inputs); the outputs alone, in a list."""
        with torch.no_grad():
            if x.ndim == 2:
                return [self(torch.from_numpy(x)).numpy()]
            return [np.stack([self(torch.from_numpy(row)).numpy() for row in x])]

    def backward(self, values: list[Array], grad: Array) -> None:
        """There is no gradient in closed form.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a ConvNet learns by torch's autograd")


def is_image(shape: Sequence[int], dtype: str) -> bool:
    """Whether observations are images: bytes with two sides and channels, or frames."""
    return dtype == "uint8" and len(shape) == 3 and sorted(shape)[1] >= 8


def network(
    shape: Sequence[int],
    hidden: Sequence[int],
    outputs: int,
    rng: np.random.Generator,
    last_gain: float,
) -> MLP | ConvNet:
    """The network for flattened observations of this shape: of images, if it has three axes.

    Args:
        shape: (inputs,), or that of an image.
        hidden: units of each hidden layer.
        outputs: how many.
        rng: for the weights.
        last_gain: scale of the last layer's weights.
    """
    if len(shape) == 3:
        return ConvNet(shape, hidden, outputs, rng, last_gain)
    return MLP([math.prod(shape), *hidden, outputs], rng, last_gain)


class View:
    """A tensor as a NumPy array, made anew when it has moved in memory: 0.1 us a time, not 2."""

    def __init__(self, owner: Mapping[str, Tensor | None], name: str) -> None:
        self._owner, self._name = owner, name  # of a module's parameters or buffers
        self._address, self._array = 0, np.empty(0, np.float32)

    def __call__(self) -> Array:
        """The array."""
        tensor = self._owner[self._name]
        assert tensor is not None
        if self._address != tensor.data_ptr():
            self._address, self._array = tensor.data_ptr(), tensor.detach().numpy()
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        """Without the array, which in a copy would not be that of the copied tensor."""
        return {**vars(self), "_address": 0, "_array": np.empty(0, np.float32)}


class _Layer:
    """NumPy views of one layer's parameters, and of their gradients where there are any."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        self.weight, self.bias = weight.detach().numpy(), bias.detach().numpy()
        self.weight_grad = None if weight.grad is None else weight.grad.numpy()
        self.bias_grad = None if bias.grad is None else bias.grad.numpy()


class Moments(nn.Module):
    """Running mean and variance of rows, in float64: 0 and 1 before the first row.

    Args:
        shape: of one row.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        """Begin with no rows."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def merge(self, rows: Array, learners: Learners = ALONE) -> None:
        """Add rows, (N, *shape), of each of the learners.

        Source: Chan, Golub and LeVeque 1983, eq. 1.5.
        """
        n, old = len(rows) * learners.count, self.count.item()
        own = rows.mean(axis=0, dtype=np.float64)
        mean_ = learners.average(own.copy())
        var_ = learners.average(rows.var(axis=0, dtype=np.float64) + (own - mean_) ** 2)
        mean, var = (torch.from_numpy(np.asarray(x)) for x in (mean_, var_))
        delta, total = mean - self.mean, old + n
        squares = self.var * old + var * n + delta**2 * (old * n / total)
        self.mean += delta * (n / total)
        self.var.copy_(squares / total)
        self.count += n


class ObsNormalizer(nn.Module):
    """(obs - mean) / std, limited to +-10. It flattens observations.

    `merge` is for rank 0, after the last gradient step: an iteration acts, evaluates and learns
    with the statistics that were broadcast before it.

    Args:
        shape: of an observation.
        coarse: divide by 3 (std + 0.1) instead, which takes most of them to +-1, and those that
            hardly vary to less.
    """

    shift: Tensor
    scale: Tensor
    limit = 10.0

    def __init__(self, shape: Sequence[int], coarse: bool = False) -> None:
        """Begin with mean 0 and variance 1."""
        super().__init__()
        self._coarse = coarse
        size = math.prod(shape)
        self.moments = Moments((size,))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self._views = View(self._buffers, "shift"), View(self._buffers, "scale")

    def forward(self, obs: Tensor) -> Tensor:
        """(N, *shape) -> (N, size), float32."""
        flat = obs.reshape(obs.shape[0], -1)  # len is a constant to torch.export
        return ((flat - self.shift) * self.scale).clamp_(-self.limit, self.limit)

    def numpy(self, obs: Array) -> Array:
        """The same on NumPy arrays."""
        shift, scale = self._views
        if obs.dtype != np.float32:  # integers would make numbers of double precision
            obs = obs.astype(np.float32)
        x = obs.reshape(len(obs), -1) - shift()
        x *= scale()
        np.minimum(x, self.limit, out=x)  # half the time of np.clip
        np.maximum(x, -self.limit, out=x)
        return x  # type: ignore[no-any-return]

    def merge(self, obs: Array, learners: Learners = ALONE) -> None:
        """Add the observations of a batch, (N, *shape), of each of the learners."""
        self.moments.merge(obs.reshape(len(obs), -1), learners)
        self.shift.copy_(self.moments.mean)
        if self._coarse:
            self.scale.copy_(1 / (3 * (torch.sqrt(self.moments.var) + 0.1)))
        else:
            self.scale.copy_(1 / torch.sqrt(self.moments.var + 1e-8))  # 1e-8: some never change


class PixelScale(nn.Module):
    """Bytes to numbers from 0 to 1, flattened: in the place of `ObsNormalizer`, for images."""

    def forward(self, obs: Tensor) -> Tensor:
        """(N, *shape) -> (N, size), float32."""
        return obs.reshape(obs.shape[0], -1) * (1 / 255)

    def numpy(self, obs: Array) -> Array:
        """The same on NumPy arrays."""
        return obs.reshape(len(obs), -1) * np.float32(1 / 255)  # type: ignore[no-any-return]

    def merge(self, obs: Array, learners: Learners = ALONE) -> None:
        """There is nothing to learn."""


def normalizer(
    shape: Sequence[int], dtype: str, coarse: bool = False
) -> tuple[ObsNormalizer | PixelScale, tuple[int, ...]]:
    """What scales observations of this shape and type, and the shape of inputs for networks."""
    if is_image(shape, dtype):
        return PixelScale(), tuple(shape)
    return ObsNormalizer(shape, coarse), (math.prod(shape),)


class ValueFunction(nn.Module):
    """An MLP that predicts returns in units of their standard deviation.

    So the loss has the same size whatever the rewards are, and the scale is learned on rank 0 alone.
    It is a scale without a shift: returns that hardly vary around a large number are learned slowly.

    Args:
        shape: (inputs,), or that of an image.
        hidden: units of each hidden layer.
        rng: for the weights.
    """

    scale: Tensor

    def __init__(
        self, shape: Sequence[int], hidden: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Draw the weights."""
        super().__init__()
        self.mlp = network(shape, hidden, 1, rng, last_gain=1.0)
        self.moments = Moments(())
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Values in units of the scale, (N,), of inputs (N, inputs)."""
        return self.mlp(x)[:, 0]  # type: ignore[no-any-return]

    def predict(self, x: Array) -> Array:
        """Values in units of reward, (N,), of inputs (N, inputs), on NumPy arrays."""
        return self.mlp.numpy(x)[-1][:, 0] * self.scale.numpy()  # type: ignore[no-any-return]

    def numpy(self, x: Array) -> tuple[Array, Callable[[Array], None]]:
        """As `forward`, on NumPy arrays; and what takes d loss / d values, (N,), to gradients."""
        layers = self.mlp.numpy(x)
        return layers[-1][:, 0], lambda by_value: self.mlp.backward(layers, by_value[:, None])

    def merge(self, ret: Array, learners: Learners = ALONE) -> None:
        """Add returns, (N,), of each of the learners to the statistics; predictions in units of reward stay what they were.

        Those who update only. Source: van Hasselt et al. 2016, arXiv:1602.07714, section 2.2.
        """
        self.moments.merge(ret, learners)
        scale = torch.sqrt(self.moments.var + 1e-8).to(torch.float32)
        with torch.no_grad():
            self.mlp.weights[-1].mul_(self.scale / scale)
            self.mlp.biases[-1].mul_(self.scale / scale)
        self.scale.copy_(scale)
