"""What a dead job left is removed by the next one, and nothing else."""

import mmap
import os
import platform
import subprocess
import tempfile
import uuid

import pytest

from rank0rl.launch import job, processes


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes, "_MPI_FILES", (str(tmp_path / "shm"),))


def leave(tmp_path, host=None):
    """Make the folder of a job, as its dead supervisor would leave it; return it and a file of its MPI."""
    folder = tmp_path / f"rank0rl-{uuid.uuid4()}"
    folder.mkdir()
    (folder / "begun").write_text(f"1 2 {host or platform.node()}")
    file = tmp_path / f"shm{uuid.uuid4()}"
    file.write_bytes(bytes(10))
    return folder, file


def test_what_a_dead_job_left_is_removed(tmp_path):
    left = [*leave(tmp_path), *leave(tmp_path)]
    others = [tmp_path / "shm.before", tmp_path / "other"]
    for other in others:
        other.touch()
    os.utime(others[0], (0, 0))
    processes.remove_leftovers()
    assert [path for path in left if path.exists()] == []
    assert [path for path in others if not path.exists()] == []


def test_what_lives_stays(tmp_path):
    """Its supervisor holds the lock, or a process of it lives: a rank that saves, after its supervisor's end."""
    folder, file = leave(tmp_path)
    with processes.locked(folder):
        processes.remove_leftovers()
    with subprocess.Popen(["sleep", "60"], env={job.FOLDER: str(folder)}) as rank:
        processes.remove_leftovers()
        assert file.exists()
        assert folder.exists()
        rank.kill()
    processes.remove_leftovers()
    assert not folder.exists()


def test_a_file_that_a_living_process_has_open_or_in_memory_stays(tmp_path):
    folder, file = leave(tmp_path)
    _, mapped = leave(tmp_path)
    with mapped.open("r+b") as closed:
        memory = mmap.mmap(closed.fileno(), 0)
    with file.open(), memory:
        processes.remove_leftovers()
    assert not folder.exists()
    assert file.exists()
    assert mapped.exists()


def test_folders_of_another_host_of_others_or_of_no_job_stay(tmp_path, monkeypatch):
    folder, file = leave(tmp_path, host="elsewhere")
    unready = [tmp_path / "rank0rl-1", tmp_path / "rank0rl-2"]
    for each in unready:
        each.mkdir()
    (unready[1] / "begun").touch()
    processes.remove_leftovers()
    assert all(path.exists() for path in (folder, file, *unready))
    (folder / "begun").write_text(f"1 2 {platform.node()}")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    processes.remove_leftovers()
    assert folder.exists()


def test_no_start_waits_for_what_somebody_put_there(tmp_path, monkeypatch):
    """A FIFO without a writer, bytes that are no text, a file without an end, and no folder at all."""
    strange = [tmp_path / f"rank0rl-{n}" for n in range(4)]
    for folder in strange[:3]:
        folder.mkdir()
    os.mkfifo(strange[0] / "begun")
    (strange[1] / "begun").write_bytes(b"\xff\xfe")
    (strange[2] / "begun").symlink_to("/dev/zero")
    strange[3].touch()
    processes.remove_leftovers()
    assert all(path.exists() for path in strange)
    monkeypatch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)
    monkeypatch.setattr(os, "open", lambda path, *_: pytest.fail(f"{path} of another user opened"))
    processes.remove_leftovers()


def test_a_job_has_a_locked_folder_until_its_end(tmp_path):
    with processes.new_job_folder() as folder:
        job.create(folder, 2)
        processes.remove_leftovers()
        assert folder.exists()
    assert not folder.exists()
