"""Changes of an experiment: what they bring, by hand."""

from dataclasses import replace

import pytest
from scaling_examples import FREE, PLAIN

from rank0rl.tools.speedup import cost_model
from rank0rl.tools.speedup.cost_model import iteration, rate
from rank0rl.tools.speedup.prediction import (
    LARGER_BATCH,
    SAME_BATCH,
    changes_that_help,
    crossing,
    grown,
)


@pytest.fixture(autouse=True)
def nobody_sleeps(monkeypatch):
    monkeypatch.setattr(cost_model, "POLL_S", 0.0)


@pytest.mark.parametrize(
    ("costs", "machines", "best"),
    [
        ({}, {}, None),
        ({"update_s": 0.05}, {}, "overlap"),
        ({"arrays": 9}, {"message_s": 1e-2}, "batches of 4 times the steps"),
        ({}, {"latency_s": 1.0}, "batches of 4 times the steps"),
        ({"weights_bytes": 1e6}, {"bandwidth": 1e6}, "batches of 4 times the steps"),
        ({"record_s": 9.0}, {}, None),
    ],
)
def test_changes_that_help_are_named_the_best_first(costs, machines, best):
    costs = replace(PLAIN, **{"update_s": 1e-3, **costs})
    found = changes_that_help(8, costs, replace(FREE, **machines))
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert all(times >= 1.05 for times in found.values())
    assert next(iter(found), None) == best


def test_the_number_of_envs_of_rank_0_helps():
    costs = replace(PLAIN, update_s=0.05)
    assert changes_that_help(8, costs, FREE) == {
        "overlap": pytest.approx(0.15 / 0.11)
    }  # 5 envs, and 11
    equal = replace(costs, overlap=True)
    assert changes_that_help(8, equal, FREE) == {"other --rank0-envs": pytest.approx(0.15 / 0.11)}


def test_parts_help_where_the_link_is_slow():
    slow = replace(FREE, nodes=2, link_bandwidth=1e5)
    # Three quarters of the rows, 0.3 s, travel in the last 0.15 s of collecting; 0.25 s are left.
    assert changes_that_help(4, PLAIN, slow)["--gather-parts 4"] == pytest.approx(0.8 / 0.65)
    assert "--gather-parts 4" not in changes_that_help(4, PLAIN, FREE)


def test_the_number_of_ranks_from_which_rank_0_is_the_bottleneck():
    assert crossing(lambda n: PLAIN, 80, FREE) == 5  # 16 envs of 10 ms, and 0.2 s
    assert crossing(lambda n: PLAIN, 4, FREE) is None
    slow = replace(FREE, bandwidth=80_000 / 0.39)
    assert crossing(lambda n: PLAIN, 80, slow) == 3  # a gather of 0.26 s besides


def test_more_envs():
    larger, same = (grown(PLAIN, 320, name) for name in (LARGER_BATCH, SAME_BATCH))
    assert (larger.steps, larger.update_s, larger.num_envs) == (3200, 0.8, 320)
    assert (same.steps, same.update_s, same.num_envs) == (800, 0.2, 320)
    assert iteration(320, larger, FREE).seconds == pytest.approx(10e-3 + 0.8)
    assert iteration(320, same, FREE).seconds == pytest.approx(2.5e-3 + 0.2)


def test_an_update_limits_the_rate_of_any_number_of_ranks():
    costs = replace(PLAIN, env_s=0.0)
    assert rate(80, costs, FREE) == pytest.approx(800 / 0.2)
    assert rate(4096, grown(costs, 4096, LARGER_BATCH), FREE) == pytest.approx(800 / 0.2)
