"""Gradient steps in compiled kernels against autograd: one objective, two ways."""

import copy
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.policies import (
    BOUNDED,
    IN_KERNELS,
    SEVERAL,
    box,
    drawn_by,
    mask_for,
    noise_for,
    policy_of,
    rng,
    value_of,
)
from torch import nn

from rank0rl.agent import Space
from rank0rl.algos.ppo import clipped_loss, clipped_slope
from rank0rl.nets.actor_critic import ActorCritic, ClosedForm
from rank0rl.nets.autograd import AutogradSteps
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.kernels import CLOSED, LOSS, OUTPUTS
from rank0rl.nets.kernels.compiled import CompiledSteps
from rank0rl.nets.kernels.steps import _task_of, block_rows
from rank0rl.nets.mlp import Activation
from rank0rl.nets.policies import GaussianPolicy, make_policy
from rank0rl.nets.update import ValueFit

N = 300  # rows: more than one block


class Objective:
    """PPO's loss, twice: for torch and as a closed form."""

    def __init__(self, clip_ratio=0.1, normalize=False, value_coef=0.7, entropy_coef=0.03):
        self.clip_ratio, self.value_coef = clip_ratio, value_coef
        self.normalize, self.entropy_coef = normalize, entropy_coef
        self.closed = ClosedForm(clipped_slope, clip_ratio, value_coef, entropy_coef)

    def loss(self, log_ratio, entropy, value, rows):
        adv = rows["adv"]
        if self.normalize:
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
        error = value - rows["ret"]
        policy_loss = clipped_loss(log_ratio, adv, self.clip_ratio)
        return policy_loss + self.value_coef * error.square().mean() - self.entropy_coef * entropy


def evaluate(nets, rows):
    return ActorCritic(None, nets["policy"], nets["value"]).evaluate(nets, rows)


def compiled(nets, adam, both, limit=0.5, threads=1, way=CLOSED):
    steps = CompiledSteps(nets, evaluate, adam, limit, threads, both.normalize)
    steps.way = way
    steps.begin({}, both.loss, both.closed)
    return steps


def by_autograd(nets, rows, both):
    """Return the gradient and what is recorded."""
    steps = AutogradSteps(nets, evaluate, Adam(Flat(nets)), np.inf)
    gradient, *seen = steps.gradient(rows, both.loss)
    return torch.from_numpy(gradient), seen


def networks(kind, dtype=torch.float32):
    value = value_of((5,), (8, 6), rng())
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


_CASES = [(kind, False) for kind in IN_KERNELS] + [("categorical", True), ("several", True)]
FAST = (
    "gaussian",
    "categorical",
)  # the others are kernels of their own, each of which takes seconds to compile
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in FAST)) for case in _CASES]
PRECISIONS = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = [
    torch.float32,
    pytest.param(torch.float64, marks=pytest.mark.slow),
]  # kernels are compiled for each


LAYERS = [(activation, norm) for activation in get_args(Activation) for norm in (False, True)]


@pytest.mark.fast(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "layer_norm"), LAYERS)
def test_kernels_know_all_activations_and_layer_norm(activation, layer_norm, dtype):
    """Three hidden layers of different widths, with scales, shifts and biases that are not 1 and 0."""
    layers = {"activation": activation, "layer_norm": layer_norm}
    policy = GaussianPolicy((5,), box(3), (19, 16, 21), rng(), **layers)
    nets = nn.ModuleDict({"policy": policy, "value": value_of((5,), (8,), rng(), **layers)})
    nets.to(dtype)
    with torch.no_grad():
        for i, p in enumerate(nets.parameters()):
            p.add_(0.2 * torch.from_numpy(rng(i).standard_normal(p.shape)))
    rows = rows_of(nets["policy"], False, np.dtype(str(dtype).removeprefix("torch.")))
    _, expected = by_autograd(nets, rows, Objective())
    gradients = [p.grad.clone() for p in nets.parameters()]
    flat = Flat(nets)
    flat.vectors[0].grad.fill_(7.0)  # written over, not added to
    log_ratio, error, _ = compiled(nets, Adam(flat), Objective()).epoch(rows, N, rng(0), 0.0)
    order, exact = rng(0).permutation(N), PRECISIONS[dtype]
    np.testing.assert_allclose(log_ratio, expected[0][order], rtol=0, atol=20 * exact)
    np.testing.assert_allclose(error, expected[1][order], rtol=0, atol=20 * exact)
    for p, gradient in zip(nets.parameters(), gradients, strict=True):
        scale = gradient.abs().max()
        assert scale > 1e-3
        torch.testing.assert_close(p.grad / scale, gradient / scale, rtol=0, atol=2 * exact)


