"""Kernels of policies' distributions: log ratios and entropies of a network's outputs, and the way back.

On the way back, derivatives of a loss by log ratios and by the mean entropy become derivatives by the
outputs. The loss itself is not known here.

Each distribution is a head: a class of its own, which holds what kernels need besides the outputs. The type of
the head chooses the code when a kernel is compiled. To add one: a class, two functions in `_KERNELS`, and the
policy in `head_of`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rank0rl.agent import NEVER
from rank0rl.nets.flat import place
from rank0rl.nets.kernels.compiler import by_type, inner, part
from rank0rl.nets.policies import BetaPolicy, CategoricalPolicy, GaussianPolicy, built_in

Array = npt.NDArray[Any]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Normal(NamedTuple):
    """Normal draws. The outputs are their means."""

    place: Array
    """Place in theta at which the log standard deviations begin, how many are summed, and of how many actions."""


class StateNormal(NamedTuple):
    """Normal draws. The outputs are their means, then what is added to the parameters for the log deviations."""

    place: Array
    """The same as in `Normal`."""
    low: float
    high: float
    """Limits of the log standard deviations."""


class Beta(NamedTuple):
    """Draws in 0..1 from Beta(a, b). The outputs give a, then b, each as 1 + softplus."""


class Choices(NamedTuple):
    """One of several values, or several such choices at once. The outputs are their logits."""

    starts: Array
    """The columns at which each choice begins, and their number, int64."""


class ByTorch(NamedTuple):
    """Any distribution: torch takes the outputs, and gives the derivatives by them."""


class Block(NamedTuple):
    """Some rows of a minibatch, m of n, what is known of them, and memory."""

    obs: Array
    ret: Array
    act: Array
    """Draws (m, k) in the dtype of theta, or choices (m, choices at once), int64."""
    logp: Array
    """Their log-probabilities under the acting policy, (m,)."""
    adv: Array
    mask: Array
    """The choices that could be taken, (m, all choices), bool; (m, 0) if all could be."""
    log_ratio: Array
    """Gets the log of the ratio of new to old probability, (m,)."""
    value: Array
    """Gets the values, (m,)."""
    by_log_ratio: Array
    """Derivatives of the loss by the log ratios, (m,)."""
    by_value: Array
    """Derivatives by the values, (m,)."""
    outputs: Array
    """Outputs for torch, which leaves the derivatives by them there, (m, outputs)."""
    spare: Array
    """Memory from forward to backward: room for 2 m numbers for each output."""


def head_of(policy: Any, theta: Tensor) -> Any:
    """Return the head of a policy whose parameters are in the flat vector theta: `ByTorch` if it has no other."""
    if (kind := built_in(policy)) is None:
        return ByTorch()
    outputs, k = policy.mlp.table(theta)[-1, 3], policy.noise[1]
    if kind is CategoricalPolicy:
        starts = np.array([0, *np.cumsum(policy.space.choices)])
        return Choices(starts) if outputs == policy.space.size else ByTorch()
    if outputs != (k if kind is GaussianPolicy else 2 * k):
        return ByTorch()
    if kind is BetaPolicy:
        return Beta()
    if policy.log_std.shape[-1] != k:
        return ByTorch()
    rows = len(policy.log_std) if policy.log_std.ndim == 2 else 1
    where = np.array([place(policy.log_std, theta), rows, k])
    return (
        Normal(where) if kind is GaussianPolicy else StateNormal(where, *map(float, policy.limits))
    )


@part
def _log_stds(theta: Array, where: Array) -> Array:
    """Return the parameters whose sums over rows are log standard deviations, (rows, k), as a view of theta."""
    at, rows, k = where[0], where[1], where[2]
    return theta[at : at + rows * k].reshape(rows, k)


@part
def _repeat_first(x: Array) -> None:
    for row in range(1, len(x)):
        for j in range(x.shape[1]):
            x[row, j] = x[0, j]


def _normal_log_ratios(head: Normal, theta: Array, out: Array, block: Block) -> Any:
    number = out.dtype.type
    m, k = out.shape
    log_std, inverse = _log_stds(theta, head.place), block.spare[:k]
    const = number(_HALF_LOG_2PI * k)
    for j in range(k):
        total = number(0)
        for row in range(len(log_std)):
            total += log_std[row, j]
        inverse[j] = np.exp(-total)
        const += total
    half = number(0.5)
    for row in range(m):
        squares = number(0)
        for j in range(k):
            z = (block.act[row, j] - out[row, j]) * inverse[j]
            squares += z * z
        block.log_ratio[row] = -half * squares - const - block.logp[row]
    return m * (const + half * k)


def _by_normal(head: Normal, out: Array, block: Block, by_entropy: float, grad: Array) -> None:
    number = out.dtype.type
    m, k = out.shape
    by_log_std, inverse = _log_stds(grad, head.place), block.spare[:k]
    one, by_total = number(1), by_log_std[0]
    for j in range(k):
        by_total[j] = number(by_entropy * m)
    for row in range(m):
        for j in range(k):
            z = (block.act[row, j] - out[row, j]) * inverse[j]
            out[row, j] = block.by_log_ratio[row] * z * inverse[j]
            by_total[j] += block.by_log_ratio[row] * (z * z - one)
    _repeat_first(by_log_std)


def _state_log_ratios(head: StateNormal, theta: Array, out: Array, block: Block) -> Any:
    number = out.dtype.type
    m, k = block.act.shape
    parts, totals = _log_stds(theta, head.place), block.spare[:k]
    low, high = number(head.low), number(head.high)
    half, const = number(0.5), number(_HALF_LOG_2PI)
    for j in range(k):
        totals[j] = 0
        for row in range(len(parts)):
            totals[j] += parts[row, j]
    entropy = number(0)
    for row in range(m):
        logp = number(0)
        for j in range(k):
            log_std = np.minimum(np.maximum(totals[j] + out[row, k + j], low), high)
            z = (block.act[row, j] - out[row, j]) * np.exp(-log_std)
            logp -= half * z * z + log_std + const
            entropy += log_std
        block.log_ratio[row] = logp - block.logp[row]
    return entropy + m * k * (half + const)


def _by_state_normal(
    head: StateNormal, out: Array, block: Block, by_entropy: float, grad: Array
) -> None:
    number = out.dtype.type
    m, k = block.act.shape
    by_log_std, totals = _log_stds(grad, head.place), block.spare[:k]
    low, high, one, bonus = number(head.low), number(head.high), number(1), number(by_entropy)
    by_total = by_log_std[0]
    for j in range(k):
        by_total[j] = 0
    for row in range(m):
        for j in range(k):
            whole = totals[j] + out[row, k + j]
            log_std = np.minimum(np.maximum(whole, low), high)
            inverse = np.exp(-log_std)
            z = (block.act[row, j] - out[row, j]) * inverse
            by = block.by_log_ratio[row] * (z * z - one) + bonus
            if log_std != whole:  # beyond a limit
                by = number(0)
            out[row, j] = block.by_log_ratio[row] * z * inverse
            out[row, k + j] = by
            by_total[j] += by
    _repeat_first(by_log_std)


def _beta_log_ratios(head: Beta, theta: Array, out: Array, block: Block) -> Any:
    """Compute log-densities and entropies in float64, and keep the derivatives of the former by the outputs."""
    m, k = block.act.shape
    by_out, entropy = block.spare[: out.size].reshape(out.shape), 0.0
    for row in range(m):
        logp = 0.0
        for j in range(k):
            a, by_a = _softplus(out[row, j])
            b, by_b = _softplus(out[row, k + j])  # both less 1, here and below
            log_gamma_a, digamma_a = _log_gamma(1 + a)
            log_gamma_b, digamma_b = _log_gamma(1 + b)
            log_gamma_ab, digamma_ab = _log_gamma(2 + a + b)
            draw = np.float64(block.act[row, j])
            log_draw, log_rest = np.log(draw), np.log(1 - draw)
            log_beta = log_gamma_a + log_gamma_b - log_gamma_ab
            logp += a * log_draw + b * log_rest - log_beta
            entropy += log_beta - a * digamma_a - b * digamma_b + (a + b) * digamma_ab
            by_out[row, j] = by_a * (log_draw - digamma_a + digamma_ab)
            by_out[row, k + j] = by_b * (log_rest - digamma_b + digamma_ab)
        block.log_ratio[row] = logp - block.logp[row]
    return entropy + m * k * math.log(2)  # of draws scaled to -1..1


def _by_beta(head: Beta, out: Array, block: Block, by_entropy: float, grad: Array) -> None:
    m, k = block.act.shape
    by_out = block.spare[: out.size].reshape(out.shape)
    for row in range(m):
        for j in range(k):
            by_a, by_b = 0.0, 0.0
            if by_entropy != 0:
                a, slope_a = _softplus(out[row, j])
                b, slope_b = _softplus(out[row, k + j])
                both = (a + b) * _trigamma(2 + a + b)
                by_a = by_entropy * slope_a * (both - a * _trigamma(1 + a))
                by_b = by_entropy * slope_b * (both - b * _trigamma(1 + b))
            out[row, j] = block.by_log_ratio[row] * by_out[row, j] + by_a
            out[row, k + j] = block.by_log_ratio[row] * by_out[row, k + j] + by_b


def _choice_log_ratios(head: Choices, theta: Array, out: Array, block: Block) -> Any:
    """Replace logits by log-probabilities, and keep the entropy of each choice."""
    number, starts = out.dtype.type, head.starts
    choices, total = len(starts) - 1, number(0)
    for row in range(len(out)):
        block.log_ratio[row] = -block.logp[row]
        for i in range(choices):
            entropy = _log_softmax(out[row], block.mask[row], starts[i], starts[i + 1])
            block.spare[row * choices + i] = entropy
            total += entropy
            block.log_ratio[row] += out[row, starts[i] + block.act[row, i]]
    return total


def _by_choices(head: Choices, out: Array, block: Block, by_entropy: float, grad: Array) -> None:
    bonus, starts = out.dtype.type(-by_entropy), head.starts
    choices = len(starts) - 1
    for row in range(len(out)):
        for i in range(choices):
            entropy = block.spare[row * choices + i]
            for j in range(starts[i], starts[i + 1]):
                share = np.exp(out[row, j])
                by = bonus * share * (out[row, j] + entropy) - block.by_log_ratio[row] * share
                if j == starts[i] + block.act[row, i]:
                    by += block.by_log_ratio[row]
                out[row, j] = by


def _give_to_torch(head: ByTorch, theta: Array, out: Array, block: Block) -> Any:
    _copy(out, block.outputs)
    return out.dtype.type(0)


def _take_from_torch(
    head: ByTorch, out: Array, block: Block, by_entropy: float, grad: Array
) -> None:
    _copy(block.outputs, out)


@part
def _copy(x: Array, to: Array) -> None:
    """Do what `to[:] = x` does, which takes seconds longer to compile."""
    for row in range(len(x)):
        for j in range(x.shape[1]):
            to[row, j] = x[row, j]


_KERNELS: dict[Any, Any] = {
    Normal: (_normal_log_ratios, _by_normal),
    StateNormal: (_state_log_ratios, _by_state_normal),
    Beta: (_beta_log_ratios, _by_beta),
    Choices: (_choice_log_ratios, _by_choices),
    ByTorch: (_give_to_torch, _take_from_torch),
}
log_ratios = by_type({head: each[0] for head, each in _KERNELS.items()})
"""Write the log ratios of a block, (head, theta, outputs, block); return the sum of the rows' entropies.

