"""CMA-ES: what it is told, its state, and that it learns."""

import numpy as np
import pytest
from helpers.runs import mean_return, train_here

from rank0rl.agent import Space, Spaces
from rank0rl.algos import cmaes
from rank0rl.algos.cmaes import CMAES, CMAESOptions
from rank0rl.options import OptionError
from rank0rl.run import checkpoint
from rank0rl.run.options import RunOptions

SPACES = Spaces(Space("box", (2,), "float32"), Space("discrete", (), "int64", choices=(2,)))


def make(**options):
    return CMAES(SPACES, CMAESOptions(population=6, **options), np.random.default_rng(0))


def batch(ret):
    n = len(ret)
    obs = {"steps": np.ones(n, int), "obs_mean": np.zeros((n, 2)), "obs_var": np.ones((n, 2))}
    return {"ret": np.float64(ret), "fragment_id": np.arange(n), **obs}


def sphere(agent):
    """Return how near each candidate is to 1."""
    return -np.square(agent.candidates.astype(np.float64) - 1).sum(axis=1)


def test_it_climbs_and_the_center_follows():
    agent = make()
    for i in range(150):
        agent.update(batch(sphere(agent)), np.random.default_rng(i), 0.0)
    np.testing.assert_allclose(agent.nets.theta, 1.0, atol=1e-3)


def test_several_episodes_of_a_candidate_count_by_their_mean():
    agent = make()
    agent.update(batch([*range(6), *range(10, 16)]), np.random.default_rng(0), 0.0)
    assert agent.told[0].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    for run, said in (({"episodes_per_batch": 8}, "a multiple"), ({}, "to 6 or more")):
        with pytest.raises(OptionError, match=said):
            CMAES.check(SPACES, agent.options, RunOptions(**run))
    CMAES.check(SPACES, agent.options, RunOptions(episodes_per_batch=12))
    with pytest.raises(OptionError, match="at most 3,000: got 4,4"):
        make(hidden=(64, 64))


def test_what_was_told_is_told_again():
    one, other = make(), make()
    for i in range(5):
        one.update(batch(sphere(one)), np.random.default_rng(i), 0.0)
    other.nets.theta[:] = 7.0  # as it may be in a checkpoint
    other.load(checkpoint.snapshot(one.state()))
    for agent in (one, other):
        agent.update(batch(sphere(agent)), np.random.default_rng(9), 0.0)
    assert one.candidates.tobytes() == other.candidates.tobytes()
    assert one.nets.theta.tobytes() == other.nets.theta.tobytes()
    assert np.abs(one.candidates).sum() > 0


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.delattr(cmaes, "cma")
    with pytest.raises(OptionError, match="pip install cma"):
        make()


@pytest.mark.fast(1)
@pytest.mark.parametrize("shown", [(0, 1), (20, 40)])  # the second are beyond the limit of +-10
def test_it_learns(shown, tmp_path):
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4, "total_steps": 10000}
    kwargs["env_kwargs"] = dict(zip(("low", "high"), shown, strict=True))
    options = CMAESOptions(population=12)
    _, run = train_here(CMAES, options, tmp_path, **kwargs, episodes_per_batch=24)
    assert mean_return(run) > 8  # of 10; chance is 2.5
