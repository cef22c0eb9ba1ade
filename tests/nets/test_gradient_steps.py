"""Gradient steps in compiled kernels against autograd: one objective, two ways."""

import copy
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.policies import (
    IN_KERNELS,
    SEVERAL,
    box,
    drawn_by,
    mask_for,
    noise_for,
    policy_of,
    rng,
)
from torch import nn

from rank0rl.agent import Space
from rank0rl.algos.ppo import clipped_loss
from rank0rl.nets.actor_critic import ActorCritic, Objective, ValueFunction
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.kernels.steps import CompiledSteps, block_rows
from rank0rl.nets.mlp import Activation
from rank0rl.nets.networks import network
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.nets.policies import GaussianPolicy, make_policy
from rank0rl.nets.update import AutogradSteps, gradient_steps

N = 300  # rows: more than one block


def objective(clip_ratio=0.1, normalize=False):
    return Objective(
        policy_loss=partial(clipped_loss, clip_ratio=clip_ratio),
        clip_ratio=clip_ratio,
        value_coef=0.7,
        entropy_coef=0.03,
        normalize=normalize,
    )


def networks(kind, dtype=torch.float32):
    value = ValueFunction((5,), (8, 6), rng())
    return nn.ModuleDict({"policy": policy_of(kind), "value": value}).to(dtype)


def rows_of(policy, masked, dtype=np.float32):
    """Return arrays by name, with half of the ratios out of the clipped range."""
    obs = rng(2).standard_normal((N, 5)).astype(dtype)
    mask = mask_for(policy, N) if masked else None
    act = drawn_by(policy, obs, noise_for(policy, N), mask)
    adv, ret, shift = rng(5).standard_normal((3, N)).astype(dtype)
    logp = policy.log_prob(obs, act, mask) + 0.15 * shift
    rows = {"obs": obs, "act": act, "logp": logp.astype(dtype), "adv": 3 * adv + 1, "ret": ret}
    return {**rows, "mask": mask} if masked else rows


CASES = [(kind, False) for kind in IN_KERNELS] + [("categorical", True), ("several", True)]
PRECISIONS = {torch.float32: 1e-5, torch.float64: 1e-10}


