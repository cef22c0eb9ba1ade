"""Errors in collectives: all ranks have the same one, or no collective follows."""

import contextlib

import numpy as np
import pytest
from helpers.ranks import on_ranks

import rank0rl
from rank0rl.mpi import comm, gather, world
from rank0rl.mpi.gather import all_accum_batches, rank0_accum_batches


def test_what_goes_wrong_before_the_first_message_is_a_text():
    def fail(error):
        raise error

    assert world.attempt(lambda: 3, 0) == (3, "")
    assert world.attempt(lambda: fail(ValueError("no")), 0) == (0, "no")
    assert world.attempt(lambda: fail(ValueError()), 0) == (0, "ValueError()")
    assert world.attempt(lambda: fail(KeyError("x")), 0) == (0, "KeyError: 'x'")


def test_a_single_process_goes_on_after_any_error():
    with pytest.raises(TypeError):
        comm.reduce_(None, "sum", "test", comm=5)
    assert rank0rl.all_sum(1) == 1


class Sour:
    """Can be pickled, and raises on some ranks when it is unpickled."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __reduce__(self):
        return _unpickled, (self.ranks,)


def _unpickled(ranks):
    if comm.rank in ranks:
        raise LookupError("on purpose")
    return "sour"


def on_rank_unpickled():
    """Return what is raised where all ranks cannot unpickle, and what follows; then where only rank 0 cannot."""
    last, said = comm.rank == comm.nworkers - 1, []
    calls = [
        lambda: all_accum_batches({"a": [Sour([0, 1, 2]) if last else 1]}),
        lambda: comm.bcast_obj(Sour([0, 1, 2])),
        lambda: comm.allgather_obj(Sour([0, 1, 2]), "all"),
        lambda: rank0rl.all_sum(1),
        lambda: rank0_accum_batches({"a": [Sour([0]) if last else 1]})["a"],
        lambda: rank0rl.all_sum(1),
        lambda: rank0_accum_batches({"b": np.zeros(1)}),
    ]
    for call in calls:
        try:
            said.append(repr(call()))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_object_that_one_rank_cannot_unpickle_is_named_to_all():
    results = on_ranks(3, "test_errors:on_rank_unpickled", fresh=True)
    first, *others = results
    why = "cannot be unpickled here: LookupError: on purpose"
    for said in results:
        assert said[0].startswith("RuntimeError: all_accum_batches: the list 'a' of rank 2 came")
        assert said[1].startswith("RuntimeError: bcast_obj: the object of rank 0 came")
        assert said[2].startswith("RuntimeError: all: the object of rank 0 came")
        assert all(why in text for text in said[:3])
        assert said[3] == "3"  # all ranks had the same error, so they go on
        assert said[5:] == first[5:]
    assert first[4].startswith("RuntimeError: rank0_accum_batches: the list 'a' of rank 2 came")
    assert {said[4] for said in others} == {"[]"}
    for text, what in zip(first[5:], ("all_sum", "rank0_accum_batches"), strict=True):
        assert text.startswith(f"ValueError: {what}: an error on rank 0 alone came before")
        assert why in text


def on_rank_out_of_step():
    """Fail on rank 0 alone while the others wait for its message, swallow the error, and go on."""

    def full(*_):
        raise MemoryError("on purpose")

    gather._empty_rows = full if comm.rank == 0 else gather._empty_rows
    for _ in range(9):
        with contextlib.suppress(Exception):
            rank0_accum_batches({"a": np.zeros(2)})
            rank0rl.all_sum(1)


def test_a_rank_that_is_out_of_step_refuses_to_go_on():
    with pytest.raises(AssertionError) as ended:
        on_ranks(2, "test_errors:on_rank_out_of_step", fresh=True)
    assert (
        "OutOfStep: an earlier collective failed on rank 0, and the others may not know of it"
        in str(ended.value)
    )
    assert "MemoryError: on purpose" in str(ended.value)


def test_a_rank_that_cannot_report_its_error_still_ends_the_job(monkeypatch):
    def report(*_):
        raise MemoryError

    ended = []
    monkeypatch.setattr(world, "abort", ended.append)
    with pytest.raises(MemoryError):
        world._end_job(report, ValueError, ValueError(), None)
    assert ended == [1]
