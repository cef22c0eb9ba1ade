"""Too little room in /dev/shm or in the temporary folder is one error before anything is started."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.ranks import HERE, run

from rank0rl.launch import hosts


def test_docker_s_default_is_enough_for_10_ranks_of_mpich_and_not_for_16():
    free_mb = {"/dev/shm": 67.1, "/tmp": 1e4}
    assert hosts.shortages(free_mb, "MPICH", 10) == []
    (short,) = hosts.shortages(free_mb, "MPICH", 16)
    for fact in ("16 ranks", "96.0 MB in /dev/shm", "67.1 MB are free", "--nprocs", "--shm-size"):
        assert fact in short
    assert hosts.shortages(free_mb, "Open MPI", 200) == []
    assert hosts.shortages(free_mb, "Open MPI", 300)
    assert hosts.shortages({"/dev/shm": 0}, "", 16) == []  # its need is not known


def test_a_full_temporary_folder_is_named():
    (short,) = hosts.shortages({"/dev/shm": 1e4, "/tmp": 0.5}, "Open MPI", 2)
    assert "/tmp" in short
    assert "0.5 MB are free" in short
    assert hosts.shortages({"/tmp": 1.2}, "", 2) == []
    assert hosts.shortages({"/tmp": 1.2}, "", 20)


def test_a_folder_without_a_limit_is_left_out(monkeypatch):
    blocks = {"/dev/shm": 0}

    def about(folder):
        mb = blocks.get(folder, 3)
        return SimpleNamespace(f_blocks=mb, f_bavail=mb, f_frsize=1e6)

    monkeypatch.setattr(hosts.os, "statvfs", about)
    free_mb = hosts.free_space()
    assert free_mb["/tmp"] == 3
    assert "/dev/shm" not in free_mb


def test_the_launcher_is_asked_only_where_room_is_short(monkeypatch):
    monkeypatch.setattr(hosts, "free_space", lambda: {"/dev/shm": 64.0})
    hosts.check_free_space(2, lambda: pytest.fail("asked"))
    hosts.check_free_space(16, lambda: "Open MPI")
    with pytest.raises(ValueError, match="16 ranks of MPICH need"):
        hosts.check_free_space(16, lambda: "MPICH")


def test_a_start_without_room_is_refused_at_once():
    if any(Path(each).is_relative_to("/tmp") for each in (HERE, sys.executable)):
        pytest.skip("the project, or its Python, lies in /tmp, which this test hides from it")
    fill = "; ".join(
        f"mount -t tmpfs -o size=64k t {folder} || exit 99; head -c 65536 /dev/zero > {folder}/full"
        for folder in ("/tmp", "/dev/shm")
    )
    train = [sys.executable, "train.py", "CartPole", "--nprocs", "2"]
    done = run(["unshare", "--mount", "sh", "-c", f'{fill}; exec "$@"', "sh", *train])
    if done.returncode in (1, 99):
        pytest.skip(f"no mounts of its own for this test: {done.stderr}")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert "/dev/shm" in done.stderr
    assert "/tmp" in done.stderr