LAYERS = [(activation, norm) for activation in get_args(Activation) for norm in (False, True)]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(("activation", "layer_norm"), LAYERS)
def test_kernels_know_all_activations_and_layer_norm(activation, layer_norm, dtype):
    """Three hidden layers of different widths, with scales, shifts and biases that are not 1 and 0."""
    layers = {"activation": activation, "layer_norm": layer_norm}
    policy = GaussianPolicy((5,), box(3), (19, 16, 21), rng(), **layers)
    nets = nn.ModuleDict({"policy": policy, "value": ValueFunction((5,), (8,), rng(), **layers)})
    nets.to(dtype)
    with torch.no_grad():
        for i, p in enumerate(nets.parameters()):
            p.add_(0.2 * torch.from_numpy(rng(i).standard_normal(p.shape)))
    flat, both = Flat(nets), objective()
    rows = rows_of(nets["policy"], False, np.dtype(str(dtype).removeprefix("torch.")))
    loss, expected = both.loss(nets, **{k: torch.from_numpy(x) for k, x in rows.items()})
    flat.zero_grad()
    loss.backward()
    gradients = [p.grad.clone() for p in nets.parameters()]
    flat.vectors[0].grad.fill_(7.0)  # written over, not added to
    nets_ = ActorCritic(ObsNormalizer((5,)), nets["policy"], nets["value"])
    steps = gradient_steps(nets_, Adam(flat), both, 0.5)
    assert isinstance(steps, CompiledSteps)
    log_ratio, error, _ = steps.epoch(rows, N, rng(0), 0.0)
    order, exact = rng(0).permutation(N), PRECISIONS[dtype]
    np.testing.assert_allclose(log_ratio, expected[0].detach()[order], rtol=0, atol=20 * exact)
    np.testing.assert_allclose(error, expected[1].detach()[order], rtol=0, atol=20 * exact)
    for p, gradient in zip(nets.parameters(), gradients, strict=True):
        scale = gradient.abs().max()
        assert scale > 1e-3
        torch.testing.assert_close(p.grad / scale, gradient / scale, rtol=0, atol=2 * exact)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("clip_ratio", [0.1, np.inf])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_kernels_write_the_gradient_of_the_loss(kind, masked, clip_ratio, dtype):
    nets = networks(kind, dtype)
    flat, both = Flat(nets), objective(clip_ratio)
    rows = rows_of(nets["policy"], masked, np.dtype(str(dtype).removeprefix("torch.")))
    loss, expected = both.loss(nets, **{k: torch.from_numpy(x) for k, x in rows.items()})
    flat.zero_grad()
    loss.backward()
    gradient = flat.vectors[0].grad.clone()
    flat.vectors[0].grad.fill_(7.0)  # written over, not added to
    before = flat.vectors[0].detach().clone()
    steps = CompiledSteps(nets, Adam(flat), both, 0.5, 1)
    seen = steps.epoch(rows, N, rng(0), 0.0)
    order = rng(0).permutation(N)
    assert 50 < (abs(np.expm1(seen[0])) > 0.1).sum() < 250
    exact = PRECISIONS[dtype]
    for x, y in zip(seen, (y.detach().numpy() for y in expected), strict=True):
        np.testing.assert_allclose(x, y[order] if len(y) == N else y, rtol=0, atol=20 * exact)
    scale = gradient.abs().max()
    torch.testing.assert_close(flat.vectors[0].grad / scale, gradient / scale, rtol=0, atol=exact)
    assert torch.equal(flat.vectors[0], before)
    flat.check()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_two_epochs_are_those_of_autograd(kind, masked, normalize):
    """Minibatches of two blocks, a smaller last one, gradients above and below the limit."""
    ours, both = networks(kind), objective(0.2, normalize)
    theirs = copy.deepcopy(ours)
    rows, norms = rows_of(ours["policy"], masked), []
    for nets, make in ((ours, CompiledSteps), (theirs, AutogradSteps)):
        adam = Adam(Flat(nets), eps=1e-5)
        given = (2,) if make is CompiledSteps else ("cpu",)
        steps, draws = make(nets, adam, both, 1.0, *given), rng(3)
        begun = steps.begin(rows, both)
        seen = [steps.epoch(begun, 140, draws, 3e-3) for _ in range(2)]
        steps.end()
        norms.append(seen)
        assert adam.steps == 6
    for x, y in zip(*(seen[1] for seen in norms), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("gaussian", {}),
        ("several", {}),
        ("gaussian", {"activation": "gelu", "layer_norm": True}),
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_threads(kind, layers):
    """Networks of several slices; minibatches of 1, 3 and 8 blocks, and smaller last ones."""
    weights, n = set(), 2500
    space = box(6) if kind == "gaussian" else SEVERAL
    obs = rng(1).standard_normal((n, 17), dtype=np.float32)
    adv, ret, logp = rng(2).standard_normal((3, n)).astype("f")
    for threads in (1, 2, 3, 5, 8):
        policy = make_policy((17,), space, (64, 64), rng(), **layers)
        value = ValueFunction((17,), (64, 64), rng(), **layers)
        nets = nn.ModuleDict({"policy": policy, "value": value})
        flat = Flat(nets)
        act = drawn_by(policy, obs, noise_for(policy, n))
        rows = {"obs": obs, "act": act, "logp": logp / 9 - 8, "adv": adv, "ret": ret}
        steps = CompiledSteps(nets, Adam(flat), objective(), 0.5, threads)
        for size in (64, 300, 1100):
            steps.epoch(rows, size, rng(1), 1e-3)
        weights.add(flat.vectors[0].detach().numpy().tobytes())
    assert len(weights) == 1


@pytest.mark.parametrize("hidden", [(), (3,), (200, 3)])
@pytest.mark.parametrize("n", [1, 129, 1025])
def test_networks_and_minibatches_of_any_size(hidden, n):
    space = Space("discrete", (), "int64", choices=(50,))
    policy, value = make_policy((2,), space, hidden, rng()), ValueFunction((2,), hidden, rng())
    nets = nn.ModuleDict({"policy": policy, "value": value})
    flat, obs = Flat(nets), rng(1).standard_normal((n, 2), dtype=np.float32)
    adv, ret, logp = rng(2).standard_normal((3, n)).astype("f")
    act = drawn_by(policy, obs, noise_for(policy, n))
    rows = {"obs": obs, "act": act, "logp": logp / 9 - 4, "adv": adv, "ret": ret}
    loss, _ = objective().loss(nets, **{k: torch.from_numpy(x) for k, x in rows.items()})
    flat.zero_grad()
    loss.backward()
    expected = flat.vectors[0].grad.clone()
    CompiledSteps(nets, Adam(flat), objective(), 0.5, 2).epoch(rows, n, rng(0), 0.0)
    scale = expected.abs().max()
    torch.testing.assert_close(flat.vectors[0].grad / scale, expected / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_fitting_alone_takes_the_steps_of_autograd(threads):
    value = ValueFunction((5,), (8, 6), rng())
    slow = copy.deepcopy(value)
    x, ret = rng(2).standard_normal((N, 5), dtype=np.float32), rng(4).standard_normal(N)
    adam, rows = Adam(Flat(value)), {"obs": x, "ret": ret.astype("f")}
    alone, loss = nn.ModuleDict({"value": value}), Objective(clip_ratio=np.inf, value_coef=1.0)
    CompiledSteps(alone, adam, loss, np.inf, threads).epoch(rows, 140, rng(5), 3e-3)
    theirs = torch.optim.Adam(slow.parameters(), lr=3e-3)
    order = rng(5).permutation(N)
    for few in (order[:140], order[140:280], order[280:]):
        theirs.zero_grad()
        error = slow(torch.from_numpy(x[few])) - torch.from_numpy(ret[few]).float()
        error.square().mean().backward()
        theirs.step()
    for p, q in zip(value.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["obs", "adv", "ret", "logp"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_makes_no_step(name, wrong):
    nets = networks("gaussian")
    flat, rows = Flat(nets), rows_of(nets["policy"], False)
    rows["adv"] = abs(rows["adv"])
    rows[name][0] = -wrong if name == "logp" else wrong
    if (name, wrong) == ("logp", np.inf):
        rows["adv"][0] = -1.0  # else it is clipped, which is right
    before = flat.vectors[0].detach().clone()
    steps = CompiledSteps(nets, Adam(flat), objective(), 0.5, 2)
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        steps.epoch(rows, N, rng(0), 1e-3)
    assert torch.equal(flat.vectors[0], before)


def test_a_ratio_that_overflows_is_no_gradient_where_nothing_is_clipped():
    nets = networks("gaussian")
    flat, rows = Flat(nets), rows_of(nets["policy"], False)
    rows["adv"], rows["logp"] = abs(rows["adv"]), rows["logp"] - 1000
    steps = CompiledSteps(nets, Adam(flat), objective(np.inf), 0.5, 1)
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        steps.epoch(rows, N, rng(0), 1e-3)


def test_more_steps_than_one_call_makes_are_counted():
    nets = networks("gaussian")
    flat, rows = Flat(nets), rows_of(nets["policy"], False)
    adam = Adam(flat)
    steps = CompiledSteps(nets, adam, objective(), 0.5, 2)
    _, _, entropy = steps.epoch(rows, 1, rng(0), 1e-4)
    assert adam.steps == len(entropy) == N > 256
    assert (entropy != 0).all()


class MyPolicy(GaussianPolicy):
    """It may have another `logp`."""


class MyObjective(Objective):
    """It may have another `loss`."""


def test_blocks_depend_on_the_minibatch_alone():
    assert [block_rows(n) for n in (1, 64, 128, 256, 1024, 20_000)] == [128] * 5 + [2500]


def test_kernels_are_for_the_cpu_and_mlps_and_losses_that_they_know():
    policy, value = policy_of("gaussian"), ValueFunction((5,), (8,), rng())
    adam = Adam(Flat(nn.ModuleList([policy, value])))
    nets = ActorCritic(ObsNormalizer((5,)), policy, value)
    assert isinstance(gradient_steps(nets, adam, objective(), 0.5), CompiledSteps)
    assert isinstance(gradient_steps(nets, adam, objective(), 0.5, "cpu:0"), AutogradSteps)
    other = objective(clip_ratio=None)
    assert isinstance(gradient_steps(nets, adam, other, 0.5), AutogradSteps)
    mine = MyObjective(**vars(objective()))
    assert isinstance(gradient_steps(nets, adam, mine, 0.5), AutogradSteps)
    my_policy = MyPolicy((5,), box(2), (8,), rng())
    adam_of_mine = Adam(Flat(nn.ModuleList([my_policy, value])))
    with_mine = ActorCritic(ObsNormalizer((5,)), my_policy, value)
    assert isinstance(gradient_steps(with_mine, adam_of_mine, objective(), 0.5), AutogradSteps)
    nets.value.mlp = network((12, 10, 3), (8,), 1, rng(), 1.0)
    assert isinstance(gradient_steps(nets, adam, objective(), 0.5), AutogradSteps)
