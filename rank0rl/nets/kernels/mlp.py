"""Kernels of fully connected networks: forward, backward, and Adam. Compiled when first called.

A network's parameters lie in one vector, theta. Its layers are a table (layers, 8), int64: where the
weights begin in theta, where the biases do, number of inputs, number of outputs; number of the
activation, where scale and shift of the layer norm begin, each -1 if there is none; and how many numbers
of a row this layer and those before it keep in `work`, see `_kept`. All floats have the dtype of theta.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from rank0rl.nets.kernels.compiler import by_type, fma, inner, part
from rank0rl.nets.kernels.products import dot, product, total

Array = npt.NDArray[Any]

_TANH, _RELU, _ELU, _SILU = range(4)  # in the order of `nets.mlp.Activation`; gelu is 4
_EPS = 1e-5  # of torch's LayerNorm


@part
def _layer(theta: Array, layers: Array, i: int) -> tuple[Array, Array]:
    """Return the weights (inputs, outputs) and biases (outputs,) of layer i, as views of theta."""
    weight, bias, n_in, n_out = layers[i, 0], layers[i, 1], layers[i, 2], layers[i, 3]
    return theta[weight : weight + n_in * n_out].reshape(n_in, n_out), theta[bias : bias + n_out]


@part
def _norm(theta: Array, layers: Array, i: int) -> tuple[Array, Array]:
    """Return scale and shift, (outputs,), of the layer norm of layer i, as views of theta."""
    n, scale, shift = layers[i, 3], layers[i, 5], layers[i, 6]
    return theta[scale : scale + n], theta[shift : shift + n]


@inner
def _kept(layers: Array, i: int, n: int, work: Array) -> tuple[Array, Array]:
    """Return what `forward` keeps of layer i and n rows, as views of work: outputs, and what follows them.

    For a hidden layer these are the slopes of its activation, for each output, but for tanh; and of a
    layer norm the normalized rows, then the inverse of each row's standard deviation.
    """
    start, end = 0, n * layers[i, 7]
    if i > 0:
        start = n * layers[i - 1, 7]
    middle = start + n * layers[i, 3]
    return work[start:middle], work[middle:end]


def _fit(x: Any) -> Any:
    """Return tanh(x) in float32, within 5e-7, as x P(x^2) / Q(x^2).

    It is a fit whose largest relative error is 1.2e-8 up to 8.5. LLVM makes vector code of it, unlike of
    calls of tanh, exp and erf. So all activations are made of tanh.
    """
    limit = np.float32(7.8)  # beyond it, tanh differs from 1 by at most 3.4e-7
    p1, p2 = np.float32(0.13413245618988873), np.float32(0.0035340253261194957)
    p3, p4 = np.float32(2.125102042344611e-05), np.float32(1.4269197929717976e-08)
    q1, q2 = np.float32(0.4674656835524094), np.float32(0.026022745458339474)
    q3, q4 = np.float32(0.00033488623505536293), np.float32(8.145110453437186e-07)
    one = np.float32(1)
    v = np.maximum(np.minimum(x, limit), -limit)
    s = v * v
    above = fma(s, fma(s, fma(s, fma(s, p4, p3), p2), p1), one)
    return v * above / fma(s, fma(s, fma(s, fma(s, q4, q3), q2), q1), one)


def _exact(x: Any) -> Any:
    return math.tanh(x)


_tanh = by_type({types.float32: _fit, types.float64: _exact})


def _fit_logistic(x: Any) -> Any:
    """Return (1 + tanh(x)) / 2 in float32. It is 0 or 1 where the fit ends: large inputs multiply it."""
    half, limit = np.float32(0.5), np.float32(7.8)
    y = half + half * _tanh(x)
    if x > limit:
        y = np.float32(1)
    if x < -limit:
        y = np.float32(0)
    return y


def _exact_logistic(x: Any) -> Any:
    return 0.5 + 0.5 * math.tanh(x)


_logistic = by_type({types.float32: _fit_logistic, types.float64: _exact_logistic})


@inner
def _activate(code: int, x: Array, slopes: Array) -> None:
    """Replace numbers x by their activation. `slopes`, as many, gets the derivatives, but for tanh."""
    number = x.dtype.type
    zero, half, one, two = number(0), number(0.5), number(1), number(2)
    if code == _TANH:
        for i in range(len(x)):
            x[i] = _tanh(x[i])
    elif code == _RELU:
        for i in range(len(x)):
            x[i] = np.maximum(x[i], zero)
            slopes[i] = one if x[i] > zero else zero
    elif code == _ELU:
        for i in range(len(x)):
            t = _tanh(half * np.minimum(x[i], zero))  # exp(x) - 1 = 2 t / (1 - t)
            x[i] = x[i] if x[i] > zero else two * t / (one - t)
            slopes[i] = one + np.minimum(x[i], zero)
    elif code > _ELU:  # x / (1 + exp(-2 u)), with u = a x (1 + b x^2)
        a = half if code == _SILU else number(math.sqrt(2 / math.pi))
        b = zero if code == _SILU else number(0.044715)
        for i in range(len(x)):
            bend = b * x[i] * x[i]
            s = _logistic(a * x[i] * (one + bend))
            slopes[i] = s + two * a * x[i] * (one + 3 * bend) * s * (one - s)
            x[i] *= s


@inner
def _times_slopes(code: int, out: Array, slopes: Array, by: Array) -> None:
    """Multiply `by` by the slopes of the activation that gave the numbers `out`: see `_activate`.

    Derivatives by outputs become derivatives by inputs, and changes of inputs become changes of outputs.
    """
    one = out.dtype.type(1)
    if code == _TANH:
        for i in range(len(by)):  # 1 - y^2, from the value y
            by[i] *= one - out[i] * out[i]
    elif code > _TANH:
        for i in range(len(by)):
            by[i] *= slopes[i]


@inner
def _normal_rows(more: Array, n: int, width: int) -> tuple[Array, Array]:
    """Return the normalized rows (n, width) and their inverse standard deviations, (n,), of a layer norm."""
    inverse = more[len(more) - n :]
    return more[len(more) - n - n * width : len(more) - n].reshape(n, width), inverse


@inner
def _normalize(x: Array, scale: Array, more: Array) -> None:
    """Replace x (n, units) by scale times the normalized rows; `more` gets what `_kept` returns.

    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4.
    """
    n, width = x.shape
    number = x.dtype.type
    share, eps = number(1 / width), number(_EPS)
    normal, inverse = _normal_rows(more, n, width)
    for row in range(n):
        mean = total(x[row]) * share
        for j in range(width):
            x[row, j] -= mean
        factor = number(1) / np.sqrt(dot(x[row], x[row]) * share + eps)
        inverse[row] = factor
        for j in range(width):
            z = x[row, j] * factor
            normal[row, j] = z
            x[row, j] = z * scale[j]


@inner
def _along_normal(more: Array, by: Array) -> None:
    """Multiply rows `by`, (n, units), by the derivatives of the normalized rows by what was normalized.

    For a normalized row z they are (1 - 1 1' / m - z z' / m) / std: symmetric, so that they serve both ways.
    """
    n, width = by.shape
    number = by.dtype.type
    share = number(1 / width)
    normal, inverse = _normal_rows(more, n, width)
    for row in range(n):
        mean, along = total(by[row]) * share, dot(by[row], normal[row]) * share
        factor = inverse[row]
        for j in range(width):
            by[row, j] = factor * (by[row, j] - mean - along * normal[row, j])


@inner
def _add_row(x: Array, row: Array) -> None:
    """Add a row (units,) to each row of x, (n, units)."""
    for i in range(x.shape[0]):
        for j in range(len(row)):
            x[i, j] += row[j]


@inner
def forward(theta: Array, layers: Array, x: Array, work: Array) -> Array:
    """Compute the outputs (n, outputs) of inputs x (n, inputs).

    `work` gets what `backward` needs: see `_kept`. The result is a view of it. x must be
    C-contiguous.
    """
    n = len(x)
    for i in range(len(layers)):
        weight, bias = _layer(theta, layers, i)
        flat, more = _kept(layers, i, n, work)
        out = flat.reshape(n, len(bias))
        product(x, weight, out)
        _add_row(out, bias)
        if layers[i, 5] >= 0:
            scale, shift = _norm(theta, layers, i)
            _normalize(out, scale, more)
            _add_row(out, shift)
        _activate(layers[i, 4], flat, more)
        x = out
    return x


@part
def outputs(layers: Array, work: Array, n: int) -> Array:
    """Return the outputs (n, outputs) that `forward` has left in work for n rows, as a view."""
    last = len(layers) - 1
    flat, _ = _kept(layers, last, n, work)
    return flat.reshape(n, layers[last, 3])


@inner
def backward(
    theta: Array, layers: Array, x: Array, work: Array, by_out: Array, grad: Array, spare: Array
) -> None:
    """Write the gradient of a loss by this network's parameters into their places in grad.

    x and `work` are those of `forward`. `by_out` are the derivatives of the loss by the outputs, (n,
    outputs), C-contiguous. `spare` has room for 2 n numbers for each unit of the widest hidden layer.
    """
    n = len(x)
    by = by_out
    for i in range(len(layers) - 1, -1, -1):
        weight, _ = _layer(theta, layers, i)
        by_weight, by_bias = _layer(grad, layers, i)
        width = layers[i, 2]
        _sum_rows(by, by_bias)
        below = x
        if i > 0:
            out, more = _kept(layers, i - 1, n, work)
            below = out.reshape(n, width)
        product(below.T, by, by_weight)
        if i > 0:
            at = (i % 2) * (len(spare) // 2)
            flat = spare[at : at + n * width]
            by_below = flat.reshape(n, width)
            product(by, weight.T, by_below)
            _times_slopes(layers[i - 1, 4], out, more, flat)
            if layers[i - 1, 5] >= 0:
                scale, _ = _norm(theta, layers, i - 1)
                by_scale, by_shift = _norm(grad, layers, i - 1)
                _norm_slopes(scale, more, by_below, by_scale, by_shift)
            by = by_below


@inner
def _sum_rows(x: Array, total: Array) -> None:
    for j in range(len(total)):
        total[j] = 0
    for row in range(len(x)):
        for j in range(len(total)):
            total[j] += x[row, j]


@inner
def _norm_slopes(scale: Array, more: Array, by: Array, by_scale: Array, by_shift: Array) -> None:
    """Turn derivatives by the outputs of a layer norm into those by its inputs, scale and shift."""
    n, width = by.shape
    normal, _ = _normal_rows(more, n, width)
    _sum_rows(by, by_shift)
    for j in range(width):
        by_scale[j] = 0
    for row in range(n):
        for j in range(width):
            by_scale[j] += by[row, j] * normal[row, j]
            by[row, j] *= scale[j]
    _along_normal(more, by)


@inner
def tangent(
    vector: Array, theta: Array, layers: Array, x: Array, work: Array, room: Array
) -> Array:
    """Return J v (n, outputs), the change of the outputs along v, as a view of room.

    `work` is what `forward` left. There is room in `room` for 3 n numbers for each unit of the widest layer.
    """
    n, third = len(x), len(room) // 3
    moved = x
    for i in range(len(layers)):
        weight, _ = _layer(theta, layers, i)
        by_weight, by_bias = _layer(vector, layers, i)
        width = len(by_bias)
        at = (i % 2) * third
        flat = room[at : at + n * width]
        now = flat.reshape(n, width)
        product(x, by_weight, now)
        if i > 0:
            more = room[2 * third : 2 * third + n * width]
            product(moved, weight, more.reshape(n, width))
            for j in range(n * width):
                flat[j] += more[j]
        _add_row(now, by_bias)
        out, rest = _kept(layers, i, n, work)
        if layers[i, 5] >= 0:
            scale, _ = _norm(theta, layers, i)
            by_scale, by_shift = _norm(vector, layers, i)
            _move_norm(scale, rest, by_scale, now)
            _add_row(now, by_shift)
        _times_slopes(layers[i, 4], out, rest, flat)
        moved, x = now, out.reshape(n, width)
    return moved


@inner
def _move_norm(scale: Array, more: Array, by_scale: Array, moved: Array) -> None:
    """Turn changes of the inputs of a layer norm, and of its scale, into changes of its outputs."""
    n, width = moved.shape
    normal, _ = _normal_rows(more, n, width)
    _along_normal(more, moved)
    for row in range(n):
        for j in range(width):
            z = normal[row, j]
            moved[row, j] = moved[row, j] * scale[j] + z * by_scale[j]


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
