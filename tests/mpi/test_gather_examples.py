"""Batches that hypothesis makes up, gathered on 1 to 4 ranks, against NumPy's concatenation.

Rank 0 draws an example and tells it to all ranks, so that hypothesis can also shrink one that fails.
"""

import functools

import numpy as np
import pytest
from helpers.ranks import on_ranks

from rank0rl.mpi import comm
from rank0rl.mpi.gather import all_accum_batches, rank0_accum_batches

RANKS = 4
DTYPES = [
    *("?", "i1", "i2", "<i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16"),
    *(">i2", ">u4", ">i8", ">f4", ">f8", ">c16", "U3", ">U2", "S2", "V5", "M8[s]", ">m8[ms]"),
    [("a", ">i2"), ("b", "f8", (2,))],
]
WRONG = ["no dict", "objects", "text", "mask", "lambda", "number as name", "another name"]


def drawn():
    """Return the strategy of examples: plain data, from which each rank makes its batch."""
    from hypothesis import strategies as st

    each = functools.partial(st.lists, min_size=RANKS, max_size=RANKS)
    dtype = st.sampled_from(DTYPES)
    rows = st.fixed_dictionaries(
        {
            "rows": each(st.integers(0, 5)),
            "dtype": dtype,
            "shape": st.lists(st.integers(0, 3), max_size=2).map(tuple),
            "memory": st.sampled_from(sorted(MEMORY)),
        }
    )
    numbers = [st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.complex_numbers()]
    item = st.recursive(
        st.none() | st.integers() | st.text() | st.floats(allow_nan=False) | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
        max_leaves=5,
    )
    leaf = (
        rows
        | st.fixed_dictionaries({"dtype": dtype, "scalar": st.booleans()})
        | st.one_of([st.fixed_dictionaries({"numbers": each(number)}) for number in numbers])
        | st.fixed_dictionaries({"items": each(st.lists(item, max_size=3))})
    )
    name = st.text(max_size=3)
    tree = st.recursive(
        leaf,
        lambda inner: st.dictionaries(name, inner, max_size=3).map(lambda d: {"dict": d}),
        max_leaves=6,
    )
    return st.fixed_dictionaries(
        {
            "ranks": st.integers(1, RANKS),
            "to_all": st.booleans(),
            "seed": st.integers(0, 2**32),
            "batch": st.dictionaries(name, tree, max_size=5),
            "absent": st.sets(st.integers(0, RANKS - 1), max_size=1),
            "turned": st.booleans(),
            "wrong": st.none() | st.none() | st.sampled_from(WRONG),
            "wrong_rank": st.integers(0, RANKS - 1),
        }
    )


def strided(array):
    wide = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    wide[::2] = array
    return wide[::2]


def read_only(array):
    array.flags.writeable = False
    return array


def unaligned(array):
    return np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype)


MEMORY = {
    "contiguous": lambda array: array,
    "Fortran's order": np.asfortranarray,
    "every second row": strided,
    "backwards": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "one row for all": lambda array: np.broadcast_to(array[:1], array.shape),
    "read-only": read_only,
    "unaligned": lambda array: unaligned(array).reshape(array.shape) if array.size else array,
    "a subclass": lambda array: array.view(np.recarray) if array.dtype.names else array,
}


def made(leaf, rank, rng):
    """Return a rank's value of a leaf."""
    if "dict" in leaf:
        return {name: made(inner, rank, rng) for name, inner in leaf["dict"].items()}
    if "items" in leaf:
        return leaf["items"][rank]
    if "numbers" in leaf:
        return leaf["numbers"][rank]
    dtype = np.dtype(leaf["dtype"])
    shape = (leaf["rows"][rank], *leaf["shape"]) if "rows" in leaf else ()
    array = rng.integers(0, 2, (*shape, dtype.itemsize), np.uint8)  # 0 and 1: any dtype is that
    array = array.reshape(-1).view(dtype).reshape(shape)
    if "rows" in leaf:
        return MEMORY[leaf["memory"]](array)
    # Scalars of text are as long as it is, and those of long doubles have other padding.
    scalar = leaf["scalar"] and dtype.char not in "SUg"
    return array[()] if scalar else array


def batch_of(example, rank):
    """Return a rank's batch, without what is wrong with it."""
    if rank in example["absent"]:
        return {}
    rng = np.random.default_rng([example["seed"], rank])
    return made({"dict": example["batch"]}, rank, rng)


