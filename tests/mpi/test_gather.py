"""Nested dicts, numbers and lists of all ranks, on rank 0 or on every rank: at 1, 2, 3 ranks."""

import re
import resource

import numpy as np
import pytest
from on_ranks import on_ranks

from rank0rl.mpi import comm
from rank0rl.mpi.gather import all_accum_batches, rank0_accum_batches

RANKS = [1, 2, 3]


def batch_of(rank):
    """Return the batch of one rank: uneven; rank 1 has no rows and no items."""
    rows = [2, 0, 3][rank]
    return {
        "obs": {"image": np.full((rows, 2, 2), rank, np.uint8), "deep": {"x": np.arange(rows)}},
        "z": np.full(rows, rank * 1j, np.complex64),
        "real": 0.5 + rank,
        "whole": rank,
        "yes": rank > 0,
        "phase": 1j * rank,
        "zero_d": np.array(rank, np.int16),
        "numpy": np.float32(rank),
        "words": [f"rank {rank}", {"a": np.arange(rank)}] * min(rows, 1),
    }


def plain(value):
    """Return a result as JSON, with dtypes."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), repr(value.tolist())]
    return value


def whole(n):
    """Return the batches of n ranks, put together by NumPy."""
    batches = [batch_of(rank) for rank in range(n)]

    def together(values):
        if isinstance(values[0], dict):
            return {name: together([value[name] for value in values]) for name in values[0]}
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        if np.ndim(values[0]):
            return np.concatenate(values)
        return np.array(values, np.asarray(values[0]).dtype)

    return together(batches)


def emptied(batch):
    return {k: emptied(v) if isinstance(v, dict) else v[:0] for k, v in batch.items()}


def on_rank_nested():
    to_rank0 = rank0_accum_batches(batch_of(comm.rank))
    to_all = all_accum_batches(batch_of(comm.rank))
    last = comm.rank == comm.nworkers - 1
    absent = all_accum_batches(
        batch_of(comm.rank) if last else {"nothing": {}} if comm.rank else {}
    )
    return [plain(to_rank0), plain(to_all), plain(absent)]


@pytest.mark.parametrize("n", RANKS)
def test_nested_dicts_numbers_and_lists(n):
    results = on_ranks(n, "test_gather:on_rank_nested")
    expected = whole(n)
    assert [r[0] for r in results] == [plain(expected)] + [plain(emptied(expected))] * (n - 1)
    assert [r[1] for r in results] == [plain(expected)] * n
    last = batch_of(n - 1)
    alone = {**last, "obs": last["obs"]}
    numbers = {k: np.array([v]) for k, v in last.items() if np.ndim(v) == 0 and k != "obs"}
    assert [r[2] for r in results] == [plain({**alone, **numbers})] * n


class Sour:
    """Raises whatever it is told to when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


RECURSIVE = {}
RECURSIVE["a"] = RECURSIVE

WRONG = {
    "no dict": ({"a": 1}, 5, "rank 1: a batch must be a dict, .*: got int"),
    "nothing": (None, {"a": 1}, "rank 0: a batch must be a dict, .*: got NoneType"),
    "a dict in itself": ({"a": 1}, RECURSIVE, "rank 1: RecursionError: "),
    "an error without words": ({"a": 1}, {"a": [Sour(KeyError())]}, "rank 1: the list 'a' cannot"),
    "another kind": ({"a": 1.0}, {"a": [1.0]}, "one number, <f8 on rank 0 and a list"),
    "another dtype": ({"a": 1.0}, {"a": 1}, "one number, <f8 on rank 0 and one number, <i8"),
    "a name inside": (
        {"a": {"b": 1}},
        {"a": {"c": 1}},
        "('a', 'b')\" is one number, <i8 on rank 0 and m",
    ),
    "a word": ({"a": "x"}, {"a": "x"}, "rank 0: 'a' must be a numpy array with rows"),
    "not to be sent": ({"a": [1]}, {"a": [lambda: 0]}, "rank 1: the list 'a' cannot be sent"),
    "a key that is no text": ({1: 1}, {"a": 1}, "rank 0: names must be strings: got 1"),
    "a mask": ({"a": np.ma.zeros(2)}, {"a": np.zeros(2)}, "got MaskedArray; make it one"),
    "ragged": ({"a": ((1, 2), (3,))}, {"a": np.zeros(2)}, "rank 0: 'a' must be a numpy array"),
    "empty inside": ({"a": {"x": np.ones(2)}}, {"a": {}, "b": 1}, "missing on rank"),
    "inside or dotted": ({"a": {"b": 1}}, {"a.b": 1}, "missing on rank"),
    "too large": ({"a": 2**70}, {"a": 1}, "rank 0: 'a' must be a numpy array with rows"),
}


def on_rank_wrong():
    said = []
    for first, second, _ in WRONG.values():
        for collect in (rank0_accum_batches, all_accum_batches):
            try:
                collect(second if comm.rank else first)
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
    return said


def test_wrong_use_is_the_same_error_on_every_rank():
    first, second = on_ranks(2, "test_gather:on_rank_wrong")
    assert first == second
    expected = [(name, words) for _, _, words in WRONG.values() for name in ("rank0", "all")]
    for message, (name, words) in zip(first, expected, strict=True):
        assert message.startswith(f"{name}_accum_batches: ")
        assert words in message or re.search(words, message)


def on_rank_large(rows, columns):
    """Return by how much rank 0's peak memory grows, and what it had before, per byte of the batch."""
    mine = np.full((rows, columns), comm.rank, np.float32)
    mine[-1] = 7
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = rank0_accum_batches({"x": mine})["x"]
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if comm.rank:
        return len(out)
    ranks = range(comm.nworkers)
    right = all((out[r * rows : (r + 1) * rows - 1] == r).all() for r in ranks)
    right = right and all((out[(r + 1) * rows - 1] == 7).all() for r in ranks)
    return [out.nbytes, right, grown / out.nbytes, mine.nbytes / out.nbytes]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8])
def test_a_batch_of_more_than_2_gib_and_the_memory_that_it_takes(n):
    rows, columns = 2_000_000 // n, 300
    (nbytes, right, gathered, own), *others = on_ranks(
        n, "test_gather:on_rank_large", rows, columns, fresh=True
    )
    assert nbytes > 2**31
    assert right
    assert others == [0] * (n - 1)
    assert gathered <= 1.2
    assert gathered + own <= 1.2 or n == 2  # where rank 0's own part is half of the batch
