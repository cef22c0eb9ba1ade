"""PPO with a KL penalty: its loss by hand, its servo, its memory of a batch, and that it learns."""

import numpy as np
import pytest
import torch
from helpers.runs import mean_return, train_here
from torch import nn

from rank0rl.agent import Fragment, Space, Spaces, Step
from rank0rl.algos.klppo import KLPPO, KLPPOOptions
from rank0rl.run import checkpoint

BOX = Space("box", (2,), "float32", low=-np.ones(2), high=np.ones(2))
CHOICE = Space("discrete", (), "int64", choices=(3,))


def agent(act=BOX, obs=4, **options):
    spaces = Spaces(Space("box", (obs,), "float32"), act)
    klppo = KLPPO(spaces, KLPPOOptions(**options), np.random.default_rng(0))
    klppo.prepare()
    return klppo


def rows(klppo, n=100, seed=1):
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((n, 4), dtype=np.float32)
    kind, k = klppo.noise
    noise = rng.standard_normal((n, k)) if kind == "normal" else rng.random((n, k))
    act, _ = klppo.act(Step(obs, noise.astype(np.float32), np.arange(n)))
    logp = klppo.policy.log_prob(obs, act)
    draws = {name: rng.standard_normal(n, dtype=np.float32) for name in ("adv", "val", "ret")}
    return {"obs": obs, "act": act, "logp": logp, **draws}


def test_sizes_and_step_sizes_follow_from_the_dimensions():
    spaces = Spaces(Space("box", (17,), "float32"), Space("box", (6,), "float32"))
    klppo = KLPPO(spaces, KLPPOOptions(), np.random.default_rng(0))
    assert [w.shape for w in klppo.policy.mlp.weights] == [
        (17, 170),
        (170, 100),
        (100, 60),
        (60, 6),
    ]
    assert [w.shape for w in klppo.value.mlp.weights] == [(17, 170), (170, 29), (29, 5), (5, 1)]
    assert klppo.lr == pytest.approx(9e-4 / 100**0.5)
    assert klppo.value_lr == pytest.approx(1e-2 / 29**0.5)
    assert klppo.policy.log_std.shape == (6, 6)  # (10 * 60) // 48 = 12 rows of log-variances
    assert klppo.policy.distribution(torch.zeros(1, 17))[1].tolist() == pytest.approx([-0.5] * 6)


def test_networks_without_hidden_layers_are_refused():
    with pytest.raises(ValueError, match="need hidden layers"):
        KLPPOOptions(hidden=())


@pytest.mark.parametrize("act", [BOX, CHOICE], ids=["box", "discrete"])
@pytest.mark.parametrize("far", [0.01, 0.3])
def test_the_loss_is_that_of_a_slow_loop(act, far):
    klppo = agent(act, target_kl=0.01, eta=20.0)
    klppo.beta = 1.7
    batch = rows(klppo)
    obs, action = torch.from_numpy(batch["obs"]), torch.from_numpy(batch["act"])
    was = tuple(x.detach() for x in klppo.policy.distribution(obs))
    with torch.no_grad():
        klppo.policy.mlp.biases[-1] += far * torch.arange(len(klppo.policy.mlp.biases[-1]))
    now = klppo.policy.distribution(obs)
    gain, kl = 0.0, 0.0
    for i in range(len(obs)):
        if act is CHOICE:
            p, q = (torch.distributions.Categorical(logits=d[0][i]) for d in (was, now))
            logp = q.log_prob(action[i])
            kl += torch.distributions.kl_divergence(p, q)
        else:
            p, q = (torch.distributions.Normal(d[0][i], d[1].exp()) for d in (was, now))
            logp = q.log_prob(action[i]).sum()
            kl += torch.distributions.kl_divergence(p, q).sum()
        gain += torch.exp(logp - batch["logp"][i]) * batch["adv"][i]
    gain, kl = gain / len(obs), kl / len(obs)
    assert (kl > 0.02) == (far == 0.3)
    expected = -gain + 1.7 * kl + 20 * max(0.0, kl.item() - 0.02) ** 2
    log_ratio = klppo.policy.logp(now, action) - torch.from_numpy(batch["logp"])
    loss = klppo.loss(log_ratio, torch.from_numpy(batch["adv"]), klppo.policy.kl(was, now).mean())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_servo_holds_the_divergence_and_the_step_size_follows_at_its_ends():
    klppo = agent(target_kl=0.01)
    klppo.steer(0.015)
    assert (klppo.beta, klppo.multiplier) == (1.0, 1.0)
    klppo.steer(0.021)
    assert klppo.beta == 1.5
    for _ in range(20):
        klppo.steer(0.021)
    assert klppo.beta == 35
    assert klppo.multiplier == pytest.approx(1.5**-6)  # the first one below 0.1
    for _ in range(40):
        klppo.steer(0.004)
    assert klppo.beta == pytest.approx(1 / 35)
    assert klppo.multiplier >= 10
    assert klppo.multiplier < 15


