"""The processes and files of a job on this host, also where there is no /proc."""

import os
import signal
import subprocess
import uuid

import pytest
from helpers.jobs import wait_until

from rank0rl.launch import job, processes, tree


@pytest.fixture
def shm(tmp_path, monkeypatch):
    """The beginning of the names of MPI's files, in a folder of the test."""
    beginning = str(tmp_path / "shm")
    monkeypatch.setattr(processes, "_MPI_FILES", (beginning,))
    job.create(tmp_path, 2)
    return beginning


@pytest.fixture
def no_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "PROC", tmp_path / "none")


@pytest.fixture
def rank(tmp_path):
    """A rank with a process group of its own, and the file of rank 0."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        (tmp_path / "rank.0").write_text(str(process.pid))
        yield process
        process.kill()


@pytest.mark.usefixtures("no_proc")
def test_without_proc_only_ranks_that_live_are_found(rank, tmp_path):
    assert processes.survivors(tmp_path) == [rank.pid]
    rank.kill()
    rank.wait()
    assert processes.survivors(tmp_path) == []


@pytest.mark.usefixtures("no_proc")
def test_without_proc_a_rank_is_killed_and_no_group(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a group that nobody knows"))
    monkeypatch.setattr(processes, "_KILL_S", 0.0)  # it is a zombie until this process waits
    processes.kill_all(tmp_path)
    assert rank.wait() == -signal.SIGKILL


def test_the_words_of_a_failed_rank_are_under_way_until_both_streams_are_marked(tmp_path):
    ranks = processes.Ranks(tmp_path, 2)
    with subprocess.Popen(["false"]) as rank:
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        shell = f"host {os.getppid()} {os.getpid()}"
        (tmp_path / "shell.1").write_text(f"{shell} {rank.pid}")
        assert ranks.words_under_way()
        (tmp_path / "shell.1").write_text(f"{shell} {os.getpid()}")  # a rank that lives
        assert not ranks.words_under_way()
        (tmp_path / "status.1").write_text("0\n")  # it ended before the others
        assert ranks.words_under_way()
        (tmp_path / "ended.1").touch()
        assert not ranks.words_under_way()
        (tmp_path / "status.1").write_text("137\n")
        assert ranks.words_under_way()
        (tmp_path / "out.1").touch()
        assert ranks.words_under_way()
        for ended in (rank.pid, 99999999):  # the shell, which nobody or somebody has waited for
            (tmp_path / "shell.1").write_text(f"host 1 {ended} {rank.pid}")
            assert not ranks.words_under_way()
        (tmp_path / "shell.1").write_text(f"{shell} {rank.pid}")
        (tmp_path / "err.1").touch()
        assert not ranks.words_under_way()


@pytest.mark.usefixtures("no_proc")
def test_without_proc_files_stay(shm, tmp_path):
    (tmp_path / "shm1").touch()
    processes.remove_mpi_files(tmp_path)
    assert (tmp_path / "shm1").exists()


def test_a_file_that_the_ranks_of_another_job_are_about_to_read_stays(shm, tmp_path, monkeypatch):
    name = f"p{uuid.uuid4().hex[:9]}"
    monkeypatch.setattr(processes, "_PROXY", name)
    monkeypatch.setattr(processes, "_PROXY_FILE", shm)
    file = tmp_path / "shm1"
    file.touch()
    proxy = tmp_path / name
    proxy.write_text("#!/bin/sh\nread line\n")
    proxy.chmod(0o755)
    with subprocess.Popen([str(proxy)], stdin=subprocess.PIPE) as process:
        wait_until(lambda: tree.program(process.pid) == name)
        processes.remove_mpi_files(tmp_path)
        assert file.exists()
        monkeypatch.setattr(processes, "_START_S", 0.0)
        processes.remove_mpi_files(tmp_path)
        assert not file.exists()
        process.kill()


@pytest.mark.parametrize("maps", ["", "7f00-7f01 rw-s 00000000 00:1a 5 /dev/null\n"])
def test_a_process_that_is_ending_keeps_no_file(maps, shm, tmp_path, monkeypatch):
    file = tmp_path / "shm1"
    file.touch()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "environ").touch()
    (tmp_path / "proc" / "7" / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "fd" / "3").symlink_to(file)
    (tmp_path / "proc" / "7" / "maps").write_text(maps)
    monkeypatch.setattr(tree, "PROC", tmp_path / "proc")
    processes.remove_mpi_files(tmp_path)
    assert file.exists() == bool(maps)


def test_a_proxy_that_nobody_waits_for_keeps_no_file(shm, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_PROXY_FILE", shm)
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: tree.state(process.pid) == "Z")
        monkeypatch.setattr(processes, "_PROXY", tree.program(process.pid))
        (tmp_path / "shm1").touch()
        processes.remove_mpi_files(tmp_path)
        assert not (tmp_path / "shm1").exists()


def test_no_signal_is_sent_to_a_rank_that_has_ended(rank, tmp_path):
    ranks = processes.Ranks(tmp_path, 1)
    assert ranks.send(0, 0)
    (tmp_path / "status.0").write_text("0")
    assert not ranks.send(0, signal.SIGKILL)  # the id may be another process's
    assert rank.poll() is None
