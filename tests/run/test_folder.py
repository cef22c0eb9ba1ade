"""A run's folder is its own."""

import os
import subprocess
import sys

import pytest

from rank0rl.run import folder
from rank0rl.run.options import RunOptions


def test_runs_that_start_together_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "now")
    options = RunOptions("toy:Env-v0")
    made = [folder.new_folder(options) for _ in range(3)]
    assert [str(path) for path in made] == [
        "runs/toy-Env-v0-ppo-seed0-now",
        "runs/toy-Env-v0-ppo-seed0-now-2",
        "runs/toy-Env-v0-ppo-seed0-now-3",
    ]


@pytest.mark.parametrize("name", ["", "given"])
def test_a_folder_with_a_run_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    options = RunOptions("toy:Env-v0", run_dir=name or str(tmp_path / "other"))
    made = folder.new_folder(options)
    assert folder.new_folder(options) == made
    (made / "checkpoints").mkdir()
    (made / "checkpoints" / "00000001.pt").touch()
    with pytest.raises(ValueError, match="--run-dir") as error:
        folder.new_folder(options)
    assert str(made) in str(error.value)


def test_a_record_without_checkpoints_is_not_begun_over(tmp_path):
    (tmp_path / "progress.csv").write_text("iteration,steps\n1,100\n")
    with pytest.raises(ValueError, match=r"no checkpoint to go on from: .* remove .*progress\.csv"):
        folder.new_folder(RunOptions("toy:Env-v0", run_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["progress.csv"]
    (tmp_path / "progress.csv").write_text("iteration,steps\n")
    assert folder.new_folder(RunOptions("toy:Env-v0", run_dir=str(tmp_path))) == tmp_path


def test_a_run_that_another_process_has_begun_meanwhile_is_not_begun_over(tmp_path):
    folder.lock(tmp_path, 0, is_new=True)()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "00000001.pt").touch()
    folder.lock(tmp_path, 0)()
    with pytest.raises(ValueError, match="holds a run already"):
        folder.lock(tmp_path, 0, is_new=True)
    folder.lock(tmp_path, 0)()  # which has been given up


def test_a_folder_that_cannot_be_written_to_is_not_trained_in(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ValueError, match=f"cannot train in {tmp_path}: Is a directory"):
        folder.lock(tmp_path, 0)


def test_a_file_system_without_locks_is_trained_in(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    folder.lock(tmp_path, 0)()


LOCKS = "import sys; from pathlib import Path; from rank0rl.run import folder\n"
LOCKS += "folder.lock(Path(sys.argv[1]), float(sys.argv[2])); print('has it', flush=True); input()"


@pytest.mark.skipif(os.name != "posix", reason="a lock of folders is one of POSIX")
def test_one_process_at_a_time_has_a_folder(tmp_path):
    def start(patience_s):
        command = [sys.executable, "-c", LOCKS, str(tmp_path), str(patience_s)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    first = start(0)
    assert first.stdout.readline() == "has it\n"
    refused = start(0).communicate()[1]
    assert f"another process is training in {tmp_path}" in refused
    patient = start(60)
    first.communicate("\n")
    assert patient.stdout.readline() == "has it\n"
    patient.communicate("\n")
