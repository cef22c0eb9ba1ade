"""What the ranks of a job and their supervisor tell each other."""

import mmap
import os
from pathlib import Path

from rank0rl.mpi import job


def test_only_mpis_shared_memory_is_removed(tmp_path):
    mine = tmp_path / "sm_segment.of.mine"
    mine.write_bytes(bytes(4096))
    with mine.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert str(mine) in Path("/proc/self/maps").read_text()
        assert job.shared_memory(os.getpid()) == set()


def test_a_file_is_written_once_and_complete(tmp_path):
    assert job.write_once(tmp_path / "x", "first")
    assert not job.write_once(tmp_path / "x", "second")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x", "first")]


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
