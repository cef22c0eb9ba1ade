"""One lane of one iteration again, alone, is the same data."""

import sys

import pytest
from on_ranks import HERE, run
from runs import SMALL, resume, train


def replay(folder, iteration, lane, expect=0):
    command = [sys.executable, "-m", "rank0rl", "replay", str(folder)]
    done = run([*command, "--iteration", str(iteration), "--lane", str(lane)])
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def files(folder):
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("mode", ["steps", pytest.param("episodes", marks=pytest.mark.slow)])
def test_a_lane_of_a_run_on_two_ranks_is_the_same_alone(mode, tmp_path):
    size = ["--episodes-per-batch", "4"] if mode == "episodes" else ["--steps-per-batch", "256"]
    args = ["CartPole", "--num-envs", "4", "--minibatch-size", "32", *size]
    stop = ["--stop-after-iterations", "7", "--checkpoint-every", "3", "--keep-checkpoints", "2"]
    train(tmp_path, *args, *stop, nprocs=2)
    before = files(tmp_path)
    done = replay(tmp_path, 7, 2)
    assert "00000006.pt: training 0 iterations again" in done.stdout
    assert done.stdout.count("the same data") == 2
    done = replay(tmp_path, 3, 3)
    assert "the beginning of the run: training 2 iterations again" in done.stdout
    assert done.stdout.count("the same data") == 2
    done = replay(tmp_path, 8, 0)  # the next one
    assert "not recorded this iteration" in done.stdout
    assert "has made 7 iterations: got iteration 9" in replay(tmp_path, 9, 0, expect=2).stderr
    assert files(tmp_path) == before
    csv = tmp_path / "progress.csv"
    rows = csv.read_text().splitlines()
    digest = rows[0].split(",").index("batch_sha256")
    wrong = rows[7].split(",")
    wrong[digest] = "0" * 16
    csv.write_text("\n".join([*rows[:7], ",".join(wrong)]))
    assert "recorded 0000000000000000: DIFFERENT data" in replay(tmp_path, 7, 2, 1).stdout


def test_a_failure_says_how_to_repeat_it_and_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["toy_envs:Breaks-v0", "--num-envs", "3", "--steps-per-batch", "60"]
    failed = train(tmp_path / "r", *args, "--total-steps", "600", nprocs=3, expect=1)
    assert "ZeroDivisionError" in failed.stderr
    line = next(line for line in failed.stderr.splitlines() if line.startswith("To repeat it"))
    assert line.endswith(f"python -m rank0rl replay {tmp_path / 'r'} --iteration 2 --lane 1")
    assert "In unit 1 of iteration 2: Breaks-v0, episode of seed" in failed.stderr
    assert ", step 31, action [" in failed.stderr
    again = replay(tmp_path / "r", 2, 1, expect=1)
    assert "ZeroDivisionError" in again.stderr
    replay(tmp_path / "r", 1, 1)


@pytest.mark.slow
def test_an_error_of_the_run_keeps_its_traceback(tmp_path):
    agent = tmp_path / "mine.py"
    agent.write_text(
        "from algos.ppo import PPO\n"
        "class Mine(PPO):\n"
        "    def process(self, fragment):\n"
        "        raise ValueError('of my own')\n"
    )
    train(tmp_path / "r", *SMALL, "--algo", f"{agent}:Mine", expect=1)
    again = replay(tmp_path / "r", 1, 0, expect=1)
    assert "Traceback" in again.stderr
    assert "of my own" in again.stderr


def test_wrong_use(tmp_path):
    assert "cannot read a checkpoint: there is none" in replay(tmp_path, 1, 0, expect=2).stderr
    train(tmp_path, *SMALL, "--stop-after-iterations", "1")
    assert "from 0 to 3: got iteration 1, lane 4" in replay(tmp_path, 1, 4, expect=2).stderr
    assert "got iteration 0, lane 0" in replay(tmp_path, 0, 0, expect=2).stderr


@pytest.mark.slow
def test_iterations_before_a_changed_schedule_are_replayed_with_their_own(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "640", "--checkpoint-every", "5")
    resume(tmp_path, "--total-steps", "960")
    assert replay(tmp_path, 9, 0).stdout.count("the same data") == 2


@pytest.mark.slow
def test_a_changed_schedule_is_replayed_where_its_checkpoints_are(tmp_path):
    args = ["--total-steps", "640", "--stop-after-iterations", "3", "--keep-checkpoints", "1"]
    train(tmp_path, *SMALL, *args)
    resume(tmp_path, "--total-steps", "1280", "--stop-after-iterations", "4")
    said = replay(tmp_path, 3, 0, expect=2).stderr
    assert "the length of this run was changed after iteration 3" in said
    resume(tmp_path, "--stop-after-iterations", "6")
    assert replay(tmp_path, 7, 0).stdout.count("the same data") == 1
