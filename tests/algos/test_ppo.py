"""PPO: the loss and the rows against slow loops, time limits, and that it learns."""

import numpy as np
import pytest
import torch
from helpers.policies import not_zero
from helpers.runs import mean_return, train_here

from rank0rl.agent import Fragment, Space, Spaces
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.nets.actor_critic import normalized
from rank0rl.options import OptionError
from rank0rl.run import checkpoint

BOX = Space("box", (2,), "float32", low=-np.ones(2, "f"), high=np.ones(2, "f"))
CHOICE = Space("discrete", (), "int64", choices=(3,))
OBS = Space("box", (4,), "float32")


def agent(act=BOX, seed=0, **options):
    ppo = PPO(Spaces(OBS, act), PPOOptions(**options), np.random.default_rng(seed))
    ppo.prepare()
    return ppo


def rows(act, n=12):
    rng = np.random.default_rng(1)
    if act is CHOICE:
        actions = torch.from_numpy(rng.integers(0, 3, n))
    else:
        actions = torch.from_numpy(rng.standard_normal((n, 2), dtype=np.float32))
    draws = [torch.from_numpy(rng.standard_normal(n, dtype=np.float32)) for _ in range(3)]
    obs = torch.from_numpy(rng.standard_normal((n, 4), dtype=np.float32))
    return obs, actions, *draws


def gradient(ppo, obs, act, logp, adv, ret):
    """Return what the objective records, once its gradient is in place: a step of size 0."""
    batch = {"obs": obs, "act": act, "logp": logp, "adv": adv, "ret": ret}
    return ppo.steps.epoch(batch, len(obs), np.random.default_rng(0), 0.0)


def logp_of(ppo, obs, act):
    with torch.no_grad():
        return ppo.policy.logp(ppo.policy.distribution(obs), act)


@pytest.mark.parametrize("act", [BOX, CHOICE], ids=["box", "discrete"])
def test_the_gradient_is_that_of_a_slow_loop(act):
    """Of the loss as the paper has it, row by row, with torch's distributions and autograd."""
    ppo = agent(act, entropy_coef=0.03, value_coef=0.7, clip_ratio=0.3)
    not_zero(ppo.value)
    obs, actions, shift, adv, ret = rows(act, 40)
    logp = logp_of(ppo, obs, actions) + 0.4 * shift
    ppo.flat.zero_grad()
    terms, errors, clipped, kl, entropies = [], [], 0, 0.0, []
    for o, a, before, advantage, target in zip(obs, actions, logp, adv, ret, strict=True):
        out = ppo.policy.mlp(o[None])[0]
        if act is CHOICE:
            oracle = torch.distributions.Categorical(logits=out)
        else:
            oracle = torch.distributions.Normal(out, ppo.policy.log_std.exp())
        entropies.append(oracle.entropy().sum())
        ratio = torch.exp(oracle.log_prob(a).sum() - before)
        limited = ratio.clamp(0.7, 1.3)
        clipped += int(ratio != limited)
        kl += (ratio - 1 - ratio.log()).item()
        errors.append((ppo.value(o[None])[0] - target) ** 2)
        gain = torch.minimum(ratio * advantage, limited * advantage)
        terms.append(-gain + 0.7 * errors[-1] - 0.03 * entropies[-1])
    torch.stack(terms).mean().backward()
    expected = ppo.flat.vectors[0].grad.clone()
    log_ratio, error, entropy = gradient(ppo, *[t.numpy() for t in (obs, actions, logp, adv, ret)])
    assert 5 < clipped < 35
    torch.testing.assert_close(ppo.flat.vectors[0].grad, expected, rtol=1e-3, atol=1e-6)
    assert np.square(error).sum() == pytest.approx(sum(errors).item(), rel=1e-4)
    assert (np.expm1(log_ratio) - log_ratio).sum() == pytest.approx(kl, rel=1e-4)
    assert (abs(np.expm1(log_ratio)) > 0.3).sum() == clipped
    assert entropy == pytest.approx(torch.stack(entropies).mean().item(), rel=1e-4)


def test_what_is_recorded_of_an_update():
    """With a step size of nothing, the averages over the batch are those of the acting policy."""
    ppo = agent(lr=1e-30, minibatch_size=17)
    not_zero(ppo.value)
    batch = batch_of(ppo)
    batch["logp"] = batch["logp"] - np.where(np.arange(64) < 16, 0.5, 0).astype(np.float32)
    metrics = ppo.update(batch, np.random.default_rng(0), 0.0)
    assert metrics["clip_fraction"] == 0.25
    assert metrics["kl"] == pytest.approx((np.exp(0.5) - 1.5) / 4, rel=1e-4)
    val = ppo.value.predict(batch["obs"]) / ppo.value.scale.numpy()
    error = val - batch["ret"] / ppo.value.scale.numpy()
    assert metrics["value_loss"] == pytest.approx(np.square(error).mean(), rel=1e-3)
    assert metrics["entropy"] == pytest.approx(np.log(2 * np.pi * np.e), rel=1e-4)


