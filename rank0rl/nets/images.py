"""Layers for images: the network of every Atari agent, or a small one, and its products on all cores.

A convolution is a product of patches and a kernel. The products are BLAS's, of a few images at a time, so
that any number of threads computes the same bits. Images are (N, height, width, channels), C-contiguous.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn

from rank0rl.nets.flat import Views

Array = npt.NDArray[Any]

# Side of the kernels, stride and channels of each convolution; units of the layer behind them.
_LARGE = ((8, 4, 32), (4, 2, 64), (3, 1, 64)), 512
_SMALL = ((3, 1, 16),), 128
_SIDE = 36  # pixels: the first network leaves nothing of smaller images

_IMAGES = 8  # that a thread takes at once: their patches stay in its cache ...
_ROWS = 64  # ... and rows, where a layer has one patch for each image
_SUMS = 32  # a gradient by a kernel is the sum of so many parts at most


class Convolutions(nn.Module):
    """Convolutions and a fully connected layer, with relu, from bytes of an image to features.

    Images of 36 by 36 pixels and more go through 32 kernels of 8x8 with stride 4, 64 of 4x4 with stride 2,
    64 of 3x3, and 512 units; smaller ones through 16 kernels of 3x3, and 128 units. Their channels (or
    frames) are first or last, and the shortest axis. Weights are orthogonal, biases zero.

    Source: Mnih et al. 2015, Nature 518, 529-533 (large); Young and Tian 2019, arXiv:1903.03176 (small).
    """

    def __init__(self, shape: Sequence[int], rng: np.random.Generator) -> None:
        super().__init__()
        self.threads = 1
        """Number of threads that compute gradients. The results do not depend on it."""
        self._shape, self._channels_last = tuple(shape), shape[2] <= shape[0]
        image = tuple(shape) if self._channels_last else (*shape[1:], shape[0])
        convolutions, self.size = _LARGE if min(image[:2]) >= _SIDE else _SMALL
        self._layers: list[_Layer] = []
        for side, stride, outputs in convolutions:
            self._layers.append(_Layer(image, (side, side), stride, outputs))
            image = self._layers[-1].out
        self._layers.append(_Layer(image, image[:2], 1, self.size))
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer in self._layers:
            weight = torch.empty(layer.inputs, layer.outputs)
            nn.init.orthogonal_(weight, math.sqrt(2), generator=torch_rng)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(layer.outputs)))
        self._arrays = Views(self.weights._parameters), Views(self.biases._parameters)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features (N, size) of flattened images (N, pixels), with numbers from 0 to 255."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return self._by_torch(x)
        out = torch.from_numpy(self._images(x.detach().numpy()))
        first, *others = self.weights
        weights = [first * (1 / 255), *others]
        for layer, weight, bias in zip(self._layers, weights, self.biases, strict=True):
            out = _apply(layer, self.threads, out, weight, bias, None)
        return out.flatten(1)

    def numpy(self, x: Array) -> Array:
        """Compute features (..., size) of flattened images (..., pixels). No row depends on the others."""
        (first, *others), biases = (arrays() for arrays in self._arrays)
        weights = [first * np.float32(1 / 255), *others]
        out = self._images(x)
        for layer, weight, bias in zip(self._layers, weights, biases, strict=True):
            out = layer.apply(1, out, weight, bias, None, rows=1)
        return out.reshape(*x.shape[:-1], self.size)

    def _images(self, x: Array) -> Array:
        """Return flattened images with their channels last."""
        x = x.reshape(-1, *self._shape)
        if self._channels_last:
            return np.ascontiguousarray(x)
        n, channels, *sides = x.shape
        out = np.empty((n, *sides, channels), x.dtype)
        for i in range(channels):  # a third of the time of one transposed copy
            out[..., i] = x[:, i]
        return out

    def _by_torch(self, x: Tensor) -> Tensor:
        """Do what `forward` does in torch's own operations: on a GPU, and in an exported program."""
        x = x.reshape(-1, *self._shape) * (1 / 255)
        x = x.permute(0, 3, 1, 2) if self._channels_last else x
        for layer, weight, bias in zip(self._layers, self.weights, self.biases, strict=True):
            kernel = weight.reshape(*layer.sides, layer.image[2], layer.outputs).permute(3, 2, 0, 1)
            x = torch.relu(nn.functional.conv2d(x, kernel, bias, stride=layer.stride))
        return x.flatten(1)


def use_threads(modules: Iterable[Any], threads: int) -> None:
    """Let the convolutions among some modules compute gradients in so many threads."""
    for module in modules:
        for part in module.modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, Convolutions):
                part.threads = threads


