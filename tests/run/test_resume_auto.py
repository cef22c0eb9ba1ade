"""--resume auto: one command line begins a run, goes on with it, and finds it ended."""

import shutil
import threading
from pathlib import Path

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, curve, sha, table, train

from rank0rl.run import folder, plan
from rank0rl.run.launch_options import Words

LONG = [*SMALL, "--total-steps", "640"]
AUTO = ["--resume", "auto"]


def test_one_command_begins_goes_on_and_finds_the_run_ended(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *LONG)
    train(parts, *LONG, *AUTO, "--stop-after-iterations", "4")
    assert len(table(parts)) == 4
    train(parts, *LONG, *AUTO, "--learner-threads", "1")
    assert curve(parts) == curve(whole)
    assert sha(parts) == sha(whole)
    done = train(parts, *LONG, *AUTO)
    assert "this run has ended" in done.stdout
    assert curve(parts) == curve(whole)


def test_a_run_that_another_process_still_saves_is_read_once_it_has_ended(tmp_path):
    run, other = tmp_path / "r", tmp_path / "other"
    train(run, *LONG, "--stop-after-iterations", "1")
    train(run, *LONG, *AUTO, "--stop-after-iterations", "3")
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints")
    unlock = folder.lock(other, 0)
    words = Words.read([*LONG, *AUTO, "--run-dir", str(other)])
    assert words.run is None
    end = threading.Timer(
        1.0, lambda: (shutil.copytree(run / "checkpoints", other / "checkpoints"), unlock())
    )
    end.start()
    made = plan.prepare(words, HERE.parent / "configs", 1)
    made.unlock()
    assert (made.options.resume, made.made) == (str(other), 3)


@pytest.mark.slow
def test_a_run_that_never_saved_is_begun_again(tmp_path):
    (tmp_path / ".config.toml.tmp").touch()
    (tmp_path / "checkpoints").mkdir()
    train(tmp_path, *LONG, *AUTO, "--stop-after-iterations", "1")
    assert len(table(tmp_path)) == 1


def test_a_run_with_other_settings_is_refused(tmp_path):
    """Also one whose settings the command line leaves at their defaults, and one of another file."""
    train(tmp_path / "r", *LONG, "--lr", "0.1", "--stop-after-iterations", "1")
    refused = train(tmp_path / "r", *LONG, *AUTO, expect=2)
    assert "lr linear:5e-4:0 in place of 0.1" in refused.stderr
    of_program = (HERE.parent / "configs/ppo.toml").read_text()
    (tmp_path / "c.toml").write_text(of_program.replace('"linear:5e-4:0"', "0.1"))
    file = ["--config", str(tmp_path / "c.toml")]
    refused = train(tmp_path / "r", *LONG, *AUTO, *file, "--seed", "1", expect=2)
    assert "got seed 1 in place of 0;" in refused.stderr


@pytest.mark.slow
def test_the_beginning_may_be_that_of_another_run(tmp_path):
    train(tmp_path / "first", *LONG, "--stop-after-iterations", "1")
    args = [*LONG, *AUTO, "--init-from", str(tmp_path / "first")]
    train(tmp_path / "r", *args, "--stop-after-iterations", "1")
    train(tmp_path / "first", *LONG, *AUTO)  # its last checkpoint is another one now
    train(tmp_path / "r", *args)
    assert len(table(tmp_path / "r")) == 10
    args[-1] = str(tmp_path / "r")
    assert "init_from" in train(tmp_path / "r", *args, expect=2).stderr


def test_the_folder_must_be_named():
    with pytest.raises(ValueError, match="got no --run-dir"):
        Words.read(["CartPole", *AUTO])


def test_only_a_folder_with_a_checkpoint_holds_a_run(tmp_path):
    argv = [*AUTO, "--run-dir", str(tmp_path)]
    assert Words.read(argv).run is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "00000000.pt").touch()
    assert Words.read(argv).run == tmp_path
    assert Words.read(["--resume", "./auto"]).run == Path("auto")
    assert Words.read(["--run-dir", str(tmp_path)]).run is None


def test_as_many_ranks_as_the_run_has_environments(tmp_path):
    (tmp_path / "config.toml").write_text("num_envs = 41")
    (tmp_path / "checkpoints").mkdir()
    argv = ["--nprocs", "41", *AUTO, "--run-dir", str(tmp_path)]
    with pytest.raises(ValueError, match="--num-envs"):
        Words.read(argv).launch_options(tmp_path)
    (tmp_path / "checkpoints" / "00000000.pt").touch()
    assert Words.read(argv).launch_options(tmp_path).nprocs == 41