def test_rows_bootstrap_where_an_episode_was_cut_and_not_where_it_terminated():
    ppo = agent(gamma=0.9, lam=0.8)
    not_zero(ppo.value)
    rng = np.random.default_rng(0)
    obs, end_obs = (rng.standard_normal((n, 4), dtype=np.float32) for n in (7, 3))
    rew = rng.standard_normal(7)
    fragment = Fragment(
        fragment_id=0,
        obs=obs,
        act=np.zeros((7, 2), np.float32),
        rew=rew,
        terminated=np.arange(7) == 2,
        truncated=np.arange(7) == 4,
        end=np.array([2, 4, 6]),
        end_obs=end_obs,
    )
    out = ppo.process(fragment)
    val = ppo.value.predict(obs)
    last = ppo.value.predict(end_obs)
    following = [val[1], val[2], 0.0, val[4], last[1], val[6], last[2]]
    adv, total = np.zeros(7), 0.0
    for t in reversed(range(7)):
        total = 0.0 if t in (2, 4, 6) else total
        total = rew[t] + 0.9 * following[t] - val[t] + 0.9 * 0.8 * total
        adv[t] = total
    np.testing.assert_allclose(out["adv"], adv, rtol=1e-5)
    np.testing.assert_allclose(out["ret"], adv + val, rtol=1e-5)
    expected = logp_of(ppo, torch.from_numpy(obs), torch.zeros(7, 2))
    np.testing.assert_allclose(out["logp"], expected, rtol=1e-5)


def batch_of(ppo, n=64):
    obs, act, shift, adv, ret = (t.numpy() for t in rows(BOX, n))
    logp = logp_of(ppo, torch.from_numpy(obs), torch.from_numpy(act)).numpy()
    return {"obs": obs, "act": act, "logp": logp, "adv": adv, "val": shift, "ret": ret}


def test_coefficients_are_those_of_their_schedules():
    update = np.random.default_rng(0)
    for lr, expected in (("linear:1e-3:0", 0.25e-3), ("linear:1e-3:5e-4", 6.25e-4), (1e-3, 1e-3)):
        ppo = agent(lr=lr)
        metrics = ppo.update(batch_of(ppo), update, 0.75)
        assert metrics["lr"] == pytest.approx(expected)
        assert not {"clip_ratio", "entropy_coef"} & {*metrics}  # they do not change


def test_an_update_uses_the_coefficients_of_now():
    """Half-way through their schedules, coefficients do what constants of that size do."""
    options = {
        "clip_ratio": ("linear:0.02:0.06", 0.04),
        "entropy_coef": ("linear:0:0.2", 0.1),
        "lr": ("linear:2e-3:0", 1e-3),
    }
    weights = []
    for which in (0, 1):
        ppo = agent(minibatch_size=16, **{name: two[which] for name, two in options.items()})
        metrics = ppo.update(batch_of(ppo), np.random.default_rng(0), 0.5)
        weights.append(ppo.flat.vectors[0].detach().numpy().tobytes())
        if which == 0:
            assert metrics["clip_ratio"] == pytest.approx(0.04)
            assert metrics["entropy_coef"] == pytest.approx(0.1)
    assert weights[0] == weights[1]


def test_an_update_ends_early_when_the_policy_has_moved_far():
    epochs = []
    for target_kl in (None, 1e-4):
        ppo = agent(lr=1e-2, target_kl=target_kl, epochs=6, minibatch_size=16)
        epochs.append(ppo.update(batch_of(ppo), np.random.default_rng(0), 0.0)["epochs"])
    assert epochs == [6, 1]


def test_large_gradients_are_scaled_down():
    moved = []
    for norm in (1e-9, 0.5):
        ppo = agent(max_grad_norm=norm, epochs=1)
        weights = ppo.policy.mlp.weights[0]
        before = weights.detach().clone()
        ppo.update(batch_of(ppo), np.random.default_rng(0), 0.0)
        moved.append((weights - before).abs().max().item())
    assert moved[0] < moved[1] / 10  # Adam's eps shows how small the gradients were


