"""A2C: its gradient step, its state, and that it learns in both batch modes."""

import numpy as np
import pytest
import torch
from helpers.runs import mean_return, train_here

from rank0rl.agent import Fragment, Space, Spaces
from rank0rl.algos.a2c import A2C, A2COptions
from rank0rl.run import checkpoint

SPACES = Spaces(Space("box", (2,), "float32"), Space("discrete", (), "int64", choices=(3,)))


def make(**options):
    return A2C(SPACES, A2COptions(**options), np.random.default_rng(0))


def batch(adv, ret=0.0):
    rng = np.random.default_rng(0)
    n = len(adv)
    obs, act = rng.standard_normal((n, 2)).astype(np.float32), np.arange(n) % 3
    return {"obs": obs, "act": act, "adv": np.float32(adv), "ret": np.full(n, ret, np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"steps_per_batch": 100}, marks=pytest.mark.slow),
        {"episodes_per_batch": 10},
    ],
)
def test_it_learns_in_both_batch_modes(tmp_path, mode):
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4, "total_steps": 40000}
    _, run = train_here(A2C, A2COptions(gamma=0.5), tmp_path, **kwargs, **mode)
    assert mean_return(run) > 8  # of 10; chance is 2.5


def test_equal_advantages_change_no_policy():
    agent = make(lr=1e-2, hidden=(8,))
    rows = batch([1000.1] * 64, ret=5.0)
    before = [p.clone() for p in agent.policy.parameters()]
    agent.update(rows, np.random.default_rng(0), 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, agent.policy.parameters(), strict=True))


def test_good_actions_become_more_probable_and_values_nearer():
    agent = make(lr=1e-2, hidden=(8,))
    rows = batch([2.0, -1.0, -1.0], ret=5.0)
    before = agent.policy.log_prob(rows["obs"], rows["act"])
    errors = [agent.update(rows, np.random.default_rng(0), 0.0)["value_loss"] for _ in range(30)]
    x = agent.norm.numpy(rows["obs"])
    assert agent.policy.log_prob(x, rows["act"])[0] > before[0]
    assert errors[-1] < errors[0]


def test_what_terminates_has_no_value_afterwards():
    agent = make()
    agent.value.mlp.biases[-1].data.fill_(3.0)
    obs = np.ones((2, 2), np.float32)
    rows = {}
    for over in (False, True):
        flags = np.array([False, over])
        end, act = np.array([1]), np.zeros(2, np.int64)
        fragment = Fragment(0, obs, act, np.zeros(2), flags, ~flags, end, obs[1:])
        rows[over] = agent.process(fragment)["ret"]
    value = agent.value.predict(agent.norm.numpy(obs[1:]))[0]
    assert value != 0
    np.testing.assert_allclose(rows[False][1], 0.99 * value, rtol=1e-5)
    np.testing.assert_allclose(rows[True][1], 0.0, atol=1e-7)


def test_state_and_load_give_the_same_next_update():
    a, b = make(), make()
    rows = batch([1.0, 0.0, 2.0, -1.0])
    a.update(rows, np.random.default_rng(0), 0.0)
    for name, module in b.modules().items():
        module.load_state_dict(a.modules()[name].state_dict())
    b.load(checkpoint.snapshot(a.state()))
    for agent in (a, b):
        agent.update(rows, np.random.default_rng(0), 0.5)
    assert a.flat.vectors[0].tolist() == b.flat.vectors[0].tolist()