def test_an_update_ends_early_when_the_policy_has_moved_far():
    klppo = agent(lr=0.1, target_kl=1e-4)
    metrics = klppo.update(rows(klppo), np.random.default_rng(0), 0.0)
    assert metrics["epochs"] == 1
    assert metrics["kl"] > 4e-4
    klppo = agent(lr=1e-6)
    assert klppo.update(rows(klppo), np.random.default_rng(0), 0.0)["epochs"] == 20


def test_the_value_function_learns_from_this_batch_and_the_one_before_it():
    seen = []
    klppo = agent()
    klppo.fit_value = lambda x, ret, *_: seen.append((x, ret)) or 0.0
    batches = [rows(klppo, n, seed=n) for n in (30, 20, 10)]
    for batch in batches:
        klppo.update(batch, np.random.default_rng(0), 0.0)
    assert [len(x) for x, _ in seen] == [30, 50, 30]
    assert seen[2][1].tolist() == [*batches[2]["ret"], *batches[1]["ret"]]


def test_a_time_limit_is_not_an_end():
    """With reward 1 for ever, all values are 1 / (1 - gamma)."""
    klppo = agent(gamma=0.9, lam=1.0)
    with torch.no_grad():
        klppo.value.mlp.weights[-1].zero_()
        klppo.value.mlp.biases[-1].fill_(10.0)
    for terminated, expected in ((False, 10.0), (True, 10 * (1 - 0.9**5))):
        fragment = Fragment(
            fragment_id=0,
            obs=np.zeros((5, 4), np.float32),
            act=np.zeros((5, 2), np.float32),
            rew=np.ones(5),
            terminated=np.array([False] * 4 + [terminated]),
            truncated=np.array([False] * 4 + [not terminated]),
            end=np.array([4]),
            end_obs=np.zeros((1, 4), np.float32),
        )
        assert klppo.process(fragment)["ret"][0] == pytest.approx(expected, rel=1e-5)


def test_state_and_load_give_the_same_next_update():
    a, b = agent(), agent()
    batch = rows(a)
    a.beta = 2.5
    a.update(batch, np.random.default_rng(0), 0.0)
    nn.ModuleDict(b.modules()).load_state_dict(nn.ModuleDict(a.modules()).state_dict())
    b.load(checkpoint.snapshot(a.state()))
    for klppo in (a, b):
        klppo.update(batch, np.random.default_rng(1), 0.0)
    assert (a.beta, a.multiplier) == (b.beta, b.multiplier)
    for mine, other in ((a.flat, b.flat), (a.value_flat, b.value_flat)):
        assert torch.equal(mine.vectors[0], other.vectors[0])


@pytest.mark.slow
def test_it_learns(tmp_path):
    options = KLPPOOptions(gamma=0.0, target_kl=0.02, lr=1e-3, value_epochs=2)
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4, "total_steps": 40000}
    _, run = train_here(KLPPO, options, tmp_path, episodes_per_batch=40, **kwargs)
    assert mean_return(run) > 8  # of 10; chance is 2.5
