"""Which collectives ranks wait in, who called them, and when that is a deadlock."""

import os

import pytest

import rank0rl
from rank0rl.launch import job

PACKAGE = os.path.dirname(rank0rl.__file__)


def waiting(count, name="gather", waits=True, before=()):
    names = {count: name, **dict(before)}
    return job.RankCollectives(count, waits, names, "")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([waiting(3), waiting(3)], False),  # bytes are on their way
        ([waiting(3), waiting(3, waits=False)], False),  # one still works
        ([waiting(3), None], False),  # one has not come to a collective, or is on another host
        ([waiting(3), waiting(3, "bcast")], True),
        ([waiting(3), waiting(4, "bcast", before={3: "gather"})], False),  # it is ahead
        ([waiting(3), waiting(4, "gather", before={3: "bcast"})], True),
        ([waiting(3), waiting(90, "gather")], False),  # too far ahead to be remembered
    ],
)
def test_ranks_that_cannot_go_on_are_a_deadlock(ranks, expected):
    assert job.is_deadlock(ranks) is expected


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "my_folder", lambda: tmp_path)
    monkeypatch.setattr(job, "world_rank", lambda: 1)
    return job._CollectiveRecorder()


def test_what_a_rank_records_is_what_the_supervisor_reads(recorder, tmp_path):
    assert job.RankCollectives.read(tmp_path, 0) is None
    recorder.begin("first")
    recorder.end()
    recorder.begin("second" * 100)
    assert (
        job.RankCollectives.read(tmp_path, 1).count == 0
    )  # a collective that is over at once costs no record
    recorder.wait()
    read = job.RankCollectives.read(tmp_path, 1)
    assert (read.count, read.waits, read.names[1]) == (2, True, "first")
    assert read.names[2].startswith("secondsecond")
    recorder.end()
    for i in range(100):
        recorder.begin(str(i))
    recorder.wait()
    read = job.RankCollectives.read(tmp_path, 1)
    assert (read.count, read.waits, len(read.names), read.names[102]) == (102, True, 32, "99")


@pytest.mark.parametrize(
    ("file", "skipped"),
    [
        (f"{PACKAGE}/mpi/comm.py", True),
        (f"{PACKAGE}/trainer.py", True),
        (f"{PACKAGE}/run/deep/file.py", True),
        (f"{PACKAGE}_mine/script.py", False),  # a name that begins alike
        (f"{os.path.dirname(PACKAGE)}/train.py", False),
    ],
)
def test_the_caller_is_the_nearest_one_outside_of_the_package(recorder, tmp_path, file, skipped):
    recorder.begin("x")
    code = compile("recorder.wait()", file, "exec")
    exec(code, {"recorder": recorder})
    where = job.RankCollectives.read(tmp_path, 1).where
    assert where.partition(":")[0] == os.path.basename(__file__ if skipped else file)
