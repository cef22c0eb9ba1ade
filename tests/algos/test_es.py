"""Evolution strategies: what the candidates are, and the step that their returns give."""

import numpy as np
import pytest
import torch
from helpers.runs import mean_return, train_here

from rank0rl.agent import Fragment, Space, Spaces, Step
from rank0rl.algos.es import ES, ESOptions
from rank0rl.evaluation import Deterministic
from rank0rl.nets.normalize import ObsNormalizer
from rank0rl.options import OptionError
from rank0rl.run.options import RunOptions

BOX = Spaces(Space("box", (3,), "float32"), Space("box", (2,), "float32"))


def make(spaces=BOX, **options):
    return ES(spaces, ESOptions(**options), np.random.default_rng(0))


def batch(ret):
    n = len(ret)
    figures = {"obs_mean": np.zeros((n, 3)), "obs_var": np.ones((n, 3))}
    steps = np.ones(n, np.int64)
    return {"ret": np.float64(ret), "fragment_id": np.arange(n), "steps": steps, **figures}


def test_the_center_acts_where_nothing_learns():
    es, obs = make(std=0.3), np.ones((1, 3), "f")
    acts = [
        agent.act(Step(obs, np.zeros((1, 0)), np.zeros(1, np.int64), explore=explore))[0]
        for agent, explore in ((es, True), (es, False), (Deterministic.of(es, False), True))
    ]
    assert not np.array_equal(acts[0], acts[1])
    assert np.array_equal(acts[1], acts[2])


@pytest.mark.parametrize("hidden", [(), (5,), (5, 4)])
def test_each_row_is_acted_by_its_candidate_whatever_else_there_is(hidden):
    es = make(hidden=hidden, std=0.3)
    obs = np.random.default_rng(1).standard_normal((4, 3), dtype=np.float32)
    ids = np.array([3, -1, 0, 3])
    act, _ = es.act(Step(obs, np.zeros((4, 0)), ids))
    center = es.nets.theta.copy()
    for i, number in enumerate(ids):
        [alone], _ = es.act(Step(obs[i : i + 1], np.zeros((1, 0)), ids[i : i + 1]))
        assert alone.tobytes() == act[i].tobytes()
        es.nets.theta[:] = center if number < 0 else es.candidate(number)
        with torch.no_grad():
            expected = es.nets.mlp(torch.from_numpy(obs[i : i + 1])).numpy()[0]
        es.nets.theta[:] = center
        np.testing.assert_allclose(act[i], expected, rtol=1e-5, atol=1e-6)


def test_candidates_come_in_pairs_and_change_with_the_key():
    es = make(std=0.3)
    plus, minus = es.candidate(4) - es.nets.theta, es.candidate(5) - es.nets.theta
    np.testing.assert_allclose(plus, -minus, atol=1e-6)
    np.testing.assert_allclose(plus, 0.3 * es.noise_of(2), atol=1e-6)
    assert not np.allclose(es.noise_of(1), es.noise_of(2))
    before = es.noise_of(2)
    es.update(batch([1.0, 2.0]), np.random.default_rng(0), 0.0)
    assert not np.allclose(before, es.noise_of(2))


def test_the_step_goes_along_the_noise_weighted_by_ranks():
    es = make(weight_decay=0.0, std=0.1)
    noise = np.stack([es.noise_of(0), -es.noise_of(0), es.noise_of(1), -es.noise_of(1)])
    before = es.nets.theta.copy()
    es.update(batch([7.0, -900.0, 2.0, 3.0]), np.random.default_rng(0), 0.0)
    ranks = np.array([0.375, -0.375, -0.125, 0.125])
    gradient = (ranks[:, None] * noise).sum(0) / (4 * 0.1)
    step = es.nets.theta - before
    np.testing.assert_allclose(step, 0.02 * np.sign(gradient), rtol=1e-3)  # Adam's first step


def test_equal_returns_move_nothing_but_weight_decay():
    es = make(weight_decay=0.0)
    before = es.nets.theta.copy()
    es.update(batch([5.0] * 6), np.random.default_rng(0), 0.0)
    np.testing.assert_array_equal(es.nets.theta, before)
    es = make(weight_decay=0.1)
    before = np.abs(es.nets.theta)
    es.update(batch([5.0] * 6), np.random.default_rng(0), 0.0)
    assert (np.abs(es.nets.theta)[before > 0.02] < before[before > 0.02]).all()


def test_statistics_of_observations_are_those_of_all_rows():
    rng = np.random.default_rng(0)
    episodes = [rng.standard_normal((n, 3)).astype(np.float32) + n for n in (4, 1, 7)]
    es, rows = make(), []
    for number, obs in enumerate(episodes):
        flags = np.zeros(len(obs), bool)
        ends = flags.copy()
        ends[-1] = True
        rows.append(
            es.process(
                Fragment(number, obs, obs, np.ones(len(obs)), ends, flags, np.array([1]), obs[-1:])
            )
        )
    together = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    es.update({**together, "fragment_id": np.arange(3)}, rng, 0.0)
    expected = ObsNormalizer((3,))
    expected.merge(np.concatenate(episodes))
    np.testing.assert_allclose(es.nets.norm.shift, expected.shift, rtol=1e-6)
    np.testing.assert_allclose(es.nets.norm.scale, expected.scale, rtol=1e-6)
    assert together["ret"].tolist() == [4.0, 1.0, 7.0]


def test_it_learns(tmp_path):
    kwargs = {"env_id": "helpers.envs:Identity-v0", "num_envs": 4}
    (tmp_path / "a").mkdir()
    _, run = train_here(
        ES, ESOptions(lr=0.1), tmp_path / "a", **kwargs, total_steps=20000, episodes_per_batch=20
    )
    assert mean_return(run) > 8  # of 10; chance is 2.5


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"steps_per_batch": 64}, "set --episodes-per-batch to 2 or more"),
        ({"episodes_per_batch": 1}, "got episodes_per_batch=1"),
        ({"episodes_per_batch": 8, "overlap": True}, "leave it out"),
        ({"episodes_per_batch": 9}, "in pairs: got episodes_per_batch=9"),
    ],
)
def test_batches_that_compare_nothing_are_refused(run, said):
    with pytest.raises(OptionError, match=said):
        ES.check(BOX, ESOptions(), RunOptions(**run))


def test_a_run_that_begins_with_another_one_has_noise_of_its_own():
    es = make()
    before = es.noise_of(0)
    es.update(batch([1.0, 2.0]), np.random.default_rng(0), 0.0)
    es.modules_loaded()
    assert es.noise_of(0).tolist() == before.tolist()
