"""Actions of choices and numbers at once: their probabilities, their environments, and what learns them."""

import numpy as np
import pytest
import torch
from helpers.envs import Throw
from helpers.policies import OBS, compare_with_samples, drawn_by, noise_for, rng
from helpers.ranks import HERE
from helpers.runs import curve, resume_on_ranks, sha, table, train, train_here, train_on_ranks

from rank0rl.agent import Space
from rank0rl.algos.cem import CEM
from rank0rl.algos.cmaes import CMAES
from rank0rl.algos.es import ES
from rank0rl.algos.ppo import PPO
from rank0rl.envs.demonstrations import _checked
from rank0rl.envs.spaces import describe, flatten
from rank0rl.nets.policies import make_policy
from rank0rl.options import OptionError
from rank0rl.policy import load
from rank0rl.run.options import RunOptions
from rank0rl.tools.export import export

LOW, HIGH = np.float32([0, 0, -2, 0]), np.float32([3, 1, 2, 1])
SPACE = Space("hybrid", (4,), "float32", choices=(4, 2), low=LOW, high=HIGH)
KINDS = {
    "normal": {"log_std": -0.3},
    "rows": {"log_std": -0.3, "rows": 4},
    "squashed": {"log_std": -0.3, "actions": "squashed"},
    "state": {"log_std": -0.3, "state_std": True},
    "beta": {"actions": "beta"},
}
MASK = np.tile([True, False, True, True, False, True], (33, 1))
ENV = "helpers.envs:Throw-v0"
SMALL = [ENV, "--num-envs", "2", "--steps-per-batch", "256", "--total-steps", "1024"]


def policy_of(kind, seed=0):
    policy = make_policy((5,), SPACE, (16, 16), rng(seed), **KINDS[kind])
    with torch.no_grad():
        policy.mlp.weights[-1] *= 50  # far from uniform
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_others_and_obey_the_mask(kind):
    policy = policy_of(kind)
    noise = noise_for(policy, 33)
    act, extras = policy.act(OBS, noise, MASK)
    draw = extras.get("draw", act)
    assert act.dtype == np.float32
    assert {*act[:, 0]} <= {0, 2, 3}
    assert {*act[:, 1]} == {1}
    for rows in (slice(0, 1), slice(3, 20)):
        some = drawn_by(policy, OBS[rows], noise[rows], MASK[rows])
        assert some.tobytes() == draw[rows].tobytes()
    x, mask = torch.from_numpy(OBS), torch.from_numpy(MASK)
    expected = policy.logp(policy.distribution(x, mask), torch.from_numpy(draw))
    logp = policy.log_prob(OBS, draw, MASK)
    np.testing.assert_allclose(logp, expected.detach(), atol=1e-4, rtol=1e-4)
    best, _ = policy.act(OBS, 0 * noise, MASK, explore=False)
    np.testing.assert_allclose(policy.mode(x, mask).detach(), best, atol=0.1)


@pytest.mark.parametrize("kind", ["normal", "rows", "state"])
def test_entropy_and_divergence_against_samples(kind):
    """E[-log p] and E[log p - log q] over actions of p, within three standard errors."""
    compare_with_samples(policy_of(kind), policy_of(kind, seed=5))


def test_choices_come_first_and_the_environment_gets_its_own_numbers():
    env = flatten(Throw())
    act = describe(env).act
    assert (act.kind, act.shape, act.choices) == ("hybrid", (4,), (2, 2, 2))
    assert act.low.tolist() == [0, 0, 0, 0]
    assert act.high.tolist() == [1, 1, 1, 1]
    own = env.action(np.float32([1, 0, 1, 0.25]))
    assert env.env.action_space.contains(own)
    assert (own["side"], own["far"].tolist(), own["unused"].tolist()) == (2, [0.25], [0, 1])


def test_numbers_of_demonstrations_must_be_choices():
    spaces = describe(flatten(Throw()))
    act = np.float32([[1, 0, 1, 0.25]])
    assert _checked(np.float32([[0.5]]), act, spaces, "x")["act"].tolist() == act.tolist()
    for wrong in (2, 0.5, -1, np.nan):
        act[0, 0] = wrong
        with pytest.raises(OptionError, match="of numbers that this environment takes"):
            _checked(np.float32([[0.5]]), act, spaces, "x")


@pytest.mark.parametrize("of", [CEM, CMAES, ES])
def test_agents_whose_candidates_choose_or_steer_say_that_they_do_not_do_both(of):
    with pytest.raises(OptionError, match="choices, or numbers, and not both at once: set --algo"):
        of.check(describe(flatten(Throw())), of.Options(), RunOptions(episodes_per_batch=40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "more"),
    [
        ("ppo", ["--actions", "squashed", "--env-kwargs", "masks=true"]),
        ("a2c", []),
        ("klppo", []),
        ("trpo", []),
        ("reinforce", []),
    ],
)
def test_one_hash_on_one_rank_and_stopped_and_resumed_on_two(algo, more, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    whole, parts = tmp_path / "1", tmp_path / "2"
    train(whole, *SMALL, "--algo", algo, *more)
    train_on_ranks(parts, *SMALL, "--algo", algo, *more, "--stop-after-iterations", "2", nprocs=2)
    resume_on_ranks(parts, nprocs=2)
    assert curve(parts) == curve(whole)
    assert sha(parts) == sha(whole)


@pytest.mark.slow
def test_a_policy_and_its_program_take_the_same_actions(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    train(tmp_path / "run", *SMALL)
    export(tmp_path / "run", tmp_path / "policy.pt2", trust=True)
    program = torch.export.load(tmp_path / "policy.pt2").module()
    policy = load(tmp_path / "run", trust=True)
    for target in np.linspace(-1, 1, 7, dtype=np.float32):
        act = policy(np.array([target]), deterministic=True)
        [row] = program(torch.tensor([[target]])).numpy()
        assert (act["side"], *act["unused"]) == (row[0] + 1, *row[1:3])
        np.testing.assert_allclose(act["far"], row[3:], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_both_halves_are_learned(seed, tmp_path):
    size = {"num_envs": 2, "steps_per_batch": 256, "total_steps": 12_000, "seed": seed}
    options = PPO.Options(lr=3e-3, gamma=0.0, log_std=-1.0)
    train_here(PPO, options, tmp_path, env_id=ENV, algo="ppo", **size)
    returns = [float(row["return_mean"]) for row in table(tmp_path)]
    assert returns[0] < -4
    assert returns[-1] > -1.5
