"""Dicts of arrays with rows."""

import numpy as np
import pytest

from rank0rl import batch


def test_concatenate_keeps_order_and_axes():
    parts = [{"x": np.full((n, 2), n), "y": np.full(n, n)} for n in (2, 0, 1)]
    whole = batch.concatenate(parts)
    assert whole["x"].tolist() == [[2, 2], [2, 2], [1, 1]]
    assert whole["y"].tolist() == [2, 2, 1]


def test_concatenate_refuses_other_names():
    with pytest.raises(ValueError, match="same names"):
        batch.concatenate([{"x": np.zeros(1)}, {"y": np.zeros(1)}])


def test_concatenate_refuses_other_dtypes_as_a_gather_does():
    with pytest.raises(ValueError, match="same names, dtypes and shapes"):
        batch.concatenate([{"x": np.zeros(1)}, {"x": np.zeros(1, np.int64)}])


def test_a_buffer_rounds_nothing():
    buffer = batch.Buffer(1, 2)
    buffer.write(([0], [0]), x=np.array([1]))
    with pytest.raises(
        ValueError, match="'x' must have one dtype in all steps: got float64 after int64"
    ):
        buffer.write(([0], [1]), x=np.array([0.5]))


def test_count():
    assert batch.count({"x": np.zeros((3, 2)), "y": np.zeros(3)}) == 3
    assert batch.count({}) == 0
    with pytest.raises(ValueError, match=r"same number of rows.*'y': 2"):
        batch.count({"x": np.zeros(3), "y": np.zeros(2)})


def test_in_order_sorts_by_key_and_keeps_the_order_of_equals():
    rows = {"x": np.arange(5)}
    assert batch.in_order(rows, np.array([2, 0, 1, 0, 2]))["x"].tolist() == [1, 3, 2, 0, 4]
    assert batch.in_order(rows, np.array([0, 0, 1, 2, 2])) is rows


def test_minibatches_are_one_pass_in_random_order():
    rows = {"x": np.arange(10), "y": 2 * np.arange(10)}
    parts = list(batch.minibatches(rows, 4, np.random.default_rng(0)))
    assert [len(part["x"]) for part in parts] == [4, 4, 2]
    assert all((part["y"] == 2 * part["x"]).all() for part in parts)
    order = np.concatenate([part["x"] for part in parts]).tolist()
    assert sorted(order) == list(range(10))
    assert order != list(range(10))
