"""Discounted sums, generalized advantage estimates and explained variance: pure functions of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.agent import Fragment

Array = npt.NDArray[Any]


def discounted_sum(rew: Array, gamma: float, last: float = 0.0) -> Array:
    """Return the discounted sums, R_t = r_t + gamma R_{t+1}, with R_T = last.

    Args:
        rew: rewards r_0 .. r_{T-1}, shape (T,).
        gamma: discount in [0, 1].
        last: value of the state after the last step; 0 if it is terminal.

    Returns:
        R_0 .. R_{T-1}, shape (T,), float64.

    Source: Sutton and Barto 2018, eq. 3.9.
    """
    out, total = [], float(last)
    for r in reversed(rew.tolist()):
        total = r + gamma * total
        out.append(total)
    return np.array(out[::-1], np.float64)


def gae(rew: Array, val: Array, gamma: float, lam: float) -> Array:
    """Return generalized advantage estimates, A_t = delta_t + gamma lam A_{t+1}, with delta_t = r_t + gamma V_{t+1} - V_t.

    Args:
        rew: rewards r_0 .. r_{T-1}, shape (T,).
        val: values V(s_0) .. V(s_T), shape (T+1,). val[T] is 0 if s_T is terminal, V(s_T) if the
            episode was cut off.
        gamma: discount in [0, 1].
        lam: GAE mixing in [0, 1].

    Returns:
        Advantages at times 0 .. T-1, shape (T,), float64.

    Raises:
        ValueError: if val does not have exactly one more row than rew.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    if val.shape != (len(rew) + 1,):
        raise ValueError(
            f"val must have one value more than rew: got {val.shape} and {rew.shape}; append 0 if "
            f"the last state is terminal, its value otherwise"
        )
    val = val.astype(np.float64)
    return discounted_sum(rew + gamma * val[1:] - val[:-1], gamma * lam)


def advantages(fragment: Fragment, val: Array, end_val: Array, gamma: float, lam: float) -> Array:
    """Return `gae` of each episode of a fragment, shape (T,), float64. Nothing follows a terminal state.

    Args:
        fragment: T steps of E episodes.
        val: values of its `obs`, shape (T,).
        end_val: values of its `end_obs`, shape (E,). They stand for the rewards that would have
            followed where an episode was cut off.
        gamma: discount in [0, 1].
        lam: GAE mixing in [0, 1].

    Raises:
        ValueError: if an episode has no end value, or more than one.
    """
    last = np.array(end_val).reshape(-1)
    if len(last) != len(fragment.end):
        raise ValueError(
            f"end_val must have one value for each episode: got {len(last)} for {len(fragment.end)}"
        )
    last[fragment.terminated[fragment.end]] = 0
    of_rew, of_val = (np.split(x, fragment.end[:-1] + 1) for x in (fragment.rew, val))
    episodes = zip(of_rew, of_val, last, strict=True)
    return np.concatenate([gae(r, np.append(v, end), gamma, lam) for r, v, end in episodes])


def explained_variance(pred: Array, target: Array) -> float:
    """Return 1 - Var[target - pred] / Var[target], for arrays (N,); nan where the target does not vary.

    1 is perfect, 0 no better than a constant.
    """
    variance = float(np.var(target, dtype=np.float64))
    if variance <= 1e-12 * float(np.mean(target, dtype=np.float64)) ** 2:  # but for rounding
        return np.nan
    return 1.0 - float(np.var(target - pred, dtype=np.float64)) / variance
