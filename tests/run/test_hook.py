"""A hook of one's own sees the record, adds columns, stops, saves and changes coefficients: the same for every nprocs and after a resume."""

import json
import re

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, resume, table, train

from rank0rl.tools import replay

HOOKS = """
from dataclasses import replace
import numpy as np
from rank0rl import Hook

class Schedule(Hook):
    def __init__(self):
        self.seen = []

    def before(self, iteration):
        assert self.folder.is_dir()
        assert self.settings["num_envs"] == 4
        self.seen.append(iteration)

    def after(self, agent, iteration, record):
        assert "steps_per_s" not in record
        assert record.numbers["speed/steps_per_s"] > 0
        assert self.seen == [*range(1, record["iteration"] + 1)]
        if iteration == 2:
            agent.options = replace(agent.options, lr=np.float64(1e-4), gamma=0.9)
            for weight in agent.policy.parameters():
                weight.data *= 0.5
            self.save()
        if iteration == 5:
            self.stop()

    def columns(self):
        return {"seen": len(self.seen)}

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = state["seen"]

class Each(Hook):
    def after(self, agent, iteration, record):
        agent.options = replace(agent.options, lr=1e-3 / iteration)

class Hidden(Hook):
    def after(self, agent, iteration, record):
        agent.options = replace(agent.options, hidden=(8,))

class Wrong(Hook):
    def after(self, agent, iteration, record):
        agent.options = replace(agent.options, gamma=2.0)

class Stop:  # what it lacks comes from Hook
    def after(self, agent, iteration, record):
        self.stop("enough")

class FailsBefore(Hook):
    def before(self, iteration):
        assert iteration < 2

class ChangesBefore(Hook):
    def before(self, iteration):
        if iteration == 2:
            self.agent.options = replace(self.agent.options, lr=1e-3)

    def after(self, agent, iteration, record):
        self.agent = agent

class Robs(Hook):
    def after(self, agent, iteration, record):
        record.clear()

class Fails(Hook):
    def after(self, agent, iteration, record):
        raise RuntimeError("on purpose")

class Twice(Hook):
    def columns(self):
        return {"steps": 1.0}
"""


@pytest.fixture
def words(tmp_path):
    (tmp_path / "mine.py").write_text(HOOKS)

    def of(name):
        more = ["--hook", f"{tmp_path / 'mine.py'}:{name}", "--checkpoint-every", "100"]
        return [*SMALL, *more, "--total-steps", "640"]

    return of


def hashes(run):
    return [(row["batch_sha256"], row["weights_sha256"], row["lr"]) for row in table(run)]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--overlap"]], ids=["", "overlap"])
def test_the_same_curve_for_every_nprocs_and_after_a_resume(tmp_path, words, more):
    args = [*words("Schedule"), *more]
    train(tmp_path / "one", *args)
    curve = hashes(tmp_path / "one")
    assert [row["lr"] == "0.0001" for row in table(tmp_path / "one")] == [False] * 2 + [True] * 3
    train(tmp_path / "two", *args, nprocs=2)
    train(tmp_path / "three", *args, "--stop-after-iterations", "3", nprocs=3)
    assert (tmp_path / "three" / "checkpoints" / "00000002.pt").exists()
    resume(tmp_path / "three", nprocs=2)
    assert hashes(tmp_path / "two") == hashes(tmp_path / "three") == curve
    assert replay.main([str(tmp_path / "three"), "--iteration", "4", "--env", "1", "--trust"]) == 0
    assert [row["seen"] for row in table(tmp_path / "three")] == ["1", "2", "3", "4", "5"]
    plain = [word for word in args if "hook" not in word and "mine" not in word]
    train(tmp_path / "plain", *plain)
    assert hashes(tmp_path / "plain")[:1] == curve[:1]
    assert hashes(tmp_path / "plain")[3][0] != curve[3][0]


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Hidden", "it has changed hidden; add a name to the list if"),
        ("Wrong", "gamma must be in [0, 1]: got 2.0"),
        ("Fails", "In the hook Fails, after iteration 1."),
        ("FailsBefore", "In the hook FailsBefore, before iteration 2."),
        ("ChangesBefore", "must change the agent's options in `after`: this one did in `before`"),
        ("Twice", "hook: 'steps' is a column of the record already"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, words, name, text):
    done = train(tmp_path / "r", *words(name), expect=1)
    assert text in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], pytest.param(["--overlap"], marks=pytest.mark.slow)], ids=["", "overlap"]
)
def test_the_last_update_has_what_was_set_after_a_resume_too(tmp_path, words, more):
    args = [*words("Each"), *more]
    train(tmp_path / "one", *args)
    train(tmp_path / "two", *args, "--stop-after-iterations", "9")
    resume(tmp_path / "two", nprocs=2)
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")
    assert float(table(tmp_path / "one")[-1]["lr"]) == pytest.approx(1e-3 / 9, rel=1e-5)


