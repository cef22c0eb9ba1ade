"""Kernels of fully connected networks: forward, backward, and Adam. Compiled when first called.

A network's parameters lie in one vector, theta. Its layers are a table (layers, 4), int64: where
the weights begin in theta, where the biases do, number of inputs, number of outputs. All floats
have the dtype of theta.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.nets.kernels.compiler import inner, part

Array = npt.NDArray[Any]


@part
def layer(theta: Array, layers: Array, i: int) -> tuple[Array, Array]:
    """Return the weights (inputs, outputs) and biases (outputs,) of layer i, as views of theta."""
    weight, bias, n_in, n_out = layers[i, 0], layers[i, 1], layers[i, 2], layers[i, 3]
    return theta[weight : weight + n_in * n_out].reshape(n_in, n_out), theta[bias : bias + n_out]


@part
def tanh_(x: Array, bias: Array) -> None:
    """Replace x (n, units) by tanh(x + bias), within 5e-7 in float32.

    In float32 it is x P(x^2) / Q(x^2), a fit whose largest relative error is 1.2e-8 up to 8.5. LLVM
    makes vector code of it, unlike of a call of tanh.
    """
    if x.itemsize != 4:
        for row in range(x.shape[0]):
            for i in range(x.shape[1]):
                x[row, i] = math.tanh(x[row, i] + bias[i])
        return
    limit = np.float32(7.8)  # beyond it, tanh differs from 1 by at most 3.4e-7
    p1, p2 = np.float32(0.13413245618988873), np.float32(0.0035340253261194957)
    p3, p4 = np.float32(2.125102042344611e-05), np.float32(1.4269197929717976e-08)
    q1, q2 = np.float32(0.4674656835524094), np.float32(0.026022745458339474)
    q3, q4 = np.float32(0.00033488623505536293), np.float32(8.145110453437186e-07)
    one = np.float32(1)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            v = np.maximum(np.minimum(x[row, i] + bias[i], limit), -limit)
            s = v * v
            above = v * (one + s * (p1 + s * (p2 + s * (p3 + s * p4))))
            x[row, i] = above / (one + s * (q1 + s * (q2 + s * (q3 + s * q4))))


@inner
def forward(theta: Array, layers: Array, x: Array, work: Array) -> Array:
    """Compute the outputs (n, outputs) of inputs x (n, inputs), with tanh between the layers.

    `work` gets the outputs of all layers, one layer behind the other; `backward` needs them. The result
    is a view of it. x must be C-contiguous.
    """
    n, end = len(x), 0
    last = len(layers) - 1
    for i in range(len(layers)):
        weight, bias = layer(theta, layers, i)
        start, end = end, end + n * len(bias)
        out = work[start:end].reshape(n, len(bias))
        np.dot(x, weight, out)
        if i < last:
            tanh_(out, bias)
        else:
            for row in range(n):
                for j in range(len(bias)):
                    out[row, j] += bias[j]
        x = out
    return x


@part
def outputs(layers: Array, work: Array, n: int) -> Array:
    """Return the outputs (n, outputs) that `forward` has left in work for n rows, as a view."""
    end = 0
    for i in range(len(layers)):
        end += n * layers[i, 3]
    width = layers[len(layers) - 1, 3]
    return work[end - n * width : end].reshape(n, width)


@inner
def backward(
    theta: Array, layers: Array, x: Array, work: Array, by_out: Array, grad: Array, spare: Array
) -> None:
    """Write the gradient of a loss by this network's parameters into their places in grad.

    x and `work` are those of `forward`. `by_out` are the derivatives of the loss by the outputs, (n,
    outputs), C-contiguous. `spare` has room for 2 n numbers for each unit of the widest hidden layer.
    """
    n, start = len(x), 0
    one = theta.dtype.type(1)
    for i in range(len(layers) - 1):
        start += n * layers[i, 3]
    by = by_out
    for i in range(len(layers) - 1, -1, -1):
        weight, _ = layer(theta, layers, i)
        by_weight, by_bias = layer(grad, layers, i)
        width = layers[i, 2]
        below = x
        if i > 0:
            start -= n * width
            below = work[start : start + n * width].reshape(n, width)
        np.dot(below.T, by, by_weight)
        for j in range(len(by_bias)):
            by_bias[j] = 0
        for row in range(n):
            for j in range(len(by_bias)):
                by_bias[j] += by[row, j]
        if i > 0:
            at = (i % 2) * (len(spare) // 2)
            by_below = spare[at : at + n * width].reshape(n, width)
            np.dot(by, weight.T, by_below)
            for row in range(n):
                for j in range(width):  # the derivative of tanh, 1 - y^2, from its value y
                    by_below[row, j] *= one - below[row, j] * below[row, j]
            by = by_below


@part
def adam(
    theta: Array,
    grad: Array,
    first: Array,
    second: Array,
    scale: float,
    lr: float,
    step: int,
    eps: float,
) -> None:
    """Make step number `step`, from 1, of Adam along scale times the gradient, on vectors or slices of them.

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """
    number = theta.dtype.type
    keep1, keep2, new1, new2 = number(0.9), number(0.999), number(1 - 0.9), number(1 - 0.999)
    size = number(lr / (1 - 0.9**step))
    unbias = number(1 / math.sqrt(1 - 0.999**step))
    factor, least = number(scale), number(eps)
    for i in range(len(theta)):
        g = grad[i] * factor
        first[i] = keep1 * first[i] + new1 * g
        second[i] = keep2 * second[i] + new2 * g * g
        theta[i] -= size * first[i] / (np.sqrt(second[i]) * unbias + least)


@part
def square(x: Array) -> Any:
    """Return the sum of squares of a vector."""
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total
