"""A search with Optuna, whose runs only pretend to train."""

import csv
import json
import os
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from helpers.runs import write_run

from rank0rl.tools.study import search
from rank0rl.tools.study import study as tool
from rank0rl.tools.study.planned import Options
from rank0rl.tools.study.results import TRIALS
from rank0rl.tools.study.search import Search, _score, check

pytestmark = pytest.mark.usefixtures("forked_python")

REST = ["--total-steps", "9000"]


def options(**more):
    return Options(
        **{"envs": ("CartPole",), "search": ("lr=log:1e-4:1e-2",), "seeds": "0:2", "trials": 3}
        | more
    )


def write(out, run, *returns, ended="total_steps 9000"):
    write_run(out / run.name, [*returns], seed=run.options.seed)
    (out / run.name / "summary.json").write_text(json.dumps({"ended": ended}))


def lr(run):
    return float(run.words[run.words.index("--lr") + 1])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"envs": ("CartPole", "Pendulum")}, "one environment and one agent"),
        ({"algo": ("ppo", "trpo")}, "one environment and one agent"),
        ({"grid": ("lr=1,2",)}, "without --grid"),
        ({"search_seeds": "1:3"}, r"got \[1\] in --seeds and in --search-seeds"),
        ({"search": ("lr",)}, "NAME=LOW:HIGH"),
        ({"search": ("lr=2:1",)}, "NAME=LOW:HIGH"),
        ({"search": ("gamma=0.9:2",)}, "gamma must be in"),
        ({"search": ("lr=log:0:1",)}, "NAME=LOW:HIGH"),
        ({"search": ("lr=a|",)}, "NAME=LOW:HIGH"),
        ({"search": ("gamma=0:1",)}, "whole numbers alone: write 0.0:1"),
        ({"search": ("entropy-coef=log:1:10",)}, "whole numbers alone: write log:1.0:10"),
        ({"search": ("lr=1e-4:1e-3", "lr=1e-3:1e-2")}, "each setting once"),
    ],
)
def test_a_wrong_search(more, said):
    with pytest.raises(ValueError, match=said):
        check(options(**more), REST)


def test_the_best_trial_is_found(tmp_path):
    found = []
    searching = Search(options(), REST, tmp_path)
    while run := searching.take():
        assert run.options.seed == 100
        assert 1e-4 <= lr(run) <= 1e-2
        write(tmp_path, run, 0.0, -abs(lr(run) - 1e-3))
        searching.done(run, 0)
        found.append(lr(run))
    assert len(found) == searching.over == 3
    assert float(searching.best()["lr"]) == min(found, key=lambda one: abs(one - 1e-3))
    searching.write()
    rows = [*csv.DictReader((tmp_path / TRIALS).open())]
    assert [row["state"] for row in rows] == ["complete"] * 3


def test_a_trial_has_the_mean_of_its_seeds(tmp_path):
    searching = Search(options(search_seeds="7,9", trials=1), REST, tmp_path)
    for value in (1.0, 4.0):
        run = searching.take()
        write(tmp_path, run, value)
        searching.done(run, 0)
    assert searching.take() is None
    searching.write()
    assert [row["value"] for row in csv.DictReader((tmp_path / TRIALS).open())] == ["2.5"]


def test_a_search_goes_on_with_the_trials_under_way(tmp_path):
    first = Search(options(), REST, tmp_path)
    done, under_way = first.take(), first.take()
    write(tmp_path, done, 1.0)
    other = Search(options(), REST, tmp_path)
    assert other.waits()  # for the trials of the first
    assert not first.stops(
        SimpleNamespace(planned=under_way, part=0.1, row=lambda: {"return_mean": "1"})
    )
    for trial in first._mine.values():
        trial.release()
    again = Search(options(), REST, tmp_path)  # it was killed before it knew
    run = again.take()
    assert run == under_way
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Optuna warns of what it knows already
        assert not again.stops(
            SimpleNamespace(planned=run, part=0.1, row=lambda: {"return_mean": "1"})
        )
    write(tmp_path, run, 2.0)
    again.done(run, 0)
    third = again.take()
    assert third.name == "search/0002/seed100"
    write(tmp_path, third, 0.0)
    again.done(third, 0)
    assert again.take() is None
    assert again.best() == {"lr": f"{lr(run):.6g}"}


def test_a_failed_trial_counts_and_is_never_the_best(tmp_path):
    searching = Search(options(trials=1, search_seeds="7,9"), REST, tmp_path)
    searching.done(searching.take(), 1)
    assert searching.take() is None  # its second seed is not trained
    with pytest.raises(ValueError, match="no trial of the search has come to its end"):
        searching.best()


