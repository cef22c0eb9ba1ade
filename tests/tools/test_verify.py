"""A run that is trained again has the rows that it has recorded, or the first other one is named."""

import shutil
from pathlib import Path

import pytest
from helpers.runs import SMALL, resume, table, train

from rank0rl.run import checkpoint
from rank0rl.run.logger import read_rows
from rank0rl.run.machine import available_cores
from rank0rl.tools import verify as tool
from rank0rl.tools.verify import main

pytestmark = pytest.mark.usefixtures("forked_python")

FIRST = ["--total-steps", "640", "--stop-after-iterations", "2", "--eval-every", "2"]
KEEP = ["--checkpoint-every", "1", "--keep-checkpoints", "spread:4", "--eval-episodes", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of five iterations. Its second start has changed its length after the second one."""
    folder = tmp_path_factory.mktemp("made") / "run"
    train(folder, *SMALL, *FIRST, *KEEP)
    resume(folder, "--total-steps", "1280", "--stop-after-iterations", "5")
    return folder


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


def verify(run, *words, expect=0):
    """Return what the tool says, in this process; it trains in another one."""
    assert main([str(run), *words]) == expect


def change(path, *replacements):
    text = path.read_text()
    for before, after in replacements:
        assert text.count(before) >= 1, before
        text = text.replace(before, after, 1)
    path.write_text(text)


def set_cell(run, iteration, column, text):
    lines = (run / "progress.csv").read_text().splitlines()
    cells = lines[iteration].split(",")
    cells[lines[0].split(",").index(column)] = text
    lines[iteration] = ",".join(cells)
    (run / "progress.csv").write_text("\n".join(lines) + "\n")


def keep_rows(run, *iterations):
    lines = (run / "progress.csv").read_text().splitlines(keepends=True)
    (run / "progress.csv").write_text("".join(lines[i] for i in (0, *iterations)))


@pytest.mark.slow
def test_a_run_of_two_lengths_is_verified_and_its_folder_stays_as_it_is(run, capsys):
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    set_cell(run, 5, "seconds", "123")  # a time is no part of the curve
    before[run / "progress.csv"] = (run / "progress.csv").read_bytes()
    verify(run)
    said = capsys.readouterr().out
    assert "verified to iteration 5 of 5: 5 rows" in said
    assert "over 2 starts" in said
    assert {f: f.read_bytes() for f in run.rglob("*") if f.is_file()} == before


def test_a_changed_digit_is_named_with_its_row_and_ends_the_training(run, capsys):
    entropy = table(run)[1]["entropy"]
    set_cell(run, 2, "entropy", entropy[:-1] + "3 "[entropy[-1] == "3"])
    change(run / "config.toml", ('numpy = "', 'numpy = "0.'))
    verify(run, expect=1)
    said = capsys.readouterr().out
    assert "NOT the same: iteration 2 differs" in said
    assert f"now {entropy}" in said
    assert said.count(": recorded ") == 1
    assert "numpy: 0." in said


@pytest.mark.slow
def test_the_record_is_read_only_when_it_has_changed(run, monkeypatch):
    read = []
    monkeypatch.setattr(tool, "read_rows", lambda folder: read.append(1) or read_rows(folder))
    monkeypatch.setattr(tool, "_LOOK_S", 0.01)  # a hundred looks and more before the first row
    verify(run, "--rows", "2")
    assert 1 <= len(read) <= 4  # once before, and once for each row


@pytest.mark.slow
def test_another_seed_gives_another_first_row(run, capsys):
    change(run / "config.toml", ("seed = 0", "seed = 1"))
    verify(run, "--rows", "2", expect=1)
    said = capsys.readouterr().out
    assert "iteration 1 differs" in said
    assert "batch_sha256: recorded" in said
    assert "versions and fingerprint are those of the record" in said


@pytest.mark.slow
def test_rows_of_a_thinned_record_are_found_by_their_iterations(run, capsys):
    keep_rows(run, 2, 4)
    verify(run, "--rows", "2")
    assert "verified to iteration 2 of 5: 1 rows" in capsys.readouterr().out


@pytest.mark.slow
def test_the_end_of_a_thinned_record_is_its_summary(run, capsys):
    keep_rows(run, 2, 4)
    verify(run)
    said = capsys.readouterr().out
    assert "verified to iteration 5 of 5: 2 rows" in said
    assert "and checkpoints: 4, over 2 starts" in said
    change(run / "summary.json", ('"fingerprint": "', '"fingerprint": "0'))
    verify(run)
    last = run / "checkpoints" / "00000005.pt"
    good = last.read_bytes()
    saved = checkpoint.read(last)
    checkpoint.write(last, {**saved, "weights": {k: t + 1 for k, t in saved["weights"].items()}})
    verify(run, expect=1)
    assert "00000005.pt has other weights" in capsys.readouterr().out
    last.write_bytes(good)
    last.with_name("00000006.pt").write_bytes(good)
    verify(run, expect=1)
    assert "00000006.pt is of no iteration" in capsys.readouterr().out
    last.with_name("00000006.pt").unlink()
    change(run / "summary.json", ('"weights_sha256": "', '"weights_sha256": "0'))
    verify(run, expect=1)
    assert "summary.json, of iteration 5, differs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sample_goes_on_from_a_checkpoint(run, capsys):
    verify(run, "--sample")
    said = capsys.readouterr().out
    assert "4 checkpoints belong to the record" in said
    assert "and 1 iterations after" in said


@pytest.mark.slow
def test_a_sample_finds_what_does_not_belong_to_the_checkpoints(run, capsys):
    kept = [int(file.stem) for file in checkpoint.numbered(run)]
    assert kept == [0, 2, 4, 5]
    path, last = run / "progress.csv", run / "checkpoints" / "00000004.pt"
    text, good = path.read_bytes(), last.read_bytes()
    set_cell(run, 3, "seconds", "123")
    verify(run, "--sample", expect=1)
    assert "one of the rows 3 to 4 of progress.csv" in capsys.readouterr().out
    path.write_bytes(text)
    saved = checkpoint.read(last)
    checkpoint.write(last, {**saved, "weights": {k: t + 1 for k, t in saved["weights"].items()}})
    verify(run, "--sample", expect=1)
    assert "00000004.pt has other weights" in capsys.readouterr().out
    verify(run, expect=1)
    assert "00000004.pt has other weights" in capsys.readouterr().out
    last.write_bytes(good)
    for before, after in (("seed = 0", "seed = 1"), ("total_steps = 640\n", "total_steps = 650\n")):
        change(run / "config.toml", (before, after))
        verify(run, "--sample", expect=1)
        said = capsys.readouterr().out
        assert "00000000.pt has other settings" in said
        assert after.replace(" =", ":").strip() in said
        change(run / "config.toml", (after, before))


def refused(capsys, run, *words):
    verify(run, *words, expect=2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_wrong_use(run, capsys, tmp_path):
    assert "No such file" in refused(capsys, tmp_path / "none")
    assert "rows must be in [1, inf)" in refused(capsys, run, "--rows", "0")
    assert "leave --rows or --sample out" in refused(capsys, run, "--rows", "1", "--sample")
    path, text = run / "progress.csv", (run / "progress.csv").read_text()
    keep_rows(run, 2, 4)
    assert "of iteration 2: got --rows 1" in refused(capsys, run, "--rows", "1")
    assert "2 rows of 5 iterations" in refused(capsys, run, "--sample")
    for damaged in (
        text.replace("\n2,", "\nx,"),
        text.splitlines()[0],
        text.replace("\n3,", "\n1,"),
    ):
        path.write_text(damaged)
        assert "must have a row for each iteration" in refused(capsys, run)
    path.write_text(text)
    for file in checkpoint.numbered(run)[:-1]:
        file.unlink()
    assert "spread:10" in refused(capsys, run, "--sample")
    settings = (run / "config.toml").read_text()
    for before, after, said in (
        ("iteration = 0", "iteration = 1", "the first one from iteration 0"),
        ("iteration = 0", 'iteration = "0"', "must have iteration, a whole number"),
        ("nprocs = 1\ncommand = ", 'nprocs = "2"\ncommand = ', "expected a whole number, got '2'"),
        (
            "nprocs = 1\ncommand = ",
            f"nprocs = 1\nranks_per_env = {len(available_cores()) + 1}\ncommand = ",
            "give --trust to start",
        ),
        ('algo = "ppo"', 'algo = "mine.py:Mine"', "--trust"),
    ):
        change(run / "config.toml", (before, after))
        assert said in refused(capsys, run)
        (run / "config.toml").write_text(settings)
    (run / "config.toml").unlink()
    assert "config.toml" in refused(capsys, run)


@pytest.mark.slow
def test_what_a_run_began_with_must_be_there(made, tmp_path, capsys):
    source = Path(shutil.copytree(made, tmp_path / "source"))
    train(tmp_path / "run", *SMALL, "--init-from", str(source), "--stop-after-iterations", "1")
    verify(tmp_path / "run")
    shutil.rmtree(source)
    said = refused(capsys, tmp_path / "run")
    assert "the run cannot be trained again: " in said
    assert "source" in said


CALLS = """
from dataclasses import replace
from rank0rl import Hook

class Schedule(Hook):
    def after(self, agent, iteration, record):
        if iteration == 2:
            agent.options = replace(agent.options, lr=1e-4)
        if not iteration != 3:
            self.stop()
"""


@pytest.mark.slow
def test_a_run_that_its_hook_ended_is_ended_and_resumed_again(tmp_path, capsys):
    (tmp_path / "calls.py").write_text(CALLS)
    args = ["--hook", f"{tmp_path / 'calls.py'}:Schedule", "--total-steps", "320", "--overlap"]
    train(tmp_path / "run", *SMALL, *args, nprocs=2)
    resume(tmp_path / "run")
    assert [row["coefficients"] for row in table(tmp_path / "run")][1:] == ['{"lr": 0.0001}'] * 4
    verify(tmp_path / "run", "--nprocs", "3")
    assert "5 rows, all" in capsys.readouterr().out
    change(tmp_path / "calls.py", ("!= 3", "!= 2"))
    verify(tmp_path / "run", "--trust", expect=1)
    assert "went on to iteration 3, and now it ends after 2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_curriculum_is_followed_again(tmp_path, capsys):
    args = [
        "examples.02_environment:corridor",
        "--curriculum",
        "examples.06_curriculum:farther",
        "--num-envs",
        "4",
    ]
    more = ["--steps-per-batch", "256", "--total-steps", "1024", "--stop-after-iterations", "2"]
    train(tmp_path / "run", *args, *more, nprocs=2)
    resume(tmp_path / "run")
    verify(tmp_path / "run", "--trust")
    assert "4 rows, all" in capsys.readouterr().out


@pytest.mark.slow
def test_where_a_resumed_run_begins_new_episodes_it_does_so_again(tmp_path, capsys):
    train(tmp_path / "run", *SMALL, *FIRST, *KEEP, "--max-replay-steps", "3")
    resume(tmp_path / "run", "--stop-after-iterations", "5")
    verify(tmp_path / "run")
    assert "a new episode begins there" in capsys.readouterr().out
    verify(tmp_path / "run", "--sample")  # from iteration 2, where the run was resumed, not from 4
    shutil.copy(tmp_path / "run" / "checkpoints" / "00000004.pt", tmp_path)
    for file in checkpoint.numbered(tmp_path / "run")[:-1]:
        file.unlink()
    shutil.copy(tmp_path / "00000004.pt", tmp_path / "run" / "checkpoints")
    assert "longer than --max-replay-steps" in refused(capsys, tmp_path / "run", "--sample")
