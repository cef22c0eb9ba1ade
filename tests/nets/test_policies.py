"""Policies against torch's distributions, and against samples of their own."""

import numpy as np
import pytest
import torch
from some_policies import (
    CHOICE,
    KINDS,
    OBS,
    SEVERAL,
    box,
    mask_for,
    noise_for,
    policy_of,
    rng,
)
from torch.distributions import Categorical, Independent, Normal

from rank0rl.agent import Space, choose
from rank0rl.nets.flat import Adam, flatten_
from rank0rl.nets.policies import GaussianPolicy, make_policy

X = torch.from_numpy(OBS)


def oracles(policy, kind, mask=None):
    """Return torch's distributions, one for each of the choices at once."""
    out = policy.mlp(X)
    if kind in ("gaussian", "rows"):
        std = torch.exp(policy.log_std if kind == "gaussian" else policy.log_std.sum(0))
        return [Independent(Normal(out, std), 1)]
    if mask is not None:
        out = out.masked_fill(~torch.from_numpy(mask), -torch.inf)
    return [Categorical(logits=out[:, columns]) for columns in policy.space.choice_slices()]


def oracle_logp(policy, kind, act, mask=None):
    all_of = oracles(policy, kind, mask)
    if kind == "several":
        return sum(d.log_prob(a) for d, a in zip(all_of, act.T, strict=True))
    return all_of[0].log_prob(act)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_acting_does_not_depend_on_how_many_rows_there_are(kind, masked):
    policy = policy_of(kind)
    noise = noise_for(policy, 33)
    mask = mask_for(policy, 33) if masked and kind in ("categorical", "several") else None
    act = policy.act(OBS, noise, mask)
    for size in (1, 2, 3, 5, 8, 16, 17, 32):
        for start in range(0, 33 - size, 5):
            rows = slice(start, start + size)
            some = policy.act(OBS[rows], noise[rows], None if mask is None else mask[rows])
            assert some.tobytes() == act[rows].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_and_entropy_are_those_of_torch_distributions(kind):
    policy = policy_of(kind)
    act = policy.act(OBS, noise_for(policy, 33))
    expected = oracle_logp(policy, kind, torch.from_numpy(act))
    entropy = sum(d.entropy().mean() for d in oracles(policy, kind))
    now = policy.distribution(X)
    torch.testing.assert_close(policy.logp(now, torch.from_numpy(act)), expected)
    torch.testing.assert_close(policy.entropy(now), entropy)
    logp = policy.log_prob(OBS, act)
    np.testing.assert_allclose(logp, expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gaussian", "rows"])
def test_a_normal_action_is_mean_and_noise(kind):
    policy = policy_of(kind)
    noise = noise_for(policy, 33)
    act = policy.act(OBS, noise)
    expected = policy.mlp(X).detach().numpy() + np.exp(np.float32(-0.3)) * noise
    np.testing.assert_allclose(act, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["categorical", "several"])
def test_choices_come_as_often_as_they_should(kind):
    policy, n = policy_of(kind), 20_000
    drawn = policy.act(np.repeat(OBS[:1], n, axis=0), noise_for(policy, n)).reshape(n, -1)
    for column, oracle in zip(drawn.T, oracles(policy, kind), strict=True):
        probs = oracle.probs[0].detach().numpy()
        errors = np.sqrt(probs * (1 - probs) / n)
        seen = np.bincount(column, minlength=len(probs)) / n
        assert (np.abs(seen - probs) < 4 * errors + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_and_divergence_against_samples(kind):
    """E[-log p] and E[log p - log q] over actions of p, within three standard errors."""
    p, q, n = policy_of(kind), policy_of(kind, seed=5), 40_000
    one = np.repeat(OBS[:1], n, axis=0)
    x, act = torch.from_numpy(one), torch.from_numpy(p.act(one, noise_for(p, n)))
    with torch.no_grad():
        of_p, of_q = p.distribution(x), q.distribution(x)
        surprise = -p.logp(of_p, act)
        apart = p.logp(of_p, act) - q.logp(of_q, act)
        kl = p.kl(of_p, of_q)
        for samples, exact in ((surprise, p.entropy(of_p)), (apart, kl.mean())):
            error = samples.double().std() / n**0.5
            assert abs(samples.double().mean() - exact) < 3 * error + 1e-5
        assert kl.min() > 0.01
        torch.testing.assert_close(p.kl(of_p, of_p), torch.zeros(n), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["categorical", "several"])
def test_what_may_not_be_taken_is_never_taken_and_counts_for_nothing(kind):
    policy, n = policy_of(kind), 33
    mask = mask_for(policy, n)
    starts = np.array([columns.start for columns in policy.space.choice_slices()])
    for seed in range(20):
        act = policy.act(OBS, noise_for(policy, n, seed), mask)
        assert mask[np.arange(n)[:, None], act.reshape(n, -1) + starts].all()
    expected = oracle_logp(policy, kind, torch.from_numpy(act), mask)
    now = policy.distribution(X, torch.from_numpy(mask))
    torch.testing.assert_close(policy.logp(now, torch.from_numpy(act)), expected)
    np.testing.assert_allclose(policy.log_prob(OBS, act, mask), expected.detach(), rtol=1e-4)
    expected = sum(d.entropy().mean() for d in oracles(policy, kind, mask))
    torch.testing.assert_close(policy.entropy(now), expected)
    assert torch.isfinite(policy.kl(now, policy.distribution(X, torch.from_numpy(mask)))).all()


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])
def test_the_ends_of_the_noise_lead_to_choices_that_may_be_taken(noise):
    logits = np.array([[5, 1, 1.5, 5, 5]], np.float32)
    mask = np.array([[False, True, True, False, False]])
    act = choose(logits, np.full((1, 1), noise, np.float32), Space("discrete", (), "", (5,)), mask)
    assert act.tolist() == [1 if noise == 0 else 2]


def test_rows_move_as_many_times_as_fast():
    moved = []
    for rows in (1, 4):
        policy = GaussianPolicy((5,), box(3), (8,), rng(), log_std=-0.5, rows=rows)
        flat = flatten_(policy)
        before = policy.distribution(X)[1].detach().clone()
        policy.entropy(policy.distribution(X)).backward()
        Adam(flat).step(0.01)
        moved.append((policy.distribution(X)[1] - before).detach())
    torch.testing.assert_close(moved[1], 4 * moved[0])


def test_make_policy_fits_the_space():
    normal = make_policy((5,), Space("box", (2, 3), "float32"), (8,), rng())
    assert normal.act(OBS, noise_for(normal, 33)).shape == (33, 2, 3)
    for space, shape in ((CHOICE, (33,)), (SEVERAL, (33, 3))):
        choice = make_policy((5,), space, (8,), rng())
        act = choice.act(OBS, noise_for(choice, 33))
        assert act.shape == shape
        assert act.dtype == np.int64