class _Layer:
    """A convolution with relu: the products that its outputs and its gradients are made of.

    A fully connected layer is one whose kernel is as large as the image.

    Args:
        image: height, width and channels.
        sides: height and width of the kernels.
        stride: pixels from one patch to the next.
        outputs: number of kernels.
    """

    def __init__(
        self, image: Sequence[int], sides: Sequence[int], stride: int, outputs: int
    ) -> None:
        self.image, self.sides = tuple(image), tuple(sides)
        self.stride, self.outputs = stride, outputs
        self.inputs = math.prod(sides) * image[2]
        down, right = ((image[i] - sides[i]) // stride + 1 for i in (0, 1))
        self.out = (down, right, outputs)
        """Height, width and channels of the outputs."""
        self._is_whole = self.out[:2] == (1, 1) and self.image[:2] == self.sides
        self._rows = _ROWS if self._is_whole else _IMAGES

    def apply(
        self,
        threads: int,
        x: Array,
        weight: Array,
        bias: Array | None,
        y: Array | None,
        rows: int = 0,
    ) -> Array:
        """Return relu(patches of x @ weight + bias), (N, *out); if y is given, zeros where y <= 0 instead of relu.

        Args:
            threads: number of threads.
            x: images (N, *image).
            weight: (inputs, outputs).
            bias: (outputs,), or None.
            y: (N, *out), or None.
            rows: images in a product. None depends on the others if it is 1.
        """
        out = np.empty((len(x), *self.out), weight.dtype)

        def task(some: slice) -> None:
            z = out[some].reshape(-1, self.outputs)
            np.matmul(self._patches(x[some], weight.dtype), weight, out=z)
            if bias is not None:
                z += bias
            if y is None:
                np.maximum(z, 0, out=z)
            else:
                z *= y[some].reshape(z.shape) > 0

        _run(task, _blocks(len(x), rows or self._rows), threads)
        return out

    def by_input(self, threads: int, by_out: Array, weight: Array, y: Array) -> Array:
        """Return the derivatives by the images (N, *image), given those by the outputs y, (N, *out)."""
        out = np.empty((len(y), *self.image), weight.dtype)

        def task(some: slice) -> None:
            by_z = self._by_products(by_out[some], y[some])
            if self._is_whole:
                np.matmul(by_z, weight.T, out=out[some].reshape(-1, self.inputs))
                return
            patches = _scratch((len(by_z), self.inputs), weight.dtype)
            self._add_patches(np.matmul(by_z, weight.T, out=patches), out[some])

        _run(task, _blocks(len(y), self._rows), threads)
        return out

    def by_weight(self, threads: int, x: Array, by_out: Array, y: Array) -> tuple[Array, Array]:
        """Return the derivatives by the weight (inputs, outputs) and by the bias (outputs,)."""
        if self._is_whole:  # no sum of parts: each thread takes some of the inputs
            by_z = self._by_products(by_out, y)
            patches = x.reshape(-1, self.inputs)
            out = np.empty((self.inputs, self.outputs), by_z.dtype)

            def some_inputs(some: slice) -> None:
                np.matmul(patches[:, some].T, by_z, out=out[some])

            _run(some_inputs, _blocks(self.inputs, -(-self.inputs // _SUMS)), threads)
            return out, by_z.sum(axis=0)
        blocks = _blocks(len(x), max(_IMAGES, -(-len(x) // _SUMS)))
        parts = np.empty((len(blocks), self.inputs + 1, self.outputs), by_out.dtype)

        def task(block: int) -> None:
            part, start = parts[block], blocks[block].start
            for first in range(start, blocks[block].stop, _IMAGES):
                some = slice(first, min(first + _IMAGES, blocks[block].stop))
                by_z = self._by_products(by_out[some], y[some])
                patches = self._patches(x[some], by_z.dtype)
                if first == start:
                    np.matmul(patches.T, by_z, out=part[:-1])
                    part[-1] = by_z.sum(axis=0)
                else:
                    part[:-1] += patches.T @ by_z
                    part[-1] += by_z.sum(axis=0)

        _run(task, range(len(blocks)), threads)
        total = parts.sum(axis=0)
        return total[:-1], total[-1]

    def _by_products(self, by_out: Array, y: Array) -> Array:
        """Return the derivatives by the products, (patches, outputs): zeros where the outputs y are."""
        return (by_out * (y > 0)).reshape(-1, self.outputs)

    def _patches(self, x: Array, dtype: Any) -> Array:
        """Return the patches (patches, inputs) of images. Another call in this thread overwrites them."""
        if self._is_whole:
            return x.reshape(-1, self.inputs)
        (down, right, _), (high, wide) = self.out, self.sides
        image, row, pixel, number = x.strides
        shape = len(x), down, right, high, wide * x.shape[3]
        strides = image, row * self.stride, pixel * self.stride, row, number
        patches = _scratch(shape, dtype)
        np.copyto(patches, as_strided(x, shape, strides))
        return patches.reshape(-1, self.inputs)

    def _add_patches(self, patches: Array, out: Array) -> None:
        """Set images to the sums of their patches."""
        (down, right, _), (high, wide), step = self.out, self.sides, self.stride
        n, height, width, channels = out.shape
        several = (
            step if wide % step == 0 and width % step == 0 else 1
        )  # pixels that are added at once
        patches = patches.reshape(n, down, right, high, wide // several, several * channels)
        sums = out.reshape(n, height, width // several, several * channels)
        sums[...] = 0
        across = step // several
        for i in range(high):
            for j in range(wide // several):
                sums[:, i : i + step * down : step, j : j + across * right : across] += patches[
                    :, :, :, i, j
                ]


class _Apply(torch.autograd.Function):
    """`_Layer.apply` for autograd: relu(x w + b), or x w + b where y > 0. Each is linear in x, in w and in b.

    So the derivatives of all three functions are these functions again, as often as one likes.
    """

    @staticmethod
    def forward(ctx: Any, layer: _Layer, threads: int, x: Any, w: Any, b: Any, y: Any) -> Tensor:
        out = layer.apply(threads, *_arrays(x, w, b, y))
        result = torch.from_numpy(out)
        ctx.save_for_backward(x, w, result if y is None else y)
        ctx.layer, ctx.threads = layer, threads
        return result

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        how, needs_x = (ctx.layer, ctx.threads), ctx.needs_input_grad[2]
        by_x = _by_input(*how, by_out, w, y) if needs_x else None
        return None, None, by_x, *_by_weight(*how, x, by_out, y), None


class _ByInput(torch.autograd.Function):
    """`_Layer.by_input` for autograd."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, threads: int, by_out: Any, w: Any, y: Any) -> Tensor:
        ctx.save_for_backward(by_out, w, y)
        ctx.layer, ctx.threads = layer, threads
        return torch.from_numpy(layer.by_input(threads, *_arrays(by_out, w, y)))

    @staticmethod
    def backward(ctx: Any, of_x: Tensor) -> Any:
        by_out, w, y = ctx.saved_tensors
        how = ctx.layer, ctx.threads
        by_w, _ = _by_weight(*how, of_x, by_out, y)
        return None, None, _apply(*how, of_x, w, None, y), by_w, None


class _ByWeight(torch.autograd.Function):
    """`_Layer.by_weight` for autograd."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, threads: int, x: Any, by_out: Any, y: Any) -> Any:
        ctx.save_for_backward(x, by_out, y)
        ctx.layer, ctx.threads = layer, threads
        return tuple(map(torch.from_numpy, layer.by_weight(threads, *_arrays(x, by_out, y))))

    @staticmethod
    def backward(ctx: Any, of_w: Tensor, of_b: Tensor) -> Any:
        x, by_out, y = ctx.saved_tensors
        how, needs_x = (ctx.layer, ctx.threads), ctx.needs_input_grad[2]
        by_x = _by_input(*how, by_out, of_w, y) if needs_x else None
        return None, None, by_x, _apply(*how, x, of_w, of_b, y), None


_apply: Any = _Apply.apply
_by_input: Any = _ByInput.apply
_by_weight: Any = _ByWeight.apply


def _arrays(*tensors: Tensor | None) -> list[Any]:
    """Return tensors as NumPy arrays, C-contiguous."""
    return [None if t is None else t.detach().contiguous().numpy() for t in tensors]


def _blocks(n: int, size: int) -> list[slice]:
    """Return slices of `size` rows, of n in all."""
    return [slice(a, min(a + size, n)) for a in range(0, n, size)]


def _run(task: Callable[[Any], None], items: Iterable[Any], threads: int) -> None:
    """Call a task with each item, in several threads: whoever is free takes the next one."""
    left = iter(items)

    def work() -> None:
        for item in left:
            task(item)

    others = [_pool(threads).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        wait(others)
    for other in others:
        other.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "rank0rl-images")


class _Scratch(threading.local):
    """Memory of a thread for patches: new memory would take as long as the copy."""

    memory: Array = np.empty(0)

    def __call__(self, shape: Sequence[int], dtype: Any) -> Array:
        size = math.prod(shape)
        if self.memory.size < size or self.memory.dtype != dtype:
            self.memory = np.empty(size, dtype)
        return self.memory[:size].reshape(shape)


_scratch = _Scratch()
