"""REINFORCE: any observations, its state, and that it learns."""

import numpy as np
import pytest
from helpers.runs import mean_return, train, train_here

from rank0rl.agent import Space, Spaces, Step
from rank0rl.algos.reinforce import Reinforce, ReinforceOptions, inputs
from rank0rl.run import checkpoint


@pytest.mark.fast(1)
@pytest.mark.parametrize("batch", [{"steps_per_batch": 400}, {"episodes_per_batch": 40}])
def test_it_learns_in_both_batch_modes(tmp_path, batch):
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4, "total_steps": 40000}
    options = ReinforceOptions(gamma=0.0, lr=0.05)
    _, run = train_here(Reinforce, options, tmp_path, **kwargs, **batch)
    assert mean_return(run) > 8  # of 10; chance is 2.5


def test_it_takes_observations_of_any_type(tmp_path):
    agent_spaces = Spaces(
        Space("box", (2, 2), "uint8"), Space("discrete", (), "int64", choices=(3,))
    )
    agent = Reinforce(agent_spaces, ReinforceOptions(), np.random.default_rng(0))
    obs = np.ones((5, 2, 2), np.uint8)
    act, _ = agent.act(Step(obs, np.zeros((5, 1), np.float32), np.arange(5)))
    batch = {"obs": inputs(obs), "act": act, "ret": np.arange(5.0), "fragment_id": np.arange(5)}
    assert np.isfinite(agent.update(batch, np.random.default_rng(0), 0.0)["loss"])


def test_state_and_load_give_the_same_next_update():
    spaces = Spaces(Space("box", (2,), "float32"), Space("discrete", (), "int64", choices=(3,)))
    rng = np.random.default_rng(0)
    batch = {
        "obs": rng.random((20, 2), np.float32),
        "act": rng.integers(0, 3, 20),
        "ret": rng.random(20),
    }
    a, b = (Reinforce(spaces, ReinforceOptions(), np.random.default_rng(0)) for _ in range(2))
    a.update(batch, rng, 0.0)
    b.policy.load_state_dict(a.policy.state_dict())
    b.load(checkpoint.snapshot(a.state()))
    for agent in (a, b):
        agent.update(batch, rng, 0.0)
    assert a.flat.vectors[0].tolist() == b.flat.vectors[0].tolist()


@pytest.mark.slow
def test_it_says_once_that_batches_of_steps_cut_returns(tmp_path):
    args = ["CartPole", "--algo", "reinforce", "--num-envs", "4", "--total-steps", "128"]
    sizes = {"steps": ["--steps-per-batch", "64"], "episodes": ["--episodes-per-batch", "4"]}
    said = {mode: train(tmp_path / mode, *args, *size).stdout for mode, size in sizes.items()}
    assert said["steps"].count("note: reinforce has no value function") == 1
    assert "value function" not in said["episodes"]
