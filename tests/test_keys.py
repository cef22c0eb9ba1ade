"""An actor and a critic that see different keys of a Dict observation."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.policies import not_zero
from helpers.ranks import HERE
from helpers.runs import curve, resume, sha, train, train_here

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.algos.trpo import TRPO, TRPOOptions
from rank0rl.envs.make import make
from rank0rl.envs.spaces import describe
from rank0rl.options import OptionError
from rank0rl.tools.export import _exported, export

KEYS = {"policy_obs": ("seen",), "critic_obs": ("seen", "hidden")}
FLAGS = ["--policy-obs", "seen", "--critic-obs", "seen", "hidden"]
WORLD = "helpers.envs:cartpole_keys"


def spaces():
    env = make(WORLD)
    return env, describe(env)


def test_the_columns_of_each_key():
    env, known = spaces()
    obs, _ = env.reset(seed=3)
    raw, _ = gym.make("CartPole-v1").reset(seed=3)
    assert {*known.obs.parts} == {"seen", "hidden"}
    np.testing.assert_array_equal(obs[known.obs.parts["seen"]], raw[[0, 2]])
    np.testing.assert_array_equal(obs[known.obs.parts["hidden"]], raw[[1, 3]])
    assert describe(gym.make("CartPole-v1")).obs.parts == {}


@pytest.mark.parametrize(("kind", "options"), [(PPO, PPOOptions), (TRPO, TRPOOptions)])
def test_policy_and_value_function_see_their_keys_alone(kind, options):
    _, known = spaces()
    agent = kind(known, options(hidden=(8,), **KEYS), np.random.default_rng(0))
    with torch.no_grad():
        agent.policy.mlp.weights[-1].mul_(100)
    not_zero(agent.value)
    x = np.random.default_rng(1).standard_normal((5, 4), dtype=np.float32)
    other = x.copy()
    other[:, known.obs.parts["hidden"]] += 1
    act = np.zeros(5, np.int64)
    assert agent.policy.log_prob(x, act).tolist() == agent.policy.log_prob(other, act).tolist()
    assert (agent.value.predict(x) != agent.value.predict(other)).all()
    other[:, known.obs.parts["seen"]] += 1
    assert (agent.policy.log_prob(x, act) != agent.policy.log_prob(other, act)).all()


def test_the_run_says_why_updates_are_not_compiled():
    agent = PPO(spaces()[1], PPOOptions(hidden=(8,), **KEYS), np.random.default_rng(0))
    agent.prepare()
    assert agent.steps.how == "by autograd (the policy sees some keys of the observation)"


def test_the_exported_policy_takes_only_its_own():
    env, known = spaces()
    agent = PPO(known, PPOOptions(hidden=(8,), **KEYS), np.random.default_rng(0))
    obs = np.random.default_rng(1).standard_normal((200, 4), dtype=np.float32)
    agent.norm.merge(3 * obs + 1)
    with torch.no_grad():
        agent.policy.mlp.weights[-1].mul_(100)
    program = _exported(agent, env)
    got = program.module()(torch.from_numpy(obs[:, known.obs.parts["seen"]])).numpy()
    expected = agent.policy.mode(torch.from_numpy(agent.norm.numpy(obs))).numpy()
    np.testing.assert_array_equal(got, expected)
    assert 0 < got.mean() < 1
    assert isinstance(agent.policy.mlp.net.weights[0], torch.nn.Parameter)
    agent.flat.check(agent.policy)  # the agent can go on learning


def test_networks_of_ones_own_take_what_they_see():
    class Mine(PPO):
        @staticmethod
        def make_networks(spaces, options, rng):
            return {"policy": torch.nn.Linear(2, 2)}

    agent = Mine(spaces()[1], PPOOptions(**KEYS), np.random.default_rng(0))
    assert isinstance(agent.policy.mlp.net.module, torch.nn.Linear)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"critic_obs": ("state",)}, "--critic-obs must name keys .* got 'state'; .* hidden, seen"),
        ({"policy_obs": ("seen", "seen")}, "--policy-obs must name each key once"),
        ({"policy_obs": ("seen",), "recurrent": "gru"}, "share their memory"),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(OptionError, match=said):
        PPO(spaces()[1], PPOOptions(**options), np.random.default_rng(0))


def test_an_observation_without_keys_is_refused():
    known = describe(gym.make("CartPole-v1"))
    with pytest.raises(OptionError, match="--policy-obs must name keys .* no keys: it is no Dict"):
        PPO(known, PPOOptions(policy_obs=("obs",)), np.random.default_rng(0))


@pytest.mark.slow
def test_the_same_curve_on_any_number_of_ranks_resumed_and_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = [WORLD, *FLAGS, "--num-envs", "4", "--steps-per-batch", "64", "--total-steps", "256"]
    train(tmp_path / "whole", *args, "--env-processes")
    train(tmp_path / "parts", *args, "--stop-after-iterations", "2", nprocs=3)
    resume(tmp_path / "parts", nprocs=2)
    assert len(curve(tmp_path / "whole")) == 4
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert sha(tmp_path / "parts") == sha(tmp_path / "whole")
    text = export(tmp_path / "whole", tmp_path / "policy.pt2", trust=True)
    assert "from observations (N, 2) float32 of the keys seen" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_critic_that_sees_more_lets_the_actor_learn_sooner(seed, tmp_path):
    """40,000 steps: what is right is found where the critic knows the luck of each episode."""
    world = {"env_id": "examples.luck:luck", "seed": seed, "total_steps": 40_000}
    right = {}
    for sees in (("seen", "hidden"), ("seen",)):
        options = PPOOptions(policy_obs=("seen",), critic_obs=sees)
        folder = tmp_path / sees[-1]
        folder.mkdir()
        agent, _ = train_here(PPO, options, folder, **world)
        columns = agent.policy.mlp.columns[0]
        x = np.zeros((2, 3), np.float32)
        x[:, columns.start] = [-1, 1]
        [logp] = agent.policy.distribution(torch.from_numpy(agent.norm.numpy(x)))
        right[sees] = logp.exp().diagonal().mean().item()
    assert right["seen", "hidden"] > 0.96
    assert right["seen", "hidden"] > right["seen",] + 0.02
