"""What the ranks of a job and their supervisor tell each other."""

import os
import platform
from unittest.mock import MagicMock

import pytest

from rank0rl.launch import job


def test_ranks_of_open_mpi_in_a_step_of_slurm_are_those_of_open_mpi(monkeypatch):
    """The variables of the step, which has one task, are theirs too."""
    step = {"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}
    ranks = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    for name, value in {**step, **ranks}.items():
        monkeypatch.setenv(name, value)
    assert (job.world_size(), job.world_rank()) == (4, 2)


def test_a_file_is_written_once_and_complete(tmp_path):
    assert job.write_once(tmp_path / "x", "first")
    assert not job.write_once(tmp_path / "x", "second")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x", "first")]


def test_a_full_disk_does_not_hide_what_was_to_be_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(job.FOLDER, str(tmp_path))
    monkeypatch.setattr(job, "my_folder", lambda: tmp_path)

    def link(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job.os, "link", link)
    job.fail(7, "the reason")
    assert "the reason" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_from_other_hosts_come_as_lines_on_stderr(tmp_path, monkeypatch):
    """Whatever is before them and after them, and in pieces of any size."""
    monkeypatch.setenv(
        job.FOLDER, str(tmp_path / "rank0rl-of-mine")
    )  # which this host does not see
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    job.my_folder.cache_clear()
    reader, writer = os.pipe()
    monkeypatch.setattr(job.os, "write", lambda _, data, write=os.write: write(writer, data))
    job.mark_loading_mpi()
    os.write(2, b"a line\x1e of another rank's\n and a half")
    job.fail(7, "why")
    job.mark_ended()
    os.write(2, b"rest \x1erank0rl-of-others ended.0 \n\x1e")
    data = os.read(reader, 1 << 16)
    for size in (1, 7, len(data)):
        seen = tmp_path / str(size) / "rank0rl-of-mine"
        seen.mkdir(parents=True)
        words = rest = b""
        for begin in range(0, len(data), size):
            more, rest = job.take_lines(seen, rest + data[begin : begin + size])
            words += more
        assert {file.name: file.read_text() for file in seen.iterdir()} == {
            "meets.3": "",
            "failed": "7",
            "ended.3": "",
        }
        assert words + rest == (
            b"a line\x1e of another rank's\n and a halfrest \x1erank0rl-of-others ended.0 \n\x1e"
        )


@pytest.mark.parametrize(
    ("tag", "left"),
    [
        (b"[2] ", b""),
        (b"[1,2]<stdout>: ", b""),
        (b"[prterun-a-7@1,2]<stderr>: ", b""),
        (b"epoch [1] ", b"epoch [1] "),
        (b"[1/2] ", b"[1/2] "),
    ],
)
def test_the_tag_that_a_launcher_puts_before_a_line_goes_with_it(tag, left, tmp_path):
    line = f"\x1e{tmp_path.name} out.2 \n".encode()
    assert job.take_lines(tmp_path, b"[2] words\n" + tag + line) == (b"[2] words\n" + left, b"")
    assert (tmp_path / "out.2").exists()


def test_a_line_is_taken_even_if_its_file_cannot_be_written(tmp_path):
    assert job.take_lines(tmp_path / "none", b"\x1enone out.0 \nwords") == (b"words", b"")


def test_a_rank_whose_supervisor_is_gone_ends(tmp_path, monkeypatch):
    (tmp_path / "begun").write_text(f"99999999 2 {platform.node()}")
    monkeypatch.setenv(job.FOLDER, str(tmp_path))
    monkeypatch.setattr(job, "ctypes", MagicMock())  # this process shall not end with its parent
    with pytest.raises(SystemExit, match="supervisor of this rank is gone.*99999999"):
        job.enter()


def test_a_slurm_step_is_a_job_and_a_shell_in_one_is_not(monkeypatch):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert job.world_size() is job.world_rank() is None
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert job.world_rank() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert job.world_size() is job.world_rank() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert (job.world_size(), job.world_rank()) == (4, 3)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert (job.world_size(), job.world_rank()) == (2, 1)
