"""Numbers by hand, slow plain loops, and identities."""

import numpy as np
import pytest

from rank0rl.agent import Fragment
from rank0rl.returns import advantages, discounted_sum, explained_variance, gae

RNG = np.random.default_rng(0)
REW, VAL = RNG.normal(size=7), RNG.normal(size=8)


def test_discounted_sum_by_hand():
    assert discounted_sum(np.array([1.0, 2.0, 4.0]), 0.5, last=8.0).tolist() == [4.0, 6.0, 8.0]


def test_gae_is_the_weighted_sum_of_errors():
    gamma, lam = 0.9, 0.8
    delta = REW + gamma * VAL[1:] - VAL[:-1]
    slow = [sum((gamma * lam) ** k * delta[t + k] for k in range(7 - t)) for t in range(7)]
    np.testing.assert_allclose(gae(REW, VAL, gamma, lam), slow, rtol=1e-12)


def test_gae_with_lambda_0_is_the_error_and_with_1_the_return_minus_the_value():
    np.testing.assert_allclose(gae(REW, VAL, 0.9, 0.0), REW + 0.9 * VAL[1:] - VAL[:-1])
    returns = discounted_sum(REW, 0.9, last=VAL[-1])
    np.testing.assert_allclose(gae(REW, VAL, 0.9, 1.0), returns - VAL[:-1])


def test_gae_needs_one_value_more_than_rewards():
    with pytest.raises(ValueError, match="one value more"):
        gae(REW, VAL[:-1], 0.9, 0.9)


@pytest.mark.parametrize(
    "ends",
    [
        {8: "cut"},
        {8: "terminated"},
        {2: "terminated", 5: "truncated", 8: "cut"},
        {0: "truncated", 1: "terminated", 7: "truncated", 8: "terminated"},
    ],
    ids=lambda ends: "-".join(ends.values()),
)
def test_advantages_of_a_fragment_of_several_episodes_are_those_of_a_slow_loop(ends):
    """The value after an episode counts unless it terminated; nothing crosses into the next one."""
    rng, gamma, lam = np.random.default_rng(2), 0.9, 0.7
    rew, val = rng.normal(size=9), rng.normal(size=9).astype(np.float32)
    terminated = np.isin(np.arange(9), [t for t, how in ends.items() if how == "terminated"])
    truncated = np.isin(np.arange(9), [t for t, how in ends.items() if how == "truncated"])
    end = np.array(list(ends))
    fragment = Fragment(0, np.zeros((9, 1)), np.zeros(9), rew, terminated, truncated, end, None)
    after = rng.normal(size=len(end)).astype(np.float32)
    adv = advantages(fragment, val, after, gamma, lam)
    after[terminated[end]] = 0.0

    slow, start = [], 0
    for last, last_val in zip(end, after, strict=True):
        for t in range(start, last + 1):
            total, weight = 0.0, 1.0
            for k in range(t, last + 1):
                following = last_val if k == last else val[k + 1]
                total += weight * (rew[k] + gamma * float(following) - float(val[k]))
                weight *= gamma * lam
            slow.append(total)
        start = last + 1
    assert adv.dtype == np.float64
    np.testing.assert_allclose(adv, slow, rtol=1e-12)


def test_advantages_need_a_value_for_the_end_of_each_episode():
    no = np.zeros(len(REW), bool)
    end = np.array([2, len(REW) - 1])
    fragment = Fragment(0, no, no, REW, no, no, end, None)
    with pytest.raises(ValueError, match="one value for each episode: got 1 for 2"):
        advantages(fragment, VAL[:-1], VAL[:1], 0.9, 0.9)


def test_explained_variance():
    target = RNG.normal(size=100)
    assert explained_variance(target, target) == 1.0
    assert explained_variance(np.zeros(100), target) == pytest.approx(0.0)
    assert explained_variance(target + RNG.normal(size=100), target) < 0.5
    assert np.isnan(explained_variance(target, np.ones(100)))
    same = np.float32(500.1) + np.float32(3e-5) * (np.arange(100) % 2).astype(np.float32)
    assert np.isnan(explained_variance(target, same))
