"""One environment of one iteration, repeated alone, gives the same data."""

from types import SimpleNamespace

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, replay, resume, train, train_on_ranks

from rank0rl.tools.replay import _CannotReplayError, _check_starts, main

pytestmark = pytest.mark.usefixtures("forked_python")


def files(folder):
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["env", "episode"])
def test_a_fragment_of_a_run_on_two_ranks_is_the_same_alone(kind, tmp_path):
    size = ["--steps-per-batch", "256"] if kind == "env" else ["--episodes-per-batch", "4"]
    args = ["CartPole", "--num-envs", "4", "--minibatch-size", "32", *size]
    stop = ["--stop-after-iterations", "7", "--checkpoint-every", "3", "--keep-checkpoints", "2"]
    train_on_ranks(tmp_path, *args, *stop, nprocs=2)
    before = files(tmp_path)
    done = replay(tmp_path, 7, **{kind: 2})
    assert "00000006.pt: training 0 iterations again" in done.stdout
    assert done.stdout.count("the same data") == 2
    done = replay(tmp_path, 3, **{kind: 3})
    assert "the beginning of the run: training 2 iterations again" in done.stdout
    assert done.stdout.count("the same data") == 2
    done = replay(tmp_path, 8, **{kind: 0})  # the next one, which has no record yet
    assert done.stdout.count("the same data") == 1
    said = replay(tmp_path, 9, **{kind: 0}, expect=2).stderr
    assert all(fact in said for fact in ("7 iterations", "at most 8", "got 9"))
    assert files(tmp_path) == before
    csv = tmp_path / "progress.csv"
    rows = csv.read_text().splitlines()
    digest = rows[0].split(",").index("batch_sha256")
    wrong = rows[7].split(",")
    wrong[digest] = "0" * 16
    csv.write_text("\n".join([*rows[:7], ",".join(wrong), ""]))
    said = replay(tmp_path, 7, **{kind: 2}, expect=1).stdout
    assert "0000000000000000: DIFFERENT data" in said


@pytest.mark.slow
def test_a_failure_says_how_to_repeat_it_and_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Breaks-v0", "--num-envs", "3", "--steps-per-batch", "60"]
    failed = train(tmp_path / "r", *args, "--total-steps", "600", nprocs=3, expect=1)
    assert "ZeroDivisionError" in failed.stderr
    line = next(line for line in failed.stderr.splitlines() if line.startswith("To repeat it"))
    assert line.endswith(f"python -m rank0rl replay {tmp_path / 'r'} --iteration 2 --env 1")
    note = next(line for line in failed.stderr.splitlines() if "Breaks-v0" in line)
    assert all(fact in note for fact in ("iteration 2", "step 31", "action [")), note
    again = replay(tmp_path / "r", 2, env=1, expect=1)
    assert "ZeroDivisionError" in again.stderr
    replay(tmp_path / "r", 1, env=1)


@pytest.mark.slow
def test_an_error_of_the_run_keeps_its_traceback(tmp_path):
    agent = tmp_path / "mine.py"
    agent.write_text(
        "from rank0rl.algos.ppo import PPO\n"
        "class Mine(PPO):\n"
        "    def process(self, fragment):\n"
        "        raise ValueError('of my own')\n"
    )
    train(tmp_path / "r", *SMALL, "--algo", f"{agent}:Mine", expect=1)
    again = replay(tmp_path / "r", 1, env=0, expect=1)
    assert "Traceback" in again.stderr
    assert "of my own" in again.stderr


def refused(capsys, folder, iteration, **which):
    """Return what replay says of a wrong use, in this process."""
    words = [word for name, value in which.items() for word in (f"--{name}", str(value))]
    assert main([str(folder), "--iteration", str(iteration), *words]) == 2
    return capsys.readouterr().err


def test_wrong_use(tmp_path, capsys):
    assert "checkpoint" in refused(capsys, tmp_path, 1, env=0)
    train(tmp_path, *SMALL, "--stop-after-iterations", "1")
    for given, facts in (
        ({"env": 4}, ("from 0 to 3", "got 4")),
        ({"env": -1}, ("from 0 to 3", "got -1")),
        ({"episode": 2}, ("fixed-step", "expected --env alone", "got --episode 2")),
        ({"env": 1, "episode": 2}, ("expected --env alone", "got --env 1 and --episode 2")),
        ({}, ("expected --env alone", "got neither")),
    ):
        said = refused(capsys, tmp_path, 1, **given)
        assert all(fact in said for fact in facts), said
    assert "at least 1: got 0" in refused(capsys, tmp_path, 0, env=0)


def test_a_start_without_a_record_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("[[record]]\niteration = 2\nsettings = {}\n")
    start = SimpleNamespace(run=tmp_path, file=tmp_path / "00000001.pt", boundary=1)
    with pytest.raises(_CannotReplayError, match=r"no \[\[record\]\] of the start .* iteration 2"):
        _check_starts(start, 2)


@pytest.mark.slow
def test_wrong_use_in_whole_episode_batches(tmp_path):
    size = ["--episodes-per-batch", "4", "--stop-after-iterations", "1"]
    train(tmp_path, "CartPole", "--num-envs", "2", "--minibatch-size", "32", *size)
    for given, facts in (
        ({"episode": 4}, ("from 0 to 3", "got 4")),
        ({"env": 1}, ("whole-episode", "expected --episode alone", "got --env 1")),
    ):
        said = replay(tmp_path, 1, **given, expect=2).stderr
        assert all(fact in said for fact in facts), said


@pytest.mark.slow
def test_iterations_before_a_changed_schedule_are_replayed_with_their_own(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "640", "--checkpoint-every", "5")
    resume(tmp_path, "--total-steps", "960")
    assert replay(tmp_path, 9, env=0).stdout.count("the same data") == 2
    (tmp_path / "checkpoints" / "00000010.pt").unlink()
    assert "after iteration 10" in replay(tmp_path, 13, env=0, expect=2).stderr
    assert replay(tmp_path, 9, env=0).stdout.count("the same data") == 2


@pytest.mark.slow
def test_a_changed_schedule_is_replayed_where_its_checkpoints_are(tmp_path):
    args = ["--total-steps", "640", "--stop-after-iterations", "3", "--keep-checkpoints", "1"]
    train(tmp_path, *SMALL, *args)
    resume(tmp_path, "--total-steps", "1280", "--stop-after-iterations", "4")
    said = replay(tmp_path, 3, env=0, expect=2).stderr
    assert "changed after iteration 3" in said
    resume(tmp_path, "--stop-after-iterations", "6")
    assert replay(tmp_path, 7, env=0).stdout.count("the same data") == 1
