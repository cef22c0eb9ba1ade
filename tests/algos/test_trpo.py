"""TRPO: its products against explicit matrices, its step against the region, and that it learns."""

import numpy as np
import pytest
import torch
from helpers.runs import mean_return, train_here
from torch import nn

from rank0rl.agent import Space, Spaces, Step
from rank0rl.algos.trpo import TRPO, TRPOOptions, conjugate_gradient
from rank0rl.run import checkpoint

BOX = Space("box", (2,), "float32", low=-np.ones(2), high=np.ones(2))
CHOICE = Space("discrete", (), "int64", choices=(3,))


def agent(act=BOX, **options):
    spaces = Spaces(Space("box", (4,), "float32"), act)
    trpo = TRPO(spaces, TRPOOptions(hidden=(6,), **options), np.random.default_rng(0))
    trpo.prepare()
    return trpo


def rows(trpo, n=200):
    rng = np.random.default_rng(1)
    obs = rng.standard_normal((n, 4), dtype=np.float32)
    kind, k = trpo.noise
    noise = rng.standard_normal((n, k)) if kind == "normal" else rng.random((n, k))
    act, _ = trpo.act(Step(obs, noise.astype(np.float32), np.arange(n)))
    logp = trpo.policy.log_prob(obs, act)
    draws = {name: rng.standard_normal(n, dtype=np.float32) for name in ("adv", "val", "ret")}
    return {"obs": obs, "act": act, "logp": logp, **draws}


def improve(trpo, batch):
    names = ("obs", "act", "logp", "adv")
    return trpo.improve(
        trpo.options.target_kl, **{name: torch.from_numpy(batch[name]) for name in names}
    )


@pytest.mark.parametrize("act", [BOX, CHOICE], ids=["box", "discrete"])
def test_the_fisher_vector_product_is_that_of_the_explicit_matrix(act):
    """F = E[grad log p(a) grad log p(a)'], over all choices, or in closed form for a normal."""
    trpo = agent(act, damping=0.25)
    obs = torch.from_numpy(rows(trpo, 8)["obs"])
    params, policy = list(trpo.policy.parameters()), trpo.policy
    size = trpo.flat.vectors[0].numel()

    def gradient(of):
        grads = torch.autograd.grad(of, params, retain_graph=True, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                for p, g in zip(params, grads, strict=True)
            ]
        )

    matrix = torch.zeros(size, size)
    for x in obs:
        now = policy.distribution(x[None])
        if act is CHOICE:
            for logp in now[0][0]:
                g = gradient(logp)
                matrix += logp.exp().detach() * torch.outer(g, g) / len(obs)
        else:  # 1 / std^2 for each mean, 2 for each log standard deviation
            mean, log_std = now
            for weight, of in zip(torch.exp(-2 * log_std), mean[0], strict=True):
                g = gradient(of)
                matrix += weight.detach() * torch.outer(g, g) / len(obs)
            for of in log_std:
                g = gradient(of)
                matrix += 2 * torch.outer(g, g) / len(obs)
    product = trpo.fisher(obs)
    for seed in range(3):
        v = torch.from_numpy(np.random.default_rng(seed).standard_normal(size, dtype=np.float32))
        torch.testing.assert_close(product(v), matrix @ v + 0.25 * v, rtol=1e-3, atol=1e-4)


def test_conjugate_gradient_is_a_direct_solve():
    rng = np.random.default_rng(0)
    root = torch.from_numpy(rng.standard_normal((12, 12)))
    a, b = root @ root.T + torch.eye(12), torch.from_numpy(rng.standard_normal(12))
    exact = torch.linalg.solve(a, b)
    torch.testing.assert_close(conjugate_gradient(lambda v: a @ v, b, 12), exact)
    few = conjugate_gradient(lambda v: a @ v, b, 4)
    assert 0 < (few - exact).norm() < exact.norm()
    assert conjugate_gradient(lambda v: a @ v, torch.zeros(12), 5).tolist() == [0.0] * 12