def with_six_trials(folder, ret, seeds=1):
    """Return a search whose first six trials had this return on their way, and none was stopped."""
    given = options(trials=7, search_seeds=f"100:{100 + seeds}")
    searching = Search(given, REST, folder)
    for _ in range(6 * seeds):
        run = searching.take()
        for part in (0.1, 0.5, 0.9):
            training = SimpleNamespace(planned=run, part=part, row=lambda: {"return_mean": ret})
            assert not searching.stops(training)
        write(folder, run, 100.0)
        searching.done(run, 0)
    return searching


def test_no_run_of_a_trial_is_stopped_in_its_first_quarter(tmp_path):
    searching = with_six_trials(tmp_path, "100", seeds=2)
    runs = [searching.take(), searching.take()]
    assert [run.options.seed for run in runs] == [100, 101]
    first, second = ({"planned": run, "row": lambda: {"return_mean": "1"}} for run in runs)
    for low in (first, second):
        assert not searching.stops(SimpleNamespace(part=0.1, **low))
    assert not searching.stops(SimpleNamespace(part=0.5, **first))  # the second one is at 0.1
    assert searching.stops(SimpleNamespace(part=0.5, **second))


def test_a_curve_below_the_median_is_stopped(tmp_path):
    searching = with_six_trials(tmp_path, "100")
    run = searching.take()
    low = {"planned": run, "row": lambda: {"return_mean": "1"}}
    assert not searching.stops(SimpleNamespace(part=0.1, **low))
    assert searching.stops(SimpleNamespace(part=0.5, **low))
    write(tmp_path, run, 1.0, ended="")
    searching.done(run, 0)
    searching.write()
    assert [*csv.DictReader((tmp_path / TRIALS).open())][-1]["state"] == "pruned"
    unpruned = Search(options(trials=9, prune=False), REST, tmp_path)
    run = unpruned.take()
    low = {"planned": run, "row": lambda: {"return_mean": "1"}}
    assert not unpruned.stops(SimpleNamespace(part=0.5, **low))


def test_a_trial_without_a_return_yet_is_not_stopped(tmp_path):
    with_six_trials(tmp_path, "nan")


@pytest.mark.parametrize(
    ("text", "method"),
    [("1:5", "suggest_int"), ("0.5:1", "suggest_float"), ("a|b c", "suggest_categorical")],
)
def test_ranges(text, method):
    trial = SimpleNamespace(**{method: lambda name, *ends, **_: (name, ends)})
    name, ends = search._suggester("x", text)(trial)
    assert name == "x"
    assert len(ends) == (1 if "|" in text else 2)


def test_scores(tmp_path):
    write_run(tmp_path / "a", [0.0, 10.0])  # at 1000 and 2000 of 9000 steps
    assert _score(tmp_path / "a", "final") == 10.0
    assert _score(tmp_path / "a", "mean") == pytest.approx((5.0 + 7 * 10.0) / 8)
    write_run(tmp_path / "c", [np.nan, -7.0], total_steps=2000)  # the only return, in the last row
    assert _score(tmp_path / "c", "mean") == _score(tmp_path / "c", "final") == -7.0
    write_run(tmp_path / "b", [np.nan])
    assert _score(tmp_path / "b", "final") == -np.inf


@pytest.mark.parametrize("code", [0, 1])
def test_all_runs_of_a_trial_that_is_given_up_are_stopped(code, tmp_path):
    given = options(trials=8, search_seeds="7,9,11", prune=not code)
    searching = Search(given, REST, tmp_path)
    for _ in range(0 if code else 6):
        for _ in range(3):
            run = searching.take()
            training = SimpleNamespace(planned=run, part=0.5, row=lambda: {"return_mean": "100"})
            assert not searching.stops(training)
            write(tmp_path, run, 100.0)
            searching.done(run, 0)
    first, second = searching.take(), searching.take()
    trainings = [
        SimpleNamespace(planned=run, part=0.5, row=lambda: {"return_mean": "1"})
        for run in (first, second)
    ]
    if code:
        searching.done(first, code)
    else:
        assert searching.stops(trainings[0])
        searching.done(first, 0)
    assert searching.stops(trainings[1])
    searching.done(second, 0)
    assert searching.take().options.seed == 7  # of the next trial
    searching.write()
    rows = [*csv.DictReader((tmp_path / TRIALS).open())]
    assert rows[-2]["state"] == ("fail" if code else "pruned")


