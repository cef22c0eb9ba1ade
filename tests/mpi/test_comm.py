"""This rank, and what every collective is made of: at 1, 2, 3 ranks."""

import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from helpers.ranks import on_ranks

from rank0rl.mpi import comm, gather, wait, world
from rank0rl.mpi.gather import rank0_accum_batches

RANKS = [1, 2, 3]


def on_rank_broadcast():
    array = np.arange(12.0).reshape(3, 4) * (comm.rank + 1)
    comm.bcast_(array)
    shared = comm.bcast_obj({"a": [1, "x"]} if comm.rank == 0 else None)
    grown = comm.bcast(
        array[:2] > 0 if comm.rank == 0 else None
    )  # its shape is not known elsewhere
    kinds = [np.array(5.0), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), [1, 2]]
    sent = [comm.bcast(kind if comm.rank == 0 else None) for kind in kinds]
    for refused in ({}, "text", b"bytes"):
        with pytest.raises(ValueError, match=f"bcast: rank 0 .* got {type(refused).__name__}"):
            comm.bcast(refused if comm.rank == 0 else None)
    if comm.nworkers > 1:
        last = comm.nworkers - 1
        with pytest.raises(ValueError, match="bcast_obj: the object of rank 0 cannot be sent: "):
            comm.bcast_obj(lambda: 0)
        with pytest.raises(ValueError, match=f"all: the object of rank {last} cannot be sent: "):
            comm.allgather_obj(print if comm.rank < last else lambda: 0, "all")
    return [array.tolist(), shared, grown.tolist(), [repr(x) for x in sent]]


@pytest.mark.parametrize("n", RANKS)
def test_broadcasts_give_every_rank_what_rank_0_has(n):
    array = np.arange(12.0).reshape(3, 4)
    kinds = [np.array(5.0), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), np.array([1, 2])]
    kinds = [repr(x) for x in kinds]
    expected = [array.tolist(), {"a": [1, "x"]}, (array[:2] > 0).tolist(), kinds]
    assert on_ranks(n, "test_comm:on_rank_broadcast") == [expected] * n


def on_rank_overwritten():
    """Return what is left of the arrays that were passed, and what was returned for each."""
    first = np.arange(6.0).reshape(2, 3)
    passed = {
        "like it": np.full((2, 3), float(comm.rank)),
        "strided": np.full((3, 2), float(comm.rank)).T,
        "other shape": np.full(6, float(comm.rank)),
        "other dtype": np.full((2, 3), comm.rank, np.float32),
        "read-only": np.full((2, 3), float(comm.rank)),
        "list": [[comm.rank] * 3] * 2,
    }
    passed["read-only"].flags.writeable = False
    if comm.rank == 0:
        passed = dict.fromkeys(passed, first)
    returned = {name: comm.bcast(array) for name, array in passed.items()}
    right = [(array == np.arange(6.0).reshape(2, 3)).all() for array in returned.values()]
    for array in returned.values():
        array[:] = -1  # a copy on every rank
    return [all(right), {name: np.asarray(array).tolist() for name, array in passed.items()}]


@pytest.mark.parametrize("n", [1, 3])
def test_bcast_overwrites_an_array_like_rank_0s_and_nothing_else(n):
    whole = np.arange(6.0).reshape(2, 3).tolist()
    results = on_ranks(n, "test_comm:on_rank_overwritten")
    for rank, (right, passed) in enumerate(results):
        mine = [[rank] * 3] * 2
        kept = {"other shape": [rank] * 6, "other dtype": mine, "read-only": mine, "list": mine}
        assert right
        assert passed == dict.fromkeys(passed, whole) | (kept if rank else {})


