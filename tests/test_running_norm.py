"""The statistics of scripts: those of all rows, the same bits on every rank, in the wrappers of Gymnasium."""

import multiprocessing
import os
import pickle
import types

import gymnasium as gym
import numpy as np
import pytest
from helpers.ranks import on_ranks

import rank0rl
from rank0rl.compat import average
from rank0rl.mpi import comm

ROWS = ([5, 0, 1], [2, 3, 1], [0, 0, 4])  # rank -> rows of each iteration


def rows_of(rank, iteration):
    rng = np.random.default_rng([rank, iteration])
    return rng.normal(100 * (iteration + 1), 3, (ROWS[rank][iteration], 2)).astype(np.float32)


def on_rank_merge():
    """The statistics after each of three iterations, in hexadecimal; and how many were sent how often."""
    norm, other = rank0rl.RunningNorm((2,)), rank0rl.RunningNorm()
    seen = []
    for iteration in range(3):
        for row in rows_of(comm.rank, iteration):
            norm.update(row[None])
            assert norm.count == (len(np.concatenate(all_rows(iteration))) if iteration else 0)
        other.update(np.full(3, comm.rank))
        rank0rl.RunningNorm.merge(norm, other)
        seen.append([norm.count, other.count, *(x.hex() for x in (*norm.mean, *norm.var))])
    rank0rl.chksum(norm.moments, other.moments)
    return [seen, [float(other.mean), float(other.var)]]


def all_rows(iterations):
    n = comm.nworkers
    return [rows_of(rank, i) for i in range(iterations) for rank in range(n)]


@pytest.mark.parametrize("n", [1, 3])
def test_statistics_are_those_of_the_rows_of_all_ranks_and_the_same_bits_on_each(n):
    results = on_ranks(n, "test_running_norm:on_rank_merge")
    seen, other = results[0]
    assert results == [results[0]] * n
    rows = np.empty((0, 2))
    for iteration, (count, others, *figures) in enumerate(seen):
        rows = np.concatenate([rows, *(rows_of(rank, iteration) for rank in range(n))])
        assert [count, others] == [len(rows), 3 * n * (iteration + 1)]
        expected = [*rows.mean(axis=0), *rows.var(axis=0)]
        np.testing.assert_allclose([float.fromhex(x) for x in figures], expected, rtol=1e-10)
    assert other == pytest.approx([(n - 1) / 2, (n**2 - 1) / 12])


def test_many_rows_are_counted_before_they_are_merged(monkeypatch):
    monkeypatch.setattr(average, "_MANY_BYTES", 8000)
    norm, rows = rank0rl.RunningNorm(), np.random.default_rng(0).normal(size=2500)
    same = np.empty(1)  # as an environment that returns its own memory
    for same[0] in rows:
        norm.update(same)
    assert len(norm._rows) == 500
    norm.merge()
    figures = [norm.count, norm.mean, norm.var]
    assert figures == pytest.approx([2500, rows.mean(), rows.var()], rel=1e-10)


def test_before_any_row_it_is_the_identity():
    norm = rank0rl.RunningNorm((3,))
    norm.merge()
    assert [norm.count, *norm.mean, *norm.var] == [0, 0, 0, 0, 1, 1, 1]
    norm.update(np.ones((0, 3)))
    assert norm.scale(np.array([1, 2, 30])).tolist() == [1, 2, 10]


@pytest.mark.parametrize("shape", [(), (3,), (4, 2)])
def test_rows_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"must have the shape \(N, \*\(3,\)\): got"):
        rank0rl.RunningNorm((3,)).update(np.ones(shape))


def test_it_takes_the_place_of_the_statistics_in_gymnasiums_wrappers():
    """Observations 0, 1, 2 and rewards 1, of which the first iteration is not scaled, and the next one is."""

    class Count(gym.Env):
        observation_space = gym.spaces.Box(-9, 9, (1,), np.float64)
        action_space = gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.t = 0
            return np.zeros(1), {}

        def step(self, action):
            self.t += 1
            return np.full(1, float(self.t)), 1.0, False, False, {}

    def make():
        return gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(Count()), gamma=0.5)

    envs = gym.vector.SyncVectorEnv([make, make])
    norms = rank0rl.RunningNorm((1,)), rank0rl.RunningNorm()
    envs.set_attr("obs_rms", norms[0])
    envs.set_attr("return_rms", norms[1])
    first = [envs.reset()[0], *(envs.step([0, 0])[0] for _ in range(2))]
    assert np.concatenate(first)[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    rank0rl.RunningNorm.merge(*norms)
    assert [norms[0].count, *norms[0].mean, *norms[0].var] == pytest.approx([6, 1, 2 / 3])
    assert [norms[1].count, norms[1].mean, norms[1].var] == pytest.approx([4, 1.25, 0.0625])
    obs, reward, *_ = envs.step([0, 0])
    np.testing.assert_allclose(obs[:, 0], 2 / (2 / 3) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(obs, norms[0].scale(np.full((2, 1), 3.0)), rtol=1e-6)
    np.testing.assert_allclose(reward, 1 / 0.25, rtol=1e-6)


def on_rank_disagree():
    norms = [rank0rl.RunningNorm((2 + comm.rank,)), rank0rl.RunningNorm()]
    errors = []
    for passed in (
        norms[:1],
        norms[1:] * (1 + comm.rank),
        (norms[1], 5 if comm.rank else norms[1]),
    ):
        try:
            rank0rl.RunningNorm.merge(*passed)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_pass_others_get_the_same_error():
    first, second = on_ranks(2, "test_running_norm:on_rank_disagree")
    assert first == second
    assert len(first) == 3
    assert "rank 1: expected RunningNorms: got int, number 1" in first[2]


def test_rows_that_nobody_merges_are_refused(monkeypatch):
    """In a process of the rank's: a fork, or a copy that was pickled. It may scale."""
    norm = pickle.loads(pickle.dumps(rank0rl.RunningNorm((2,))))
    norm.update(np.ones((1, 2)))
    parent = types.SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    assert norm.scale(np.zeros(2)).tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="put the environments into a SyncVectorEnv"):
        norm.update(np.ones((1, 2)))
    rank0rl.RunningNorm((2,)).merge()
    parent.pid = 1
    norm.update(np.ones((1, 2)))
