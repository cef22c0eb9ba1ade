"""A callback sees the record, stops, saves and changes coefficients: the same for every nprocs and after a resume."""

import pytest
from runs import SMALL, resume, table, train

from rank0rl.tools import replay

CALLBACK = """
import numpy as np

def schedule(iteration):
    record = iteration.record
    assert "steps_per_s" not in record
    if record["iteration"] == 2:
        iteration.set(lr=np.float64(1e-4), gamma=0.9)
        iteration.save()
    return np.bool_(record["iteration"] < 5)

def each(iteration):
    iteration.set(lr=1e-3 / iteration.record["iteration"])

def hidden(iteration):
    iteration.set(hidden=(8,))

def wrong(iteration):
    iteration.set(gamma=2.0)

def stop(iteration):
    return False

def fails(iteration):
    raise RuntimeError("on purpose")
"""


@pytest.fixture
def words(tmp_path):
    (tmp_path / "calls.py").write_text(CALLBACK)

    def of(name):
        more = ["--callback", f"{tmp_path / 'calls.py'}:{name}", "--checkpoint-every", "100"]
        return [*SMALL, *more, "--total-steps", "640"]

    return of


def hashes(run):
    return [(row["batch_sha256"], row["weights_sha256"], row["lr"]) for row in table(run)]


@pytest.mark.parametrize(
    "more", [pytest.param([], marks=pytest.mark.slow), ["--overlap"]], ids=["", "overlap"]
)
def test_the_same_curve_for_every_nprocs_and_after_a_resume(tmp_path, words, more):
    args = [*words("schedule"), *more]
    train(tmp_path / "one", *args)
    curve = hashes(tmp_path / "one")
    assert [row["lr"] == "0.0001" for row in table(tmp_path / "one")] == [False] * 2 + [True] * 3
    train(tmp_path / "two", *args, nprocs=2)
    train(tmp_path / "three", *args, "--stop-after-iterations", "3", nprocs=3)
    assert (tmp_path / "three" / "checkpoints" / "00000002.pt").exists()
    resume(tmp_path / "three", nprocs=2)
    assert hashes(tmp_path / "two") == hashes(tmp_path / "three") == curve
    assert replay.main([str(tmp_path / "three"), "--iteration", "4", "--env", "1", "--trust"]) == 0
    plain = [word for word in args if "call" not in word]
    train(tmp_path / "plain", *plain)
    assert hashes(tmp_path / "plain")[:2] == curve[:2]
    assert hashes(tmp_path / "plain")[3][0] != curve[3][0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hidden", "PPO reads hidden only at the beginning"),
        ("wrong", "gamma must be in [0, 1]: got 2.0"),
        ("fails", "In the function of --callback, after iteration 1."),
    ],
)
def test_what_is_wrong_is_said(tmp_path, words, name, text):
    done = train(tmp_path / "r", *words(name), expect=1)
    assert text in done.stderr


@pytest.mark.parametrize(
    "more", [[], pytest.param(["--overlap"], marks=pytest.mark.slow)], ids=["", "overlap"]
)
def test_the_last_update_has_what_was_set_after_a_resume_too(tmp_path, words, more):
    args = [*words("each"), *more]
    train(tmp_path / "one", *args)
    train(tmp_path / "two", *args, "--stop-after-iterations", "9")
    resume(tmp_path / "two", nprocs=2)
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")
    assert float(table(tmp_path / "one")[-1]["lr"]) == pytest.approx(1e-3 / 9, rel=1e-5)


def test_a_run_that_was_ended_goes_on_to_the_next_end(tmp_path, words):
    done = train(tmp_path / "r", *words("stop"))
    assert "stopped after iteration 1, as asked" in done.stdout
    resume(tmp_path / "r")
    assert len(table(tmp_path / "r")) == 2