def on_rank_chunks(bytes_):
    """Return what arrives where an array is many messages, and how many collectives that took."""
    names = []
    begin = comm.wait

    def record(ranks, name, *requests, spin_s):
        names.append([name, len(requests)])
        begin(ranks, name, *requests, spin_s=spin_s)

    array = np.arange(12.0).reshape(3, 4) * (comm.rank + 1)
    summed = [np.arange(7) + comm.rank, np.full((2, 2), 0.5, np.float32), np.empty(0)]
    images = np.arange(10.0).reshape(5, 2)[comm.rank :]
    with (
        mock.patch.object(comm, "_CHUNK", bytes_),
        mock.patch.object(comm, "wait", record),
        mock.patch.object(gather, "wait", record),
    ):
        comm.bcast_(array)
        comm.reduce_(summed, "sum", "test")
        gathered = rank0_accum_batches({"x": images})["x"]
    arrays = [array.tolist(), [each.tolist() for each in summed], gathered.tolist(), [*names]]
    long = [comm.bcast_obj("x" * 99 if comm.rank == 0 else None), comm.allgather_obj("y" * 99, "")]
    return [*arrays, long]


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("bytes_", [16, 24, 40, 1 << 30])
def test_what_travels_in_many_chunks_is_the_same(n, bytes_):
    results = on_ranks(n, "test_comm:on_rank_chunks", bytes_)
    array = np.arange(12.0).reshape(3, 4).tolist()
    summed = [(np.arange(7) * n + n * (n - 1) // 2).tolist(), [[0.5 * n] * 2] * 2, []]
    images = np.arange(10.0).reshape(5, 2)
    whole = np.concatenate([images[rank:] for rank in range(n)]).tolist()
    assert [r[:2] for r in results] == [[array, summed]] * n
    assert [r[2] for r in results] == [whole] + [[]] * (n - 1)
    if n > 1:  # ceilings: the last chunk is shorter
        bcasts = [["bcast_", 1]] * -(-96 // bytes_)
        requests = -(-7 // (bytes_ // 8)) + -(-4 // (bytes_ // 4))
        expected = [*bcasts, ["test", requests], ["rank0_accum_batches", 1]]
        assert [r[3] for r in results] == [expected] * n
    assert [r[4] for r in results] == [["x" * 99, ["y" * 99] * n]] * n


def on_rank_wait():
    """Return the pauses of rank 1 while rank 0 is away, and the tests between two of them."""
    pauses, tests, left = [], [0], threading.Event()
    sleep, test = wait.time.sleep, wait._test

    def count(requests):
        tests[-1] += 1
        return test(requests)

    def pause(seconds):
        pauses.append(seconds)
        tests.append(0)
        sleep(seconds)

    comm.barrier()
    if comm.rank == 0:
        left.wait(1)
    clock = SimpleNamespace(sleep=pause, perf_counter=time.perf_counter)
    with mock.patch.object(wait, "_test", count), mock.patch.object(wait, "time", clock):
        comm.barrier()
    return [pauses, tests[1:]]


def test_a_waiting_rank_sleeps_ever_longer_up_to_a_millisecond():
    _, (pauses, tests) = on_ranks(2, "test_comm:on_rank_wait")
    assert pauses[:6] == pytest.approx([20e-6 * 2**i for i in range(6)])
    assert max(pauses) == 1e-3
    assert set(tests[:-1]) == {wait._TESTS}


def test_what_has_come_during_the_last_sleep_is_not_late(monkeypatch):
    now = [0.0]
    request = SimpleNamespace(Test=lambda: now[0] > 0)
    clock = SimpleNamespace(sleep=lambda _: now.append(now.pop() + 1), perf_counter=lambda: now[0])
    monkeypatch.setattr(wait, "time", clock)
    wait._wait_longer([request], "call", 0.0, False, limit_s=0.5)
    with pytest.raises(TimeoutError, match="call: the other ranks did not come within 0.5 s"):
        wait._wait_longer([SimpleNamespace(Test=lambda: False)], "call", 0.0, False, limit_s=0.5)


def on_rank_freed():
    freed = comm.split(0)
    freed.Free()
    with pytest.raises(ValueError, match="has been freed"):
        comm.barrier(freed)
    world._broken.clear()  # the ranks live on


def test_a_communicator_that_was_freed_is_not_taken_for_all_ranks():
    on_ranks(2, "test_comm:on_rank_freed")


def test_a_single_process_is_rank_0_of_1():
    assert (comm.rank, comm.nworkers, comm.world()) == (0, 1, None)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        comm.nothing
