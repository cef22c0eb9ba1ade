"""Kernels of policies' distributions: log ratios and entropies of a network's outputs, and the way back.

On the way back, derivatives of a loss by log ratios and by the mean entropy become derivatives by the
outputs. The loss itself is not known here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rank0rl.agent import NEVER
from rank0rl.nets.kernels.compiler import inner, part

Array = npt.NDArray[Any]


def tables_of(policy: Any, theta: Tensor) -> tuple[Array | None, Array | None]:
    """Return what a policy's `tables` does, and None for both unless kernels know the distribution."""
    std_place, starts = policy.tables(theta) if hasattr(policy, "tables") else (None, None)
    outputs = None if std_place is None and starts is None else policy.mlp.table(theta)[-1, 3]
    if std_place is not None and outputs == std_place[2] == policy.noise[1]:
        return std_place, None
    if starts is not None and outputs == starts[-1]:
        return None, starts
    return None, None


@inner
def normal_log_ratio(
    log_std: Array, out: Array, act: Array, logp: Array, log_ratio: Array, inverse: Array
) -> Any:
    """Write the log of the ratio of new to old probability of normal actions into log_ratio, (m,).

    `out` are means, (m, k). `log_std` are the parameters whose sums over rows are the log standard
    deviations, (rows, k). The actions are `act`, (m, k), with log-probabilities `logp` under the acting
    policy, (m,). `inverse`, (k,), gets 1 / standard deviations.

    Returns:
        The sum of the rows' entropies.
    """
    number = out.dtype.type
    m, k = out.shape
    const = number(0.5 * math.log(2 * math.pi) * k)
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
            z = (act[row, j] - out[row, j]) * inverse[j]
            squares += z * z
        log_ratio[row] = -half * squares - const - logp[row]
    return m * (const + half * k)


@inner
def normal_slopes(
    out: Array,
    act: Array,
    slopes: Array,
    by_entropy: float,
    inverse: Array,
    by_log_std: Array,
) -> None:
    """Replace means by the derivatives of a loss by them; write those by the log standard deviations.

    `slopes` are the derivatives by the log ratios, (m,), and `by_entropy` is that by the mean entropy,
    times the share of these rows in the minibatch. `inverse` is what `normal_log_ratio` left there.
    """
    number = out.dtype.type
    m, k = out.shape
    one, by_total = number(1), by_log_std[0]
    for j in range(k):
        by_total[j] = number(by_entropy)
    for row in range(m):
        for j in range(k):
            z = (act[row, j] - out[row, j]) * inverse[j]
            out[row, j] = slopes[row] * z * inverse[j]
            by_total[j] += slopes[row] * (z * z - one)
    for row in range(1, len(by_log_std)):
        for j in range(k):
            by_log_std[row, j] = by_total[j]


@inner
def choice_log_ratio(
    starts: Array,
    mask: Array,
    out: Array,
    act: Array,
    logp: Array,
    log_ratio: Array,
    entropies: Array,
) -> Any:
    """Write the log of the ratio of new to old probability of choices into log_ratio, (m,).

    `starts` has the columns at which each choice begins, and their number, int64. `mask` has the choices
    that could be taken, (m, all choices), bool; it is (m, 0) if all could be. `out` are logits, (m, all
    choices), and become log-probabilities. `act` are choices, (m, choices at once), int64. `entropies`,
    (m * choices at once), gets that of each.

    Returns:
        The sum of the rows' entropies.
    """
    number = out.dtype.type
    choices, total = len(starts) - 1, number(0)
    for row in range(len(out)):
        log_ratio[row] = -logp[row]
        for i in range(choices):
            entropy = log_softmax(out[row], mask[row], starts[i], starts[i + 1])
            entropies[row * choices + i] = entropy
            total += entropy
            log_ratio[row] += out[row, starts[i] + act[row, i]]
    return total


@inner
def choice_slopes(
    starts: Array,
    out: Array,
    act: Array,
    slopes: Array,
    by_entropy: float,
    entropies: Array,
) -> None:
    """Replace log-probabilities of choices by the derivatives of a loss by the logits.

    `slopes` are the derivatives by the log ratios, (m,), and `by_entropy` is that by the mean entropy,
    divided by the number of rows in the minibatch. `entropies` is what `choice_log_ratio` left there.
    """
    bonus, choices = out.dtype.type(-by_entropy), len(starts) - 1
    for row in range(len(out)):
        for i in range(choices):
            entropy = entropies[row * choices + i]
            for j in range(starts[i], starts[i + 1]):
                share = np.exp(out[row, j])
                by = bonus * share * (out[row, j] + entropy) - slopes[row] * share
                if j == starts[i] + act[row, i]:
                    by += slopes[row]
                out[row, j] = by


@part
def log_softmax(out: Array, mask: Array, start: int, end: int) -> Any:
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
