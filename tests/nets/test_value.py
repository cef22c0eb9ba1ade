"""The value function: its scale, and fitting it to returns."""

import numpy as np
import pytest
import torch
from helpers.agents import AGENTS
from helpers.policies import OBS, box, rng, value_of
from torch import nn

from rank0rl.agent import Fragment, Spaces, Step
from rank0rl.nets.actor_critic import ValueFunction
from rank0rl.nets.flat import Adam, Flat
from rank0rl.nets.update import ValueFit


def test_new_returns_change_the_scale_of_values_and_not_the_values():
    value = ValueFunction((5,), (8,), rng())
    assert not value.predict(OBS).any()  # at first
    value = value_of((5,), (8,), rng())
    before = value.predict(OBS)
    value.merge(rng().normal(0, 50, 1000).astype(np.float32))
    assert value.scale == pytest.approx(50, rel=0.1)
    np.testing.assert_allclose(value.predict(OBS), before, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        value(torch.from_numpy(OBS)).detach() * value.scale, before, rtol=1e-4, atol=1e-5
    )


class Critic(nn.Module):
    """A network in the usual style, with more layers of one output than its last one."""

    def __init__(self):
        super().__init__()
        self.gate, self.inner, self.out = nn.Linear(5, 1), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x)) * torch.sigmoid(self.gate(x)))


def test_a_network_of_ones_own_keeps_its_values_too():
    value = ValueFunction((5,), Critic(), rng())
    before = value.predict(OBS)
    value.merge(rng().normal(0, 50, 1000).astype(np.float32))
    np.testing.assert_allclose(value.predict(OBS), before, rtol=1e-4, atol=1e-5)


def test_returns_that_are_all_the_same_do_not_change_the_scale():
    """As before the first reward: weights would become thousands."""
    value = ValueFunction((5,), Critic(), rng())
    before = value.mlp.weights[-1].clone()
    value.merge(np.float32([0.1, np.nextafter(np.float32(0.1), 1)] * 500))
    assert value.scale == 1
    assert torch.equal(value.mlp.weights[-1], before)
    value.merge(rng().normal(0, 50, 1000).astype(np.float32))
    assert value.scale == pytest.approx(50 / 2**0.5, rel=0.1)


@pytest.mark.parametrize("algo", ["ppo", "trpo", "klppo", "a2c"])
def test_agents_learn_the_same_from_rewards_of_another_size(algo):
    def learned(size):
        agent_class, options = AGENTS[algo]
        agent = agent_class(Spaces(box(5), box(3)), options, rng())
        agent.prepare()
        draw, flags, end = rng(2), np.zeros(len(OBS), bool), np.array([len(OBS) - 1])
        for _ in range(3):
            noise = draw.standard_normal((len(OBS), 3), dtype=np.float32)
            act, extras = agent.act(Step(OBS, noise, np.zeros(len(OBS), int)))
            rew = size * (OBS[:, 0] - act.sum(axis=1)).astype(np.float64)
            fragment = Fragment(0, OBS, act, rew, flags, flags, end, OBS[-1:], extras)
            agent.update(agent.process(fragment), draw, 0.0)
        return agent.policy.mlp.numpy(OBS), agent.value.predict(OBS) / size

    for small, usual in zip(learned(2.0**-12), learned(1.0), strict=True):
        np.testing.assert_allclose(small, usual, rtol=1e-2, atol=1e-2 * abs(usual).max())


@pytest.mark.parametrize("shape", [(5,), (12, 10, 3)], ids=["vector", "image"])
def test_fitting_is_adam_on_minibatches_in_a_random_order(shape):
    """Against torch's Adam and autograd, with the minibatches written out."""
    x = rng(2).standard_normal((20, np.prod(shape)), dtype=np.float32)
    ret = rng(3).normal(0, 50, 20).astype(np.float32)
    fitted, slow = (value_of(shape, (8,), rng()) for _ in range(2))
    for value in (fitted, slow):
        value.merge(ret)
    adam = Adam(Flat(fitted))
    fit = ValueFit(fitted, adam, threads=1)
    loss = fit(x, ret, rng(4), lr=1e-2, epochs=2, minibatch_size=8)
    theirs, order = torch.optim.Adam(slow.parameters(), lr=1e-2), rng(4)
    for _ in range(2):
        errors, rows = [], order.permutation(20)
        for few in (rows[:8], rows[8:16], rows[16:]):
            error = slow(torch.from_numpy(x[few])) - torch.from_numpy(ret[few]) / slow.scale
            theirs.zero_grad()
            error.square().mean().backward()
            theirs.step()
            errors += error.square().tolist()
    assert loss == pytest.approx(np.mean(errors), rel=1e-3)
    np.testing.assert_allclose(fitted.predict(x), slow.predict(x), rtol=1e-2, atol=0.05)