What it changes in the outputs and leaves in `block.spare`, `by_outputs` finds there.
"""
by_outputs = by_type({head: each[1] for head, each in _KERNELS.items()})
"""Replace outputs by the derivatives of a loss by them, (head, outputs, block, by_entropy, grad).

`by_entropy` is the derivative by the entropy of one row. The derivatives by parameters beside the network go
to their places in `grad`, the vector of all.
"""


def _nothing(head: Normal, out: Array, mask: Array) -> None:
    pass


def _all_log_softmax(head: Choices, out: Array, mask: Array) -> None:
    starts = head.starts
    for row in range(len(out)):
        for i in range(len(starts) - 1):
            _log_softmax(out[row], mask[row], starts[i], starts[i + 1])


def _normal_metric(
    head: Normal, theta: Array, vector: Array, out: Array, by: Array, n_all: int, grad: Array
) -> None:
    number = theta.dtype.type
    log_std, moved = _log_stds(theta, head.place), _log_stds(vector, head.place)
    by_log_std = _log_stds(grad, head.place)
    rows, k = log_std.shape
    for j in range(k):
        std = along = number(0)
        for row in range(rows):
            std += log_std[row, j]
            along += moved[row, j]
        weight = np.exp(number(-2) * std) / number(n_all)
        for row in range(len(by)):
            by[row, j] *= weight
        for row in range(rows):
            by_log_std[row, j] = number(2 * len(by) / n_all) * along


def _choice_metric(
    head: Choices, theta: Array, vector: Array, out: Array, by: Array, n_all: int, grad: Array
) -> None:
    """Multiply by (diag(p) - p p') / N for each choice. The outputs are log-probabilities."""
    number, starts = by.dtype.type, head.starts
    weight = number(1 / n_all)
    for row in range(len(by)):
        for i in range(len(starts) - 1):
            mean = number(0)
            for j in range(starts[i], starts[i + 1]):
                mean += np.exp(out[row, j]) * by[row, j]
            for j in range(starts[i], starts[i + 1]):
                by[row, j] = weight * np.exp(out[row, j]) * (by[row, j] - mean)


ready = by_type({Normal: _nothing, Choices: _all_log_softmax})
"""Make of outputs what `times_metric` needs of them: (head, outputs, mask)."""

METRICS: dict[Any, Any] = {Normal: _normal_metric, Choices: _choice_metric}
times_metric = by_type(METRICS)
"""Replace changes of the outputs `by` by M / N times them, with M as in `fisher._product`.

The arguments are (head, theta, vector, outputs, by, N, grad). The product for parameters beside the network
goes to their places in `grad`.
"""


@part
def _log_softmax(out: Array, mask: Array, start: int, end: int) -> Any:
    """Replace the logits of one choice by log-probabilities; return the entropy."""
    number = out.dtype.type
    top = number(NEVER)
    for j in range(start, end):
        if len(mask) and not mask[j]:
            out[j] = number(NEVER)
        top = np.maximum(top, out[j])
    whole = number(0)
    for j in range(start, end):
        whole += np.exp(out[j] - top)
    top += np.log(whole)
    entropy = number(0)
    for j in range(start, end):
        out[j] -= top
        entropy -= np.exp(out[j]) * out[j]
    return entropy


@part
def _softplus(x: Any) -> tuple[float, float]:
    """Return log(1 + exp(x)) and its derivative, in float64."""
    y = np.float64(x)
    e = np.exp(-abs(y))
    return np.maximum(y, 0.0) + np.log(1 + e), (1.0 if y >= 0 else e) / (1 + e)


# Special functions are our own: those of the C library change their last bits from version to version.
# They are asymptotic series for x + 7, and recurrences from there down to x. Arguments are at least 1, so the
# first term that is left out is below 4e-15.
_STEPS = 7
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)  # B_2, B_4, ...
_LOG_GAMMA = tuple(b / (2 * i * (2 * i - 1)) for i, b in enumerate(_BERNOULLI, 1))[::-1]
_DIGAMMA = tuple(b / (2 * i) for i, b in enumerate(_BERNOULLI, 1))[::-1]
_TRIGAMMA = _BERNOULLI[::-1]


