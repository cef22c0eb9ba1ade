"""Runs that end because they are good enough, or get no better."""

import json
from collections import deque

import numpy as np
import pytest
from on_ranks import HERE
from runs import resume, table, train

from rank0rl.run.hooks import goal_of
from rank0rl.run.options import RunOptions

COUNT = ["toy_envs:Count-v0", "--num-envs", "4", "--steps-per-batch", "64", "--hidden", "8"]


def episodes(*returns, most=3):
    return deque(returns, maxlen=most)


def test_a_run_without_a_goal_has_none():
    assert goal_of(RunOptions()) is None


def test_the_mean_return_counts_once_there_are_enough_episodes():
    goal = goal_of(RunOptions(stop_at_return=5.0))
    goal.judge(1, episodes(9.0, 9.0), 2, None)
    assert goal.reached() == ""
    goal.judge(2, episodes(9.0, 5.0, 1.0), 1, None)
    assert goal.reached() == "stop_at_return 5"
    goal.judge(3, episodes(5.0, 5.0, 4.0), 1, None)
    assert goal.reached() == ""


def test_with_evaluations_only_they_count():
    goal = goal_of(RunOptions(stop_at_return=5.0, eval_every=2))
    goal.judge(1, episodes(9.0, 9.0, 9.0), 3, None)
    assert goal.reached() == ""
    goal.judge(2, episodes(0.0, 0.0, 0.0), 3, np.array([4.0, 6.0]))
    assert goal.reached() == "stop_at_return 5"


def test_patience_counts_iterations_since_the_best():
    goal = goal_of(RunOptions(patience=2))
    assert goal.reached() == ""
    for iteration, ret in enumerate((1.0, 3.0, 3.0), 1):
        goal.judge(iteration, episodes(ret, most=1), 1, None)
    assert goal.reached() == ""
    goal.judge(4, episodes(3.0, most=1), 0, None)
    assert goal.reached() == ""  # no episode has ended: there is no news
    goal.judge(5, episodes(2.0, most=1), 1, None)
    assert goal.reached() == "patience 2"


def test_patience_waits_for_the_next_evaluation():
    goal = goal_of(RunOptions(patience=2, eval_every=10))
    goal.judge(10, episodes(), 0, np.array([1.0]))
    goal.judge(15, episodes(5.0), 1, None)
    assert goal.reached() == ""
    goal.judge(20, episodes(), 0, np.array([1.0]))
    assert goal.reached() == "patience 2"


def test_a_goal_goes_on_with_its_state():
    goal, other = goal_of(RunOptions(patience=2)), goal_of(RunOptions(patience=2))
    goal.judge(1, episodes(1.0, most=1), 1, None)
    goal.judge(3, episodes(1.0, most=1), 1, None)
    other.load(goal.state())
    assert other.reached() == goal.reached() == "patience 2"


@pytest.mark.parametrize("resumed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_ends_at_its_goal_also_after_a_resume(resumed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    options = [*COUNT, "--total-steps", "1280"]
    first = ["--stop-after-iterations", "3"] if resumed else []
    done = train(tmp_path, *options, "--patience", "6", *first)
    if resumed:
        done = resume(tmp_path)
    assert "as asked (patience 6); go on with" in done.stdout
    made = len(table(tmp_path))
    assert 6 < made < 20
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "patience 6"
    assert "has ended, by patience 6: to go on, raise --patience" in resume(tmp_path).stdout
    resume(tmp_path, "--patience", "8")
    assert len(table(tmp_path)) == made + 2
