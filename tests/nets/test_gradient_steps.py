"""Gradient steps in closed form against autograd: one objective, two ways."""

from functools import partial

import numpy as np
import pytest
import torch
from some_policies import KINDS, OBS, mask_for, noise_for, policy_of, rng
from torch import nn

from algos.ppo import clipped_loss, clipped_slope
from rank0rl.nets.actor_critic import ActorCritic
from rank0rl.nets.conv import network
from rank0rl.nets.cuda import AutogradSteps
from rank0rl.nets.flat import Adam, flatten_
from rank0rl.nets.gradient_steps import ClosedForm, Objective, gradient_steps, joined
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.nets.value import ValueFunction


def objective(normalize=False):
    return Objective(
        policy_loss=partial(clipped_loss, clip_ratio=0.1),
        policy_slope=partial(clipped_slope, clip_ratio=0.1),
        value_coef=0.7,
        entropy_coef=0.03,
        normalize=normalize,
    )


def minibatch_of(policy, masked):
    """Return arrays by name, with half of the ratios out of the clipped range."""
    mask = mask_for(policy, 33) if masked else None
    act = policy.act(OBS, noise_for(policy, 33), mask)
    logp, _, _ = policy.numpy(OBS, act, mask)
    adv, ret, shift = rng(5).standard_normal((3, 33)).astype(np.float32)
    rows = {"obs": OBS, "act": act, "logp": logp + 0.15 * shift, "adv": 3 * adv + 1, "ret": ret}
    return {**rows, "mask": mask} if masked else rows


CASES = [(kind, False) for kind in KINDS] + [("categorical", True), ("several", True)]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_the_closed_form_is_the_gradient_of_the_loss(kind, masked, normalize):
    policy, value = policy_of(kind), ValueFunction((5,), (8,), rng())
    nets = nn.ModuleDict({"policy": policy, "value": value})
    flat, minibatch = flatten_(nets), minibatch_of(policy, masked)
    both = objective(normalize)
    loss, expected = both.loss(nets, **{k: torch.from_numpy(x) for k, x in minibatch.items()})
    flat.zero_grad()
    loss.backward()
    gradient = flat.vectors[0].grad.clone()
    flat.zero_grad()
    seen = both.gradient(nets, **minibatch)
    assert 5 < (abs(np.expm1(seen[0])) > 0.1).sum() < 28
    for x, y in zip(seen, expected, strict=True):
        np.testing.assert_allclose(x, y.detach(), rtol=1e-3, atol=1e-5)
    scale = gradient.abs().max()
    torch.testing.assert_close(flat.vectors[0].grad / scale, gradient / scale, rtol=0, atol=1e-5)


def test_the_closed_form_is_taken_on_the_cpu_only_and_for_mlps_only():
    policy, value = policy_of("gaussian"), ValueFunction((5,), (8,), rng())
    adam = Adam(flatten_(nn.ModuleList([policy, value])))
    nets = ActorCritic(ObsNormalizer((5,)), policy, value)
    assert isinstance(gradient_steps(nets, adam, objective(), 0.5, "cpu"), ClosedForm)
    assert isinstance(gradient_steps(nets, adam, objective(), 0.5, "cpu:0"), AutogradSteps)
    nets.value.mlp = network((12, 10, 3), (8,), 1, rng(), 1.0)
    assert isinstance(gradient_steps(nets, adam, objective(), 0.5, "cpu"), AutogradSteps)


def test_arrays_and_tensors_are_joined_in_order():
    arrays = [np.arange(3.0), np.arange(2.0)]
    assert joined(arrays).tolist() == [0, 1, 2, 0, 1]
    assert joined([torch.from_numpy(x) for x in arrays]).tolist() == [0, 1, 2, 0, 1]
