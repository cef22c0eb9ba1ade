"""Policies against torch's distributions, and against samples of their own."""

import numpy as np
import pytest
import torch
from helpers.policies import (
    BOUNDED,
    CHOICE,
    KINDS,
    OBS,
    SEVERAL,
    box,
    compare_with_samples,
    drawn_by,
    mask_for,
    noise_for,
    policy_of,
    rng,
)
from torch.distributions import (
    Beta,
    Categorical,
    Independent,
    Normal,
    TransformedDistribution,
    transforms,
)

from rank0rl.agent import Space, choose
from rank0rl.nets.actor_critic import NetworkOptions
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.policies import GaussianPolicy, make_policy

X = torch.from_numpy(OBS)


def oracles(policy, kind, mask=None):
    """Return torch's distributions, one for each of the choices at once."""
    out = policy.mlp(X)
    if kind == "beta":
        a, b = (1 + torch.nn.functional.softplus(out)).chunk(2, dim=1)
        return [Independent(Beta(a, b), 1)]
    if "state" in kind:
        mean, more = out.chunk(2, dim=1)
        log_std = policy.log_std.reshape(-1, 3).sum(dim=0) + more
        return [Independent(Normal(mean, torch.exp(log_std.clamp(-5, 2))), 1)]
    if kind in ("gaussian", "rows", "squashed"):
        std = torch.exp(policy.log_std.sum(0) if kind == "rows" else policy.log_std)
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
    act = drawn_by(policy, OBS, noise, mask)
    for size in (1, 2, 3, 5, 8, 16, 17, 32):
        for start in range(0, 33 - size, 5):
            rows = slice(start, start + size)
            some = drawn_by(policy, OBS[rows], noise[rows], None if mask is None else mask[rows])
            assert some.tobytes() == act[rows].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_and_entropy_are_those_of_torch_distributions(kind):
    policy = policy_of(kind)
    act = drawn_by(policy, OBS, noise_for(policy, 33))
    expected = oracle_logp(policy, kind, torch.from_numpy(act))
    now = policy.distribution(X)
    torch.testing.assert_close(policy.logp(now, torch.from_numpy(act)), expected)
    if "squashed" not in kind:  # which torch does not know
        entropy = sum(d.entropy().mean() for d in oracles(policy, kind))
        scaled = 3 * np.log(2) if kind == "beta" else 0  # to -1..1
        torch.testing.assert_close(policy.entropy(now), entropy + scaled)
    logp = policy.log_prob(OBS, act)
    np.testing.assert_allclose(logp, expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gaussian", "rows"])
def test_a_normal_action_is_mean_and_noise(kind):
    policy = policy_of(kind)
    noise = noise_for(policy, 33)
    act = drawn_by(policy, OBS, noise)
    expected = policy.mlp(X).detach().numpy() + np.exp(np.float32(-0.3)) * noise
    np.testing.assert_allclose(act, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["categorical", "several"])
def test_choices_come_as_often_as_they_should(kind):
    policy, n = policy_of(kind), 20_000
    drawn = drawn_by(policy, np.repeat(OBS[:1], n, axis=0), noise_for(policy, n)).reshape(n, -1)
    for column, oracle in zip(drawn.T, oracles(policy, kind), strict=True):
        probs = oracle.probs[0].detach().numpy()
        errors = np.sqrt(probs * (1 - probs) / n)
        seen = np.bincount(column, minlength=len(probs)) / n
        assert (np.abs(seen - probs) < 4 * errors + 1e-9).all()


def log_slope(kind, draw):
    """Return the log of the volume of actions in -1..1 by that of draws, (N,)."""
    if "squashed" in kind:
        return torch.log(1 - torch.tanh(draw.double()) ** 2).sum(1)
    return 3 * np.log(2) if kind == "beta" else 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_and_divergence_against_samples(kind):
    """E[-log p] and E[log p - log q] over actions of p, within three standard errors."""
    compare_with_samples(policy_of(kind), policy_of(kind, seed=5), lambda act: log_slope(kind, act))


@pytest.mark.parametrize("kind", ["categorical", "several"])
def test_what_may_not_be_taken_is_never_taken_and_counts_for_nothing(kind):
    policy, n = policy_of(kind), 33
    mask = mask_for(policy, n)
    starts = np.array([columns.start for columns in policy.space.choice_slices()])
    for seed in range(20):
        act = drawn_by(policy, OBS, noise_for(policy, n, seed), mask)
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
        flat = Flat(policy)
        before = policy.distribution(X)[1].detach().clone()
        policy.entropy(policy.distribution(X)).backward()
        Adam(flat).step(0.01)
        moved.append((policy.distribution(X)[1] - before).detach())
    torch.testing.assert_close(moved[1], 4 * moved[0])


def test_make_policy_fits_the_space():
    normal = make_policy((5,), Space("box", (2, 3), "float32"), (8,), rng())
    assert normal.act(OBS, noise_for(normal, 33))[0].shape == (33, 2, 3)
    for space, shape in ((CHOICE, (33,)), (SEVERAL, (33, 3))):
        choice = make_policy((5,), space, (8,), rng())
        act, extras = choice.act(OBS, noise_for(choice, 33))
        assert not extras
        assert act.shape == shape
        assert act.dtype == np.int64


@pytest.mark.parametrize("kind", ["squashed", "squashed state"])
def test_squashed_actions_have_the_densities_of_torch(kind):
    policy = policy_of(kind)
    act, extras = policy.act(OBS, noise_for(policy, 33))
    low, width = (torch.from_numpy(x) for x in (BOUNDED.low, BOUNDED.high - BOUNDED.low))
    to_bounds = [transforms.TanhTransform(), transforms.AffineTransform(low + width / 2, width / 2)]
    oracle = TransformedDistribution(oracles(policy, kind)[0].base_dist, to_bounds)
    draw = torch.from_numpy(extras["draw"]).double()
    slope = torch.log((1 - torch.tanh(draw) ** 2) * width / 2).sum(1)
    logp = policy.logp(policy.distribution(X), torch.from_numpy(extras["draw"])) - slope
    inside = (abs(extras["draw"]) < 3).all(axis=1)  # the inverse of tanh is not exact beyond
    assert inside.sum() > 20
    expected = oracle.log_prob(torch.from_numpy(act)).sum(1)
    torch.testing.assert_close(logp[inside].float(), expected[inside], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["squashed", "squashed state", "beta"])
def test_bounded_actions_lie_within_the_bounds_and_have_their_shape(kind):
    policy = policy_of(kind)
    act, extras = policy.act(np.repeat(OBS, 300, axis=0), 3 * noise_for(policy, 9900))
    assert (BOUNDED.low <= act).all()
    assert (act <= BOUNDED.high).all()
    assert act.dtype == extras["draw"].dtype == np.float32
    assert np.ptp(act, axis=0) == pytest.approx(BOUNDED.high - BOUNDED.low, rel=0.1)
    assert np.isfinite(policy.log_prob(np.repeat(OBS, 300, axis=0), extras["draw"])).all()


@pytest.mark.parametrize("kind", ["gaussian", "squashed", "state", "squashed state", "beta"])
def test_without_noise_actions_are_the_mode(kind):
    policy = policy_of(kind)
    act, _ = policy.act(OBS, np.zeros((33, 3), np.float32))
    mode = policy.mode(X).detach().numpy()
    np.testing.assert_allclose(act, mode, atol=0.04 if kind == "beta" else 1e-5)


def test_draws_of_beta_are_distributed_as_beta():
    policy, n = policy_of("beta"), 20_000
    drawn = drawn_by(policy, np.repeat(OBS[:1], n, axis=0), noise_for(policy, n))
    [oracle] = oracles(policy, "beta")
    mean, std = oracle.mean[0].detach().numpy(), oracle.stddev[0].detach().numpy()
    assert (abs(drawn.mean(axis=0) - mean) < 4 * std / n**0.5).all()
    assert drawn.std(axis=0) == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize("actions", ["squashed", "beta"])
@pytest.mark.parametrize("high", [None, np.float32([1, np.inf, 1])])
def test_actions_without_finite_bounds_are_refused(actions, high):
    space = Space("box", (3,), "float32", low=-np.ones(3, "f"), high=high)
    with pytest.raises(
        ValueError, match=f"actions '{actions}' need finite bounds: .* set --actions"
    ):
        make_policy((5,), space, (8,), rng(), actions=actions)


def test_what_no_distribution_has_is_refused():
    with pytest.raises(ValueError, match="choices, .* got --actions beta; leave it out"):
        make_policy((5,), CHOICE, (8,), rng(), actions="beta")
    with pytest.raises(ValueError, match="choices, .* --state-std"):
        make_policy((5,), CHOICE, (8,), rng(), state_std=True)
    with pytest.raises(ValueError, match="leave out --state-std"):
        make_policy((5,), BOUNDED, (8,), rng(), actions="beta", state_std=True)
    with pytest.raises(ValueError, match="log_std must be between -5 and 2 with --state-std"):
        NetworkOptions(log_std=-6, state_std=True)


@pytest.mark.parametrize("size", [5, 500, 5000])
def test_a_narrow_beta_is_exact_in_float32(size):
    """Its log-density is a difference of terms as large as the parameters."""
    policy = policy_of("beta")
    with torch.no_grad():
        policy.mlp.biases[-1].add_(size)
        draw = torch.from_numpy(drawn_by(policy, OBS, noise_for(policy, 33)))
        of = policy.distribution(X)
        exact = tuple(x.double() for x in of)
        wanted = Beta(*exact).log_prob(draw.double()).sum(dim=1)
        torch.testing.assert_close(policy.logp(of, draw).double(), wanted, rtol=1e-6, atol=1e-6)
        entropy = Beta(*exact).entropy().sum(dim=1).mean() + 3 * np.log(2)
        torch.testing.assert_close(policy.entropy(of).double(), entropy, rtol=1e-6, atol=1e-6)


def test_no_noise_takes_beta_to_its_edge():
    """Where float32 has no number between the distribution function and 1."""
    policy = policy_of("beta")
    with torch.no_grad():
        policy.mlp.weights[-1].mul_(0)
        policy.mlp.biases[-1].fill_(100)
    for noise in (5.3, 5.6, 8):
        low, high = (
            drawn_by(policy, OBS[:1], np.full((1, 3), sign * noise, "f")) for sign in (-1, 1)
        )
        np.testing.assert_allclose(low, 1 - high, atol=1e-6)
        assert (high < 0.9).all()


def test_bounds_whose_range_overflows_are_refused():
    space = Space("box", (1,), "float32", low=np.float32([-3e38]), high=np.float32([3e38]))
    with pytest.raises(ValueError, match="need finite bounds"):
        make_policy((5,), space, (8,), rng(), actions="squashed")
