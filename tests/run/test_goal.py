"""Runs that end because they are good enough, or get no better."""

import json

import pytest
from helpers.ranks import HERE
from helpers.runs import resume, table, train

from rank0rl.run.hooks import Goal, make_hooks
from rank0rl.run.options import RunOptions

COUNT = ["helpers.envs:Count-v0", "--num-envs", "4", "--steps-per-batch", "64", "--hidden", "8"]


def judge(goal, iteration, ret=None, evaluated="", episodes=100):
    """Let a goal see an iteration; without `ret` no episode has ended in it."""
    record = {"episodes": episodes, "return_mean": ret, "eval_return": evaluated}
    goal.after(None, iteration, {**record, "longest": float("nan") if ret is None else 9.0})
    return goal.ended


def test_a_run_without_a_goal_has_none():
    assert make_hooks(RunOptions(), None, None, None) == []
    (goal,) = make_hooks(RunOptions(stop_at_return=0.0), None, None, None)
    assert isinstance(goal, Goal)


def test_the_mean_return_counts_once_there_are_enough_episodes():
    goal = Goal(RunOptions(stop_at_return=5.0))
    assert judge(goal, 1, 9.0, episodes=99) == ""
    assert judge(goal, 2, 5.0) == "stop_at_return 5"
    assert judge(goal, 3, 14 / 3) == ""


def test_with_evaluations_only_they_count():
    goal = Goal(RunOptions(stop_at_return=5.0, eval_every=2))
    assert judge(goal, 1, 9.0) == ""
    assert judge(goal, 2, 0.0, evaluated=5.0) == "stop_at_return 5"


def test_patience_counts_iterations_since_the_best():
    goal = Goal(RunOptions(patience=2))
    assert goal.ended == ""
    assert [judge(goal, i, ret) for i, ret in enumerate((1.0, 3.0, 3.0), 1)] == [""] * 3
    assert judge(goal, 4) == ""  # no episode has ended: there is no news
    assert judge(goal, 5, 2.0) == "patience 2"


def test_patience_waits_for_the_next_evaluation():
    goal = Goal(RunOptions(patience=2, eval_every=10))
    assert judge(goal, 10, evaluated=1.0) == ""
    assert judge(goal, 15, 5.0) == ""
    assert judge(goal, 20, evaluated=1.0) == "patience 2"


def test_a_goal_goes_on_with_its_state():
    goal, other = Goal(RunOptions(patience=2)), Goal(RunOptions(patience=2))
    judge(goal, 1, 1.0)
    judge(goal, 3, 1.0)
    other.load(goal.state())
    assert other.ended == goal.ended == "patience 2"


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
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