def test_a_start_does_not_repeat_the_trials_before(tmp_path):
    first = Search(options(), REST, tmp_path)
    runs = [first.take()]
    write(tmp_path, runs[0], 1.0)
    first.done(runs[0], 0)
    runs.append(Search(options(), REST, tmp_path).take())
    assert lr(runs[0]) != lr(runs[1])


def test_another_search_has_another_folder(tmp_path):
    Search(options(), REST, tmp_path)
    for given, rest in ((options(objective="mean"), REST), (options(), [*REST, "--gamma", "0.9"])):
        with pytest.raises(ValueError, match="holds another search: (objective|options) differ"):
            Search(given, rest, tmp_path)


def test_a_refused_search_leaves_the_options_of_the_other_one(tmp_path, capsys):
    Search(options(), [], tmp_path)
    (tmp_path / "study.toml").write_text("of the other one")
    args = ["CartPole", "--search", "gamma=0.9:0.99", "--out", str(tmp_path)]
    assert tool.main(args) == 2
    assert "holds another search" in capsys.readouterr().err
    assert (tmp_path / "study.toml").read_text() == "of the other one"


def test_a_trial_that_cannot_be_fails_alone(tmp_path, capsys):
    given = options(search=("steps_per_batch=4:8",), trials=12)
    searching = Search(given, [*REST, "--num-envs", "4"], tmp_path)
    found = set()
    while run := searching.take():
        found.add(run.options.steps_per_batch)
        write(tmp_path, run, 1.0)
        searching.done(run, 0)
    assert found <= {4, 8}
    assert "steps_per_batch must be a multiple" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a FIFO", "not a regular file"),
        ("a link", "is a link"),
        (b"[" * 100_000 + b"\n", "Optuna did not write it"),
        (b'{"op_code": 99}\n' * 2, "Optuna did not write it"),
        (bytes(search._JOURNAL + 1), "at most"),
    ],
    ids=["FIFO", "link", "deep", "unknown", "large"],
)
def test_a_journal_of_someone_else_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "search" / "optuna.journal"
    path.parent.mkdir()
    if content == "a FIFO":
        os.mkfifo(path)
    elif content == "a link":
        (tmp_path / "outside").touch()
        path.symlink_to(tmp_path / "outside")
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        Search(options(), REST, tmp_path)
    assert "\n" not in str(error.value)


def test_a_trial_of_someone_else_sets_nothing_that_is_not_searched(tmp_path):
    searching = Search(options(), REST, tmp_path)
    trial = optuna.trial.create_trial(
        params={"config": "x.toml"},
        distributions={"config": optuna.distributions.CategoricalDistribution(["x.toml"])},
        value=1e9,
    )
    searching._study.add_trial(trial)
    with pytest.raises(ValueError, match="is not one of this search: expected lr, got config"):
        searching.best()


@pytest.mark.parametrize("value", [[1], "text", 5])
def test_a_journal_of_another_kind_is_one_of_another_search(tmp_path, value):
    Search(options(), REST, tmp_path)._study.set_user_attr("search", value)
    with pytest.raises(ValueError, match="holds another search"):
        Search(options(), REST, tmp_path)


def test_trust_is_no_setting_of_a_search(tmp_path):
    Search(options(), [*REST, "--trust"], tmp_path)
    Search(options(), REST, tmp_path)


@pytest.mark.parametrize("name", ["claim", "optuna.journal.lock"])
def test_a_lock_of_someone_else_is_refused(tmp_path, name):
    (tmp_path / "search").mkdir()
    os.mkfifo(tmp_path / "search" / name)
    with pytest.raises(ValueError, match="not a regular file"):
        Search(options(), REST, tmp_path)


def test_a_lock_ends_with_its_process(tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "claim").touch()
    (tmp_path / "search" / "optuna.journal.lock").touch()  # Optuna's own would wait for it
    begun = time.monotonic()
    assert Search(options(), REST, tmp_path).take()
    assert time.monotonic() < begun + 10


def test_a_line_that_a_power_cut_has_cut_short_is_dropped(tmp_path):
    Search(options(), REST, tmp_path).take()
    journal = tmp_path / "search" / "optuna.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    Search(options(), REST, tmp_path).take()
    lines = whole.splitlines(keepends=True)[:-1]
    assert journal.read_bytes().startswith(b"".join(lines))
    Search(options(), REST, tmp_path).take()  # all lines can be read


def test_a_lock_is_waited_for(tmp_path):
    lock, other = search._Lock(tmp_path), search._Lock(tmp_path)
    lock.acquire()
    waiting = threading.Thread(target=other.acquire)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    lock.release()
    waiting.join(10)
    assert not waiting.is_alive()
    other.release()
