"""Numbers by hand, slow plain loops, and identities."""

import numpy as np
import pytest

from rank0rl.returns import discounted_sum, explained_variance, gae

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


def test_explained_variance():
    target = RNG.normal(size=100)
    assert explained_variance(target, target) == 1.0
    assert explained_variance(np.zeros(100), target) == pytest.approx(0.0)
    assert explained_variance(target + RNG.normal(size=100), target) < 0.5
    assert np.isnan(explained_variance(target, np.ones(100)))
