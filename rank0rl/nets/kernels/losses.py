"""Kernels of losses: the derivatives of the PPO objective and of the value loss by a network's outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.agent import NEVER
from rank0rl.nets.kernels.compiler import inner, part

Array = npt.NDArray[Any]


@part
def _clipped_slopes(log_ratio: Array, adv: Array, clip_ratio: float, n: int, slopes: Array) -> None:
    """Write the derivatives of -E[min(r A, clip(r) A)] by log r into slopes, (m,).

    Where the clipped term is the smaller one, it is 0; elsewhere it is that of -E[r A].

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    number = log_ratio.dtype.type
    one, weight = number(1), number(1 / n)
    for row in range(len(adv)):
        ratio = np.exp(log_ratio[row])
        clipped = (ratio - one) * np.sign(adv[row]) > clip_ratio  # nan is not
        slopes[row] = 0 if clipped else -weight * ratio * adv[row]


@inner
def normal_slopes(
    log_std: Array,
    out: Array,
    act: Array,
    logp: Array,
    adv: Array,
    clip_ratio: float,
    entropy_coef: float,
    n: int,
    log_ratio: Array,
    by_log_std: Array,
    spare: Array,
) -> Any:
    """Turn means into derivatives of the policy's loss by them, for independent normal actions.

    `out` are means, (m, k), and written over. `log_std` are the parameters whose sums over rows are the
    log standard deviations, (rows, k); `by_log_std` gets the derivatives by them. The actions are `act`,
    (m, k), with log-probabilities `logp` under the acting policy and advantages `adv`, (m,). These m rows
    are a part of a minibatch of n. `log_ratio`, (m,), gets the log of the ratio of new to old
    probability. There is room in `spare` for m + k numbers.

    Returns:
        The sum of the rows' entropies.
    """
    number = out.dtype.type
    m, k = out.shape
    slopes, inverse = spare[:m], spare[m : m + k]
    const = number(0.5 * math.log(2 * math.pi) * k)
    for j in range(k):
        total = number(0)
        for row in range(len(log_std)):
            total += log_std[row, j]
        inverse[j] = np.exp(-total)
        const += total
    half, one = number(0.5), number(1)
    for row in range(m):
        squares = number(0)
        for j in range(k):
            z = (act[row, j] - out[row, j]) * inverse[j]
            squares += z * z
        log_ratio[row] = -half * squares - const - logp[row]
    _clipped_slopes(log_ratio, adv, clip_ratio, n, slopes)
    by_total = by_log_std[0]
    for j in range(k):
        by_total[j] = number(-entropy_coef * m / n)
    for row in range(m):
        for j in range(k):
            z = (act[row, j] - out[row, j]) * inverse[j]
            out[row, j] = slopes[row] * z * inverse[j]
            by_total[j] += slopes[row] * (z * z - one)
    for row in range(1, len(log_std)):
        for j in range(k):
            by_log_std[row, j] = by_total[j]
    return m * (const + half * k)


@inner
def choice_slopes(
    starts: Array,
    mask: Array,
    out: Array,
    act: Array,
    logp: Array,
    adv: Array,
    clip_ratio: float,
    entropy_coef: float,
    n: int,
    log_ratio: Array,
    spare: Array,
) -> Any:
    """Turn logits into derivatives of the policy's loss by them, for one choice or several at once.

    `starts` has the columns at which each choice begins, and their number, int64. `mask` has the choices
    that could be taken, (m, all choices), bool; it is (m, 0) if all could be. `out` are logits, (m, all
    choices), `act` choices, (m, choices at once), int64. There is room in `spare` for m numbers, and one
    for each choice of each row. The other arguments are those of `normal_slopes`.

    Returns:
        The sum of the rows' entropies.
    """
    number = out.dtype.type
    m, choices = len(out), len(starts) - 1
    slopes, entropies = spare[:m], spare[m : m + m * choices]
    bonus, total = number(entropy_coef / n), number(0)
    for row in range(m):
        log_ratio[row] = -logp[row]
        for i in range(choices):
            entropy = log_softmax(out[row], mask[row], starts[i], starts[i + 1])
            entropies[row * choices + i] = entropy
            total += entropy
            log_ratio[row] += out[row, starts[i] + act[row, i]]
    _clipped_slopes(log_ratio, adv, clip_ratio, n, slopes)
    for row in range(m):
        for i in range(choices):
            entropy = entropies[row * choices + i]
            for j in range(starts[i], starts[i + 1]):
                share = np.exp(out[row, j])
                by = bonus * share * (out[row, j] + entropy) - slopes[row] * share
                if j == starts[i] + act[row, i]:
                    by += slopes[row]
                out[row, j] = by
    return total


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


@part
def value_slopes(out: Array, ret: Array, coef: float, n: int, error: Array) -> None:
    """Turn values (m, 1) into the derivatives of coef E[(V - R)^2] by them; error, (m,), gets V - R."""
    factor = out.dtype.type(2 * coef / n)
    for row in range(len(out)):
        error[row] = out[row, 0] - ret[row]
        out[row, 0] = factor * error[row]