def test_a_run_that_was_ended_goes_on_to_the_next_end(tmp_path, words):
    done = train(tmp_path / "r", *words("Stop"))
    assert "stopped after iteration 1, as asked (hook enough)" in done.stdout
    resume(tmp_path / "r")
    assert len(table(tmp_path / "r")) == 2


MLFLOW = """
from pathlib import Path

def log_params(settings):
    told(f"params {settings['algo']}")

def log_metrics(numbers, step):
    told(f"metrics {step} {sorted(numbers)[0]} {numbers['update/kl']:.6g}")

def end_run():
    told("end")

def told(line):
    with Path(__file__).with_name("told.txt").open("a") as file:
        print(line, file=file)
"""


def test_the_logger_of_the_docs_sees_every_number(tmp_path, monkeypatch):
    page = (HERE.parent / "docs/python.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(import mlflow.*?)```", page, re.S)[1])
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE}")
    train(
        tmp_path / "r",
        *SMALL,
        "--total-steps",
        "128",
        "--hook",
        f"{tmp_path}/mine.py:MLflow",
        "--eval-every",
        "1",
    )
    rows = table(tmp_path / "r")
    lines = [f"metrics {row['steps']} episodes/length_mean {row['kl']}" for row in rows]
    assert (tmp_path / "told.txt").read_text().splitlines() == ["params ppo", *lines, "end"]


def test_a_hook_changes_no_record_but_its_own(tmp_path, words):
    train(tmp_path / "r", *words("Robs"), "--eval-every", "1", "--eval-episodes", "1")
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["best_eval"] > 0


NO_HOOKS = """
from rank0rl import Hook

class Everywhere(Hook):
    on_every_rank = True

class Named(Hook):
    name = "goal"

class Video(Hook):
    name = "video"

class Asks(Hook):
    def __init__(self, path): ...
"""


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("os:getcwd", "'os:getcwd' is no hook"),
        ("math:nothing", "does not name a function"),
        ("no_hooks.py:Everywhere", "has on_every_rank, which is for hooks of rank0rl alone"),
        ("no_hooks.py:Named", "has name 'goal', which is for hooks of rank0rl alone"),
        ("no_hooks.py:Video", "has name 'video', which is for hooks of rank0rl alone"),
        ("no_hooks.py:Asks", "must need no arguments, because none are given: missing"),
        ("no_hooks.py:Asks --hook os:getcwd", "name all values after one --hook"),
    ],
)
def test_what_is_no_hook_is_refused_before_anything_is_made(tmp_path, name, text):
    (tmp_path / "no_hooks.py").write_text(NO_HOOKS)
    words = name.replace("no_hooks.py", f"{tmp_path}/no_hooks.py").split()
    done = train(tmp_path / "r", *SMALL, "--hook", *words, expect=2)
    assert text in done.stderr
    assert not (tmp_path / "r").exists()