@pytest.mark.parametrize("act", [BOX, CHOICE], ids=["box", "discrete"])
def test_a_step_raises_the_objective_and_stays_in_the_region(act):
    trpo = agent(act, fisher_stride=1, damping=1e-3, target_kl=0.01)
    batch = rows(trpo)
    before = trpo.policy.distribution(torch.from_numpy(batch["obs"]))
    before = tuple(x.detach().clone() for x in before)
    metrics = improve(trpo, batch)
    after = trpo.policy.distribution(torch.from_numpy(batch["obs"]))
    total = 0.0
    new_logps = trpo.policy.logp(after, torch.from_numpy(batch["act"])).detach().numpy()
    for new_logp, logp, adv in zip(new_logps, batch["logp"], batch["adv"], strict=True):
        total += (np.exp(new_logp - logp) - 1) * adv
    assert metrics["gain"] == pytest.approx(total / len(new_logps), rel=1e-2)
    assert metrics["gain"] > 0
    kl = trpo.policy.kl(before, after).mean().item()
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3)
    assert 0.003 < kl < 0.015


@pytest.mark.parametrize("backtracks", [0, 10])
def test_a_step_that_does_not_help_is_not_taken(backtracks):
    trpo = agent(backtracks=backtracks)
    batch = rows(trpo)
    batch["adv"][:] = 0
    before = trpo.flat.vectors[0].detach().clone()
    metrics = improve(trpo, batch)
    assert (metrics["step_taken"], metrics["kl"]) == (0.0, 0.0)
    assert torch.equal(trpo.flat.vectors[0], before)


def test_conjugate_gradient_ends_where_there_is_no_curvature():
    flat = torch.diag(torch.tensor([1.0, 0.0, -1.0]))
    found = conjugate_gradient(lambda v: flat @ v, torch.ones(3), 10)
    assert found.isfinite().all()
    assert found.norm() < 10


def test_a_step_that_leaves_the_region_is_shortened_unless_there_is_no_line_search():
    taken = {}
    for backtracks in (0, 10):
        trpo = agent(fisher_stride=200, damping=0.0, cg_iterations=2, backtracks=backtracks)
        taken[backtracks] = improve(trpo, rows(trpo))  # one row's Fisher matrix: far too large
    assert taken[0]["kl"] > 0.015
    assert taken[0]["step_taken"] == 1
    assert taken[10]["kl"] <= 0.015
    assert 0 < taken[10]["step_taken"] < 1


def test_state_and_load_give_the_same_next_update():
    a, b = agent(), agent()
    batch = rows(a)
    a.update(batch, np.random.default_rng(0), 0.0)
    nn.ModuleDict(b.modules()).load_state_dict(nn.ModuleDict(a.modules()).state_dict())
    b.load(checkpoint.snapshot(a.state()))
    for trpo in (a, b):
        trpo.update(batch, np.random.default_rng(1), 0.0)
    for mine, other in ((a.flat, b.flat), (a.value_flat, b.value_flat)):
        assert torch.equal(mine.vectors[0], other.vectors[0])


def test_it_learns(tmp_path):
    options = TRPOOptions(gamma=0.0, hidden=(16,), value_epochs=1)
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4, "total_steps": 12000}
    _, run = train_here(TRPO, options, tmp_path, steps_per_batch=400, **kwargs)
    assert mean_return(run) > 8  # of 10; chance is 2.5


def test_the_target_follows_its_schedule():
    taken = []
    for target_kl in ("linear:0.02:0", 0.01):
        trpo = agent(target_kl=target_kl, value_lr="cosine:1e-3:0")
        metrics = trpo.update(rows(trpo), np.random.default_rng(0), 0.5)
        assert metrics["value_lr"] == pytest.approx(5e-4)
        taken.append(metrics["step_norm"])
        assert ("target_kl" in metrics) == isinstance(target_kl, str)
    assert taken[0] == pytest.approx(taken[1])