@pytest.mark.fast(24)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip_ratio", [0.1, np.inf])
@pytest.mark.parametrize("way", [CLOSED, LOSS, OUTPUTS], ids=["closed", "loss", "outputs"])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_kernels_write_the_gradient_of_the_loss(kind, masked, way, clip_ratio, dtype):
    nets = networks(kind, dtype)
    both = Objective(clip_ratio)
    rows = rows_of(nets["policy"], masked, np.dtype(str(dtype).removeprefix("torch.")))
    gradient, expected = by_autograd(nets, rows, both)
    flat = Flat(nets)
    flat.vectors[0].grad.fill_(7.0)  # written over, not added to
    before = flat.vectors[0].detach().clone()
    steps = compiled(nets, Adam(flat), both, way=way)
    seen = steps.epoch(rows, N, rng(0), 0.0)
    order = rng(0).permutation(N)
    assert 50 < (abs(np.expm1(seen[0])) > 0.1).sum() < 250
    exact = PRECISIONS[dtype]
    for x, y in zip(seen, expected, strict=True):
        np.testing.assert_allclose(x, y[order] if len(y) == N else y, rtol=0, atol=20 * exact)
    scale = gradient.abs().max()
    torch.testing.assert_close(flat.vectors[0].grad / scale, gradient / scale, rtol=0, atol=exact)
    assert torch.equal(flat.vectors[0], before)
    flat.check(nets)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "outputs", "flat"),
    [
        ("state", [0, 0, 0, -8, -5, 5], [3, 5]),  # beyond, at and beyond a limit
        ("state", [0, 0, 0, 2, 2.5, -5.5], [4, 5]),
        ("beta", [-25, 0, 25, -25, 0, 25], []),  # a and b near 1, and beyond torch's threshold
        ("beta", [500, 40, -3, 300, 3, 40], []),
    ],
)
def test_far_outputs_have_the_slopes_of_autograd(kind, outputs, flat, dtype):
    nets = networks(kind, dtype)
    policy = nets["policy"]
    with torch.no_grad():
        policy.mlp.weights[-1].zero_()
        policy.mlp.biases[-1].copy_(torch.tensor(outputs))
        if kind == "state":
            policy.log_std.zero_()
    rows = rows_of(policy, False, np.dtype(str(dtype).removeprefix("torch.")))
    gradient, expected = by_autograd(nets, rows, Objective(entropy_coef=0.3))
    bias = policy.mlp.biases[-1].grad.clone()
    assert (bias == 0).nonzero().flatten().tolist() == flat
    flattened = Flat(nets)
    steps = compiled(nets, Adam(flattened), Objective(entropy_coef=0.3))
    seen = steps.epoch(rows, N, rng(0), 0.0)
    order, exact = rng(0).permutation(N), 5 * PRECISIONS[dtype]
    for x, y in zip(seen, expected, strict=True):
        np.testing.assert_allclose(x, y[order] if len(y) == N else y, rtol=exact, atol=20 * exact)
    scale = gradient.abs().max()
    grad = flattened.vectors[0].grad
    torch.testing.assert_close(grad / scale, gradient / scale, rtol=0, atol=exact)
    torch.testing.assert_close(policy.mlp.biases[-1].grad, bias, rtol=10 * exact, atol=exact)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("way", [CLOSED, LOSS, OUTPUTS], ids=["closed", "loss", "outputs"])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_two_epochs_are_those_of_autograd(kind, masked, way, normalize):
    """Minibatches of two blocks, a smaller last one, gradients above and below the limit."""
    ours, both = networks(kind), Objective(0.2, normalize)
    theirs = copy.deepcopy(ours)
    rows, norms = rows_of(ours["policy"], masked), []
    for nets in (ours, theirs):
        adam = Adam(Flat(nets), eps=1e-5)
        if nets is ours:
            steps = compiled(nets, adam, both, 1.0, 2, way)
        else:
            steps = AutogradSteps(nets, evaluate, adam, 1.0)
        draws, begun = rng(3), steps.begin(rows, both.loss, both.closed)
        seen = [steps.epoch(begun, 140, draws, 3e-3) for _ in range(2)]
        steps.end()
        norms.append(seen)
        assert adam.steps == 6
    for x, y in zip(*(seen[1] for seen in norms), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


@pytest.mark.fast(3)
@pytest.mark.parametrize("way", [CLOSED, LOSS, OUTPUTS], ids=["closed", "loss", "outputs"])
@pytest.mark.parametrize(
    ("space", "actions", "layers"),
    [
        (box(6), {}, {}),
        (box(6), {"state_std": True}, {}),
        (BOUNDED, {"actions": "beta"}, {}),
        (SEVERAL, {}, {}),
        (box(6), {}, {"activation": "gelu", "layer_norm": True}),
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_threads(space, actions, layers, way):
    """Networks of several slices; minibatches of 1, 3 and 8 blocks, and smaller last ones."""
    weights, n = set(), 2500
    obs = rng(1).standard_normal((n, 17), dtype=np.float32)
    adv, ret, logp = rng(2).standard_normal((3, n)).astype("f")
    for threads in (1, 2, 3, 5, 8):
        policy = make_policy((17,), space, (64, 64), rng(), **actions, **layers)
        value = value_of((17,), (64, 64), rng(), **layers)
        nets = nn.ModuleDict({"policy": policy, "value": value})
        flat = Flat(nets)
        act = drawn_by(policy, obs, noise_for(policy, n))
        rows = {"obs": obs, "act": act, "logp": logp / 9 - 8, "adv": adv, "ret": ret}
        steps = compiled(nets, Adam(flat), Objective(), 0.5, threads, way)
        for size in (64, 300, 1100):
            steps.epoch(rows, size, rng(1), 1e-3)
        weights.add(flat.vectors[0].detach().numpy().tobytes())
    assert len(weights) == 1


@pytest.mark.parametrize("hidden", [(), (3,), (200, 3)])
@pytest.mark.parametrize("n", [1, 129, 1025])
def test_networks_and_minibatches_of_any_size(hidden, n):
    space = Space("discrete", (), "int64", choices=(50,))
    policy, value = make_policy((2,), space, hidden, rng()), value_of((2,), hidden, rng())
    nets = nn.ModuleDict({"policy": policy, "value": value})
    obs = rng(1).standard_normal((n, 2), dtype=np.float32)
    adv, ret, logp = rng(2).standard_normal((3, n)).astype("f")
    act = drawn_by(policy, obs, noise_for(policy, n))
    rows = {"obs": obs, "act": act, "logp": logp / 9 - 4, "adv": adv, "ret": ret}
    expected, _ = by_autograd(nets, rows, Objective())
    flat = Flat(nets)
    compiled(nets, Adam(flat), Objective(), 0.5, 2).epoch(rows, n, rng(0), 0.0)
    scale = expected.abs().max()
    torch.testing.assert_close(flat.vectors[0].grad / scale, expected / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_fitting_alone_takes_the_steps_of_autograd(threads):
    value = value_of((5,), (8, 6), rng())
    slow = copy.deepcopy(value)
    x, ret = rng(2).standard_normal((N, 5), dtype=np.float32), rng(4).standard_normal(N)
    fit = ValueFit(value, Adam(Flat(value)), threads)
    fit(x, ret.astype("f"), rng(5), 3e-3, 1, 140)
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
    steps = compiled(nets, Adam(flat), Objective(), 0.5, 2)
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        steps.epoch(rows, N, rng(0), 1e-3)
    assert torch.equal(flat.vectors[0], before)


@pytest.mark.parametrize("ret", [np.nan, 1e30])
def test_a_gradient_of_autograd_that_is_not_finite_is_an_error(ret):
    nets = networks("gaussian")
    rows = rows_of(nets["policy"], False)
    rows["ret"][0] = ret
    steps = AutogradSteps(nets, evaluate, Adam(Flat(nets)), 0.5)
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        steps.epoch(steps.begin(rows, Objective().loss), N, rng(0), 1e-3)


def test_a_ratio_that_overflows_is_no_gradient_where_nothing_is_clipped():
    nets = networks("gaussian")
    flat, rows = Flat(nets), rows_of(nets["policy"], False)
    rows["adv"], rows["logp"] = abs(rows["adv"]), rows["logp"] - 1000
    steps = compiled(nets, Adam(flat), Objective(np.inf), 0.5, 1)
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        steps.epoch(rows, N, rng(0), 1e-3)


def test_more_steps_than_one_call_makes_are_counted():
    nets = networks("gaussian")
    flat, rows = Flat(nets), rows_of(nets["policy"], False)
    adam = Adam(flat)
    steps = compiled(nets, adam, Objective(), 0.5, 2)
    _, _, entropy = steps.epoch(rows, 1, rng(0), 1e-4)
    assert adam.steps == len(entropy) == N > 256
    assert (entropy != 0).all()


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_share_the_tasks_of_both_networks(threads):
    tasks = [[_task_of(i, threads) for i in range(at, 16, threads)] for at in range(threads)]
    assert sorted(task for some in tasks for task in some) == [*range(16)]
    of_value = [sum(task % 2 for task in some) for some in tasks]  # even ones are the policy's
    assert all(abs(2 * n - len(some)) <= 1 for n, some in zip(of_value, tasks, strict=True))


def test_blocks_depend_on_the_minibatch_alone():
    assert [block_rows(n) for n in (1, 64, 128, 256, 1024, 20_000)] == [128] * 5 + [2500]
