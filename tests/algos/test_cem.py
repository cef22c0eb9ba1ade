"""The cross-entropy method: its candidates, and that it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.runs import mean_return, train_here

from rank0rl.agent import Space, Spaces, Step
from rank0rl.algos.cem import CEM, CEMOptions
from rank0rl.mpi.weights import named_tensors
from rank0rl.options import OptionError
from rank0rl.run import checkpoint
from rank0rl.run.options import RunOptions

SPACES = Spaces(Space("box", (3,), "float32"), Space("box", (2,), "float32"))


def test_an_episode_is_acted_by_one_candidate():
    cem = CEM(SPACES, CEMOptions(population=5), np.random.default_rng(0))
    obs = np.random.default_rng(1).standard_normal((4, 3), dtype=np.float32)
    cem.mean[:] = 7.0
    act, _ = cem.act(Step(obs, np.zeros((4, 0)), np.array([3, 0, 1, 4])))
    for i, weights in enumerate(cem.candidates[[3, 0, 1, 4]]):
        np.testing.assert_allclose(act[i], obs[i] @ weights, rtol=1e-5)
    act, _ = cem.act(Step(obs, np.zeros((4, 0)), np.arange(4), explore=False))
    np.testing.assert_allclose(act, obs @ cem.mean, rtol=1e-5)


def test_each_choice_is_the_one_with_the_highest_number():
    several = Space("discrete", (2,), "int64", choices=(2, 3))
    cem = CEM(Spaces(SPACES.obs, several), CEMOptions(), np.random.default_rng(0))
    cem.candidates[0] = [[1, 0, 5, 9, 7], [0, 1, 9, 5, 7], [0, 0, 0, 0, 10]]
    step = Step(np.eye(3, dtype=np.float32), np.zeros((3, 0)), np.zeros(3, int))
    act, _ = cem.act(step)
    np.testing.assert_array_equal(act, [[0, 1], [1, 0], [0, 2]])
    mask = np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], bool)
    act, _ = cem.act(replace(step, mask=mask))
    np.testing.assert_array_equal(act, [[1, 2], [1, 0], [0, 0]])


def test_the_next_candidates_are_drawn_around_the_best():
    spaces = Spaces(Space("box", (2,), "float32"), Space("discrete", (), "int64", choices=(2,)))
    cem = CEM(spaces, CEMOptions(population=8, extra_std=0.5), np.random.default_rng(0))
    before = cem.candidates.copy()
    ret = np.array([0.0, 5, 1, 2, 9, 3, 4, 1])
    cem.update({"ret": ret, "candidate": before}, np.random.default_rng(0), 0.25)
    np.testing.assert_allclose(cem.mean, (before[4] + before[1]) / 2, rtol=1e-6)
    np.testing.assert_allclose(cem.std, abs(before[4] - before[1]) / 2, rtol=1e-5)
    noise = np.random.default_rng(0).standard_normal(before.shape)
    np.testing.assert_allclose(
        cem.candidates, cem.mean + (cem.std + 0.25) * noise, rtol=1e-5, atol=1e-6
    )
    twin = CEM(spaces, CEMOptions(population=8), np.random.default_rng(1))
    twin.load(checkpoint.snapshot(cem.state()))
    assert twin.std.tolist() == cem.std.tolist()


def test_a_run_that_begins_with_another_one_draws_candidates_around_its_mean():
    cem = CEM(SPACES, CEMOptions(std=3.0), np.random.default_rng(0))
    first = cem.candidates.copy()
    modules = {
        name: torch.full(x.shape, 7.0, dtype=x.dtype)
        for name, x in named_tensors(cem.modules()).items()
    }
    checkpoint.load_weights(cem, modules, "x")  # those of a run that has converged
    assert (cem.candidates == 7).all()
    cem.modules_loaded()
    np.testing.assert_allclose(cem.candidates, 7.0 + first, rtol=1e-6)


def test_batches_that_cut_episodes_are_refused():
    """A candidate would get what is left of its predecessor's episode."""
    with pytest.raises(OptionError, match="whole episodes.*set --episodes-per-batch to 2 or more"):
        CEM.check(SPACES, CEMOptions(), RunOptions(steps_per_batch=400))
    with pytest.raises(OptionError, match="got episodes_per_batch=41 for a population of 40"):
        CEM.check(SPACES, CEMOptions(), RunOptions(episodes_per_batch=41))
    CEM.check(SPACES, CEMOptions(), RunOptions(episodes_per_batch=40, overlap=True))


def test_a_few_candidates_keep_a_spread():
    cem = CEM(SPACES, CEMOptions(population=4), np.random.default_rng(0))
    batch = {"ret": np.arange(4.0), "candidate": cem.candidates.copy()}
    cem.update(batch, np.random.default_rng(0), 1.0)
    assert cem.std.all()


def test_it_learns(tmp_path):
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 40, "total_steps": 20000}
    _, run = train_here(CEM, CEMOptions(), tmp_path, **kwargs, episodes_per_batch=40)
    assert mean_return(run) > 8  # of 10; chance is 2.5