def passed(example, rank):
    """Return what a rank passes."""
    batch = batch_of(example, rank)
    if example["turned"] and rank % 2:
        batch = dict(reversed(batch.items()))
    wrong = {
        "no dict": [batch],
        "objects": {**batch, "wrong": np.array([None, {}])},
        "text": {**batch, "wrong": {"inside": "text"}},
        "mask": {**batch, "wrong": np.ma.zeros(3)},
        "lambda": {**batch, "wrong": [lambda: 0]},
        "number as name": {**batch, 5: np.zeros(3)},
        "another name": {**batch, "another name": np.zeros(3)},
    }
    return wrong[example["wrong"]] if rank == wrong_rank(example) else batch


def wrong_rank(example):
    """Return the rank that passes something wrong; None if nobody does."""
    rank = example["wrong_rank"] % example["ranks"]
    present = set(range(example["ranks"])) - example["absent"] - {rank}
    differs = any(flat(batch_of(example, r)) for r in present)
    if example["wrong"] is None or (example["wrong"] == "another name" and not differs):
        return None
    return rank


def flat(batch, path=()):
    """Return the leaves of a batch by path."""
    if not isinstance(batch, dict):
        return {path: batch}
    inner = [flat(value, (*path, name)).items() for name, value in batch.items()]
    return {where: value for items in inner for where, value in items}


def whole(example):
    """Return path -> what NumPy makes of the batches of all ranks."""
    batches = [flat(batch_of(example, rank)) for rank in range(example["ranks"])]
    batches = [batch for rank, batch in enumerate(batches) if rank not in example["absent"]]

    def together(values):
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        dtype = np.asarray(values[0]).dtype
        return np.concatenate([np.atleast_1d(np.asarray(v)) for v in values], dtype=dtype)

    return {path: together([batch[path] for batch in batches]) for path in (batches or [{}])[0]}


def same(got, expected):
    if isinstance(expected, list):
        return got == expected
    return (got.dtype, got.shape) == (expected.dtype, expected.shape) and (
        got.tobytes() == expected.tobytes()
    )


def outcome(example, ranks):
    """Gather; return what is not as expected, and the error."""
    if comm.rank >= example["ranks"]:
        return [], None
    gather = all_accum_batches if example["to_all"] else rank0_accum_batches
    try:
        got = flat(gather(passed(example, comm.rank), ranks))
    except ValueError as error:
        return [], str(error)
    expected = whole(example)
    if comm.rank and not example["to_all"]:
        expected = {path: value[:0] for path, value in expected.items()}
    wrong = got.keys() ^ expected.keys()
    return [
        *wrong,
        *(path for path in got.keys() - wrong if not same(got[path], expected[path])),
    ], ""


def on_rank_examples(count):
    """Return how many examples were tried; on rank 0, one that is wrong is an error."""
    every = {n: comm.split(comm.rank < n) for n in range(1, RANKS + 1)}
    tried = 0

    def outcomes(example):
        """Return what each rank makes of rank 0's example; None if that is the end."""
        example = comm.bcast_obj(example)
        if example is None:
            return None
        nonlocal tried
        tried += 1
        return comm.allgather_obj(outcome(example, every[example["ranks"]]), "outcomes")

    if comm.rank == 0:
        try:
            drive(outcomes, count)
        finally:
            outcomes(None)
    else:
        while outcomes(None):
            pass
    for ranks in every.values():
        ranks.Free()
    return tried


def drive(outcomes, count):
    """Raise unless the outcomes of so many examples are right."""
    import hypothesis

    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn())
    def check(example):
        each = outcomes(example)
        assert [wrong for wrong, _ in each] == [[]] * RANKS, example
        said, *others = (said for _, said in each[: example["ranks"]])
        assert others == [said] * len(others), example
        assert bool(said) == (wrong_rank(example) is not None), (said, example)
        assert not said or f"rank {wrong_rank(example)}" in said, (said, example)

    check()


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_gather_is_numpys_concatenation(count):
    """One job for all numbers of ranks, because to start one takes seconds."""
    tried = on_ranks(RANKS, "test_gather_examples:on_rank_examples", count)
    assert tried == [tried[0]] * RANKS
    assert tried[0] >= count
