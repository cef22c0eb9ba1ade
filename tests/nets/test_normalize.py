"""Running moments, and observations scaled by them."""

import numpy as np
import torch
from helpers.policies import rng

from rank0rl.nets.normalize import Moments, ObsNormalizer


def test_moments_of_several_batches_are_those_of_all_rows():
    rows = rng().normal(100, 3, (60, 4))
    moments = Moments((4,))
    for batch in np.split(rows, [1, 7, 30]):
        moments.merge(batch)
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, rows.var(axis=0), rtol=1e-12)


def test_the_normalizer_begins_as_the_identity_and_then_scales():
    norm = ObsNormalizer((2, 2))
    obs = rng().normal(5, 2, (50, 2, 2)).astype(np.float32)
    np.testing.assert_array_equal(norm.numpy(obs), obs.reshape(50, 4))
    norm.merge(obs)
    scaled = norm.numpy(obs)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(axis=0), 1, atol=1e-5)
    np.testing.assert_allclose(norm(torch.from_numpy(obs)), scaled, atol=1e-6)
    assert norm.numpy(obs + 1000).max() == 10