@part
def _series(coefficients: tuple[float, ...], x: float) -> float:
    total = 0.0
    for each in coefficients:
        total = total * x + each
    return total


@inner
def _log_gamma(x: float) -> tuple[float, float]:
    """Return log Gamma(x) and its derivative, the digamma function, of x >= 1 in float64.

    Source: Abramowitz and Stegun 1964, 6.1.15, 6.1.41, 6.3.5 and 6.3.18.
    """
    z, product, inverses = x, 1.0, 0.0
    for _ in range(_STEPS):
        product *= z
        inverses += 1 / z
        z += 1
    inverse, log = 1 / z, np.log(z)
    square = inverse * inverse
    value = (z - 0.5) * log - z + _HALF_LOG_2PI + inverse * _series(_LOG_GAMMA, square)
    slope = log - 0.5 * inverse - square * _series(_DIGAMMA, square)
    return value - np.log(product), slope - inverses


@inner
def _trigamma(x: float) -> float:
    """Return the derivative of the digamma function of x >= 1 in float64.

    Source: Abramowitz and Stegun 1964, 6.4.6 and 6.4.12.
    """
    z, squares = x, 0.0
    for _ in range(_STEPS):
        squares += 1 / (z * z)
        z += 1
    inverse = 1 / z
    square = inverse * inverse
    return squares + inverse + 0.5 * square + inverse * square * _series(_TRIGAMMA, square)