@pytest.mark.parametrize("over", ["batch", "minibatch"])
def test_advantages_are_normalized_and_statistics_come_after_the_update(over):
    results = []
    for scale, shift in ((1, 0), (100, 30)):
        ppo = agent(value_coef=0.0, normalize=over, minibatch_size=16)
        batch = batch_of(ppo)
        batch["adv"] = batch["adv"] * scale + shift
        assert ppo.norm.moments.count == 0
        ppo.update(batch, np.random.default_rng(0), 0.0)
        assert ppo.norm.moments.count == 64
        results.append(ppo.flat.vectors[0].detach().numpy().copy())
    np.testing.assert_allclose(results[0], results[1], atol=2e-4)


def test_lost_views_and_gradients_that_are_not_finite_stop_an_update():
    ppo = agent()
    ppo.policy.zero_grad()  # sets gradients to None
    with pytest.raises(RuntimeError, match="has left the flat vector"):
        ppo.update(batch_of(ppo), np.random.default_rng(0), 0.0)
    ppo = agent()
    batch = batch_of(ppo)
    batch["ret"][3] = np.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        ppo.update(batch, np.random.default_rng(0), 0.0)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_ratio_that_overflows_where_it_is_clipped_does_no_harm():
    ppo = agent()
    obs, act, _, adv, ret = (t.numpy() for t in rows(BOX, 8))
    gradient(ppo, obs, act, np.full(8, -1000, np.float32), abs(adv), ret)
    assert ppo.flat.vectors[0].grad.isfinite().all()


def test_state_and_load_give_the_same_next_update():
    a, b = agent(seed=0), agent(seed=1)
    a.update(batch_of(a), np.random.default_rng(0), 0.0)
    for (_, x), (_, y) in zip(
        sorted(a.modules().items()), sorted(b.modules().items()), strict=True
    ):
        y.load_state_dict(x.state_dict())
    b.load(checkpoint.snapshot(a.state()))
    batch = batch_of(a)
    results = [
        (p.update(batch, np.random.default_rng(3), 0.1), p.flat.vectors[0].tolist()) for p in (a, b)
    ]
    assert results[0] == results[1]


def test_it_learns_to_answer_what_it_is_shown(tmp_path):
    options = PPOOptions(lr=3e-3, hidden=(32,), minibatch_size=128, gamma=0.0)
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 8, "total_steps": 12800}
    _, run = train_here(PPO, options, tmp_path, **kwargs, steps_per_batch=640)
    assert mean_return(run) > 9.5  # of 10; chance is 2.5


@pytest.mark.slow
def test_a_time_limit_does_not_lower_the_value(tmp_path):
    """Reward 1 for ever is worth 1 / (1 - gamma) = 10; taken as terminal, 20 steps are worth 6.2 on average."""
    options = PPOOptions(lr=3e-3, hidden=(16,), minibatch_size=64, gamma=0.9, lam=0.9)
    kwargs = {"env_id": "helpers.envs:Forever-v0", "num_envs": 4, "total_steps": 20000}
    agent, _ = train_here(PPO, options, tmp_path, **kwargs, steps_per_batch=400)
    value = agent.value.predict(agent.norm.numpy(np.ones((1, 1), np.float32)))[0]
    assert value == pytest.approx(10, abs=0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_solves_cartpole(tmp_path, seed):
    kwargs = {"env_id": "CartPole", "seed": seed, "total_steps": 200_000}
    _, run = train_here(PPO, PPOOptions(), tmp_path, **kwargs)
    assert mean_return(run) >= 475


def test_an_advantage_that_is_normalized_alone_is_refused():
    one = {"minibatch_size": 1, "normalize": "minibatch"}
    with pytest.raises(OptionError, match="normalized alone"):
        PPO.check(OBS, PPOOptions(**one), None)
    PPO.check(OBS, PPOOptions(**one, recurrent="gru"), None)  # a chunk has several rows
    with pytest.raises(OptionError, match="normalized alone"):
        PPO.check(OBS, PPOOptions(**one, recurrent="gru", chunk_steps=1), None)


def test_a_rare_advantage_counts():
    adv = np.full(100_000, 10, np.float32)
    adv[7] = 10.005
    assert normalized(adv)[7] > 100


@pytest.mark.parametrize("normalize", ["batch", "minibatch"])
@pytest.mark.parametrize("adv", [0.7, -3.3, 1000.1])
def test_equal_advantages_change_no_policy(adv, normalize):
    ppo = agent(normalize=normalize, minibatch_size=64)
    batch = batch_of(ppo)
    batch["adv"][:] = adv
    before = [p.clone() for p in ppo.policy.parameters()]
    ppo.update(batch, np.random.default_rng(0), 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, ppo.policy.parameters(), strict=True))
