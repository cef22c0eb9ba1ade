"""The sinks of a run: one events file and one W&B run, from rank 0 only."""

import json

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, resume, table, train, train_on_ranks

from rank0rl.run import hooks, plan

WANDB = """
import json, os, pathlib
told = pathlib.Path(os.environ["TOLD"])
def tell(*what):
    with told.open("a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, values, step):
        tell("log", values, step)
    def finish(self):
        tell("finish")
def init(**kwargs):
    tell("init", kwargs)
    return Run()
"""


def test_one_events_file_one_header_and_steps_that_grow(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_on_ranks(tmp_path, *SMALL, "--total-steps", "256", "--tensorboard", nprocs=3)
    assert len(list(tmp_path.glob("events.*"))) == 1
    rows = table(tmp_path)
    assert [int(row["steps"]) for row in rows] == [64, 128, 192, 256]
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, column in (("update/kl", "kl"), ("speed/update_s", "update_s")):
        written = [
            (event.step, pytest.approx(event.value, rel=1e-4)) for event in events.Scalars(tag)
        ]
        assert [(int(row["steps"]), float(row[column])) for row in rows] == written
    assert not any(tag.startswith("hashes") for tag in events.Tags()["scalars"])


def test_what_an_earlier_start_wrote_beyond_the_checkpoint_is_hidden(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after in (0, 0, 2):
        board = hooks.TensorBoard(tmp_path, after)
        for step in range(after + 1, after + 4):
            record = hooks.Record()
            record.add("run", {"steps": step, "b": after})
            board.after(None, step, record)
        board.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("run/b")
    assert [(event.step, event.value) for event in events] == [
        (1, 0),
        (2, 0),
        (3, 2),
        (4, 2),
        (5, 2),
    ]


@pytest.mark.slow
def test_one_run_of_wandb_goes_on_in_a_resume(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    run = tmp_path / "r"
    args = [*SMALL, "--total-steps", "192", "--wandb", "project of mine", "--seed", "3"]
    train(run, *args, "--stop-after-iterations", "2", nprocs=4)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [what for what, *_ in told] == ["init", "log", "log", "finish"]
    [init] = told[0][1:]
    assert init["project"] == "project of mine"
    assert init["config"]["seed"] == 3
    assert [step for what, _, step in told[1:3]] == [64, 128]
    assert told[1][1]["run/iteration"] == 1
    resume(run, nprocs=2)
    again = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()][4:]
    assert [what for what, *_ in again] == ["init", "log", "finish"]
    assert again[0][1]["id"] == init["id"]


def test_a_missing_package_is_found_before_any_work(monkeypatch):
    monkeypatch.setattr(plan, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        plan.options_of(["CartPole", "--tensorboard"], None)
    plan.options_of(["CartPole"], None)
