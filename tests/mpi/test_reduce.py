"""Sums, means and extremes over ranks, against NumPy on the whole data, at 1, 2, 3 ranks."""

import math

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks

import rank0rl
from rank0rl.compat.mpi_tools import mpi_statistics_scalar
from rank0rl.mpi import comm, reduce

RANKS = [1, pytest.param(2, marks=pytest.mark.slow), 3]
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16"]
SWAPPED = [">i4", ">f8"]


def numbers_of(dtype, rank):
    """Return small numbers, whose sums and products every dtype holds; strided."""
    return np.random.default_rng(rank).integers(0, 3, (4, 6)).astype(dtype)[::2, ::3]


def expected(dtype, op, n):
    whole = np.stack([numbers_of(dtype, rank) for rank in range(n)])
    if op == "prod" and dtype == "?":
        return whole.all(axis=0)
    return getattr(np, op)(whole, axis=0)


def result_dtype(dtype, op):
    if dtype == "?":
        return {"sum": "i8", "mean": "f8"}.get(op, "?")
    return "f8" if op == "mean" and np.dtype(dtype).kind in "iu" else dtype


def on_rank_arrays():
    wrong, n = [], comm.nworkers
    for dtype in DTYPES + SWAPPED:
        for op in reduce.OPS:
            if np.dtype(dtype).kind == "c" and op in ("max", "min"):
                continue
            out = reduce.all_reduce(numbers_of(dtype, comm.rank), op)
            same = np.allclose(out, expected(dtype, op, n), rtol=1e-3 if dtype == "f2" else 1e-6)
            if not same or out.dtype != np.dtype(result_dtype(dtype, op)):
                wrong.append([dtype, op, repr(out)])
    empty = rank0rl.all_sum(np.empty((0, 3), np.int16))
    wrong += [] if (empty.shape, empty.dtype) == ((0, 3), np.int16) else ["empty"]
    return wrong


@pytest.mark.parametrize("n", RANKS)
def test_every_dtype_and_operation(n):
    assert on_ranks(n, "test_reduce:on_rank_arrays") == [[]] * n


def on_rank_kinds():
    r = comm.rank
    odd = 2**62 + 1 if r == 0 else 0  # no float64 is this number
    tensors = [
        torch.tensor(1.0 + r),
        torch.full((2, 2), r, dtype=torch.int64).T,
        torch.full((3,), 0.5, dtype=torch.bfloat16),
        torch.full((3,), 0.5, dtype=torch.float16),
        torch.arange(6.0).reshape(2, 3)[:, ::2] * r,
        torch.empty(0, 2),
        torch.tensor(r == 0),
    ]
    summed = [rank0rl.all_sum(t) for t in tensors]
    numbers = [rank0rl.all_sum(x) for x in (odd, 0.5, True, 1j, np.float32(1), np.int8(1), [1, r])]
    means = [rank0rl.all_mean(x) for x in (r, float(r), np.float32(r), torch.tensor(r), [r, 1.0])]
    bits = rank0rl.all_sum(np.random.default_rng(r).standard_normal(100_001)).tobytes().hex()
    nan = np.array([1.0, np.nan if r == 0 else 0.0, np.inf, -np.inf])
    return {
        "tensors": [[str(t.dtype), t.tolist()] for t in summed],
        "numbers": [[type(x).__name__, repr(x)] for x in numbers],
        "means": [[type(x).__name__, repr(x)] for x in means],
        "bits": hash(bits) if comm.nworkers == 1 else bits[:4000] + bits[-4000:],
        "nan": [repr(reduce.all_reduce(nan, op).tolist()) for op in ("max", "min")],
        "zero": repr(rank0rl.all_sum(-0.0)),
    }


@pytest.mark.parametrize("n", RANKS)
def test_what_comes_back_is_what_came_in(n):
    results = on_ranks(n, "test_reduce:on_rank_kinds")
    first, s, m = results[0], n * (n - 1) // 2, (n - 1) / 2
    assert all(result == first for result in results)
    assert first["tensors"] == [
        ["torch.float32", n + s],
        ["torch.int64", [[s, s], [s, s]]],
        ["torch.bfloat16", [0.5 * n] * 3],
        ["torch.float16", [0.5 * n] * 3],
        ["torch.float32", [[0, 2 * s], [3 * s, 5 * s]]],
        ["torch.float32", []],
        ["torch.int64", 1],
    ]
    assert first["numbers"] == [
        ["int", str(2**62 + 1)],
        ["float", repr(0.5 * n)],
        ["int", str(n)],
        ["complex", repr(n * 1j)],
        ["float32", f"np.float32({float(n)})"],
        ["int8", f"np.int8({n})"],
        ["ndarray", f"array([{n}, {s}])"],
    ]
    assert first["means"] == [
        ["float", repr(m)],
        ["float", repr(m)],
        ["float32", f"np.float32({m})"],
        ["Tensor", repr(torch.tensor(m, dtype=torch.float64))],
        ["ndarray", repr(np.array([m, 1.0]))],
    ]
    assert first["nan"] == ["[1.0, nan, inf, -inf]"] * 2
    assert first["zero"] == "-0.0"


NEAR = [  # numbers of each rank, whose sum in float64 is beyond the limits, or within, and wrong
    np.uint64([2**63 + 1023, 2**62 + 1024 + 511, 2**62 - 2048 + 255]),
    np.int64([2**62 + 511, 2**61 + 512 + 255, 2**61 - 1024 + 127]),
    np.int64([2**63 - 1, -1, 1]),
    np.int64([-(2**63), 1, -1]),
    np.uint64([2**64 - 3, 1, 1]),
]


def on_rank_near_the_limits():
    found = []
    for numbers in NEAR:
        for size in (1, 100):  # in the message of the layout, and in one of its own
            try:
                found.append(rank0rl.all_sum(np.full(size, numbers[comm.rank])).tolist())
            except OverflowError:
                found.append("too large")
    return found


def test_sums_of_integers_near_the_limits_are_exact_or_an_error():
    whole = [sum(map(int, numbers)) for numbers in NEAR]
    expected = ["too large"] * 4 + [[x] * size for x in whole[2:] for size in (1, 100)]
    assert on_ranks(3, "test_reduce:on_rank_near_the_limits") == [expected] * 3


def on_rank_statistics():
    samples = np.random.default_rng(comm.rank).normal(1000.0, 1.0, [7, 0, 12][comm.rank])
    all_of_them = (samples, torch.empty(0), [3.0] if comm.rank == 0 else [])
    return [list(mpi_statistics_scalar(x, with_min_and_max=True)) for x in all_of_them]


@pytest.mark.parametrize("n", RANKS)
def test_statistics_of_all_samples_with_uneven_and_empty_shards(n):
    results = on_ranks(n, "test_reduce:on_rank_statistics")
    some, none, one = results[0]
    sizes = [7, 0, 12][:n]
    whole = [np.random.default_rng(r).normal(1000.0, 1.0, k) for r, k in enumerate(sizes)]
    whole = np.concatenate(whole)
    assert some == pytest.approx([whole.mean(), whole.std(), whole.min(), whole.max()])
    assert all(math.isnan(x) for x in none[:2])
    assert none[2:] == [math.inf, -math.inf]
    assert one == [3.0, 0.0, 3.0, 3.0]
    assert all(result[0] == some for result in results)


def bad(kind):
    """Make a call that is wrong on the last rank, or on all."""
    last = comm.rank == comm.nworkers - 1
    calls = {
        "op": lambda: reduce.all_reduce(1.0, "avg" if last else "sum"),
        "shape": lambda: rank0rl.all_sum(np.zeros(3 if last else 2)),
        "kind": lambda: rank0rl.all_mean(torch.zeros(2) if last else np.zeros(2, np.float32)),
        "device": lambda: rank0rl.all_sum(torch.zeros(2, device="meta" if last else "cpu")),
        "sparse": lambda: rank0rl.all_sum(torch.eye(2).to_sparse() if last else torch.eye(2)),
        "word": lambda: rank0rl.all_sum("a" if last else 1),
        "words": lambda: rank0rl.all_sum(np.array(["a"] if last else [1.0])),
        "complex": lambda: reduce.all_reduce(1j, "max"),
        "overflow": lambda: rank0rl.all_sum(np.array([100], np.int8)),
        "overflow of 64 bits": lambda: rank0rl.all_sum(2**62),
        "overflow without a sign": lambda: reduce.all_reduce(np.array([2**40], np.uint64), "prod"),
        "gradient": lambda: rank0rl.all_sum([torch.ones((), requires_grad=last)]),
    }
    return calls[kind]()


SAID = {
    "op": "rank 1: op must be one of sum, mean, prod, max, min: got 'avg'",
    "shape": "'x' is <f8 (2,) on rank 0 and <f8 (3,) on rank 1",
    "kind": "'x' is <f4 (2,) on rank 0 and torch.float32 (2,), cpu on rank 1",
    "device": "rank 1: 'x': a tensor must be dense and hold data: got one that is on the meta device",
    "sparse": "rank 1: 'x': a tensor must be dense and hold data: got one that is sparse",
    "word": "rank 1: 'x': expected a number, an array or a tensor: got str",
    "words": "rank 1: 'x': expected numbers: got dtype <U1",
    "complex": "rank 0: 'x': complex numbers have no max",
    "overflow": "a result does not fit int8: 200 to 200",
    "overflow of 64 bits": "a result does not fit 64 bits: 9.22337e+18 to 9.22337e+18; pass floats",
    "overflow without a sign": "a result does not fit 64 bits: 1.20893e+24 to 1.20893e+24",
    "gradient": "rank 1: 'x': Can't call numpy() on Tensor that requires grad",
}


def on_rank_wrong():
    said = []
    for kind in SAID:
        try:
            said.append(repr(bad(kind)))
        except (ValueError, OverflowError) as error:
            said.append(str(error))
    return [said, rank0rl.all_sum(1)]


def test_wrong_use_is_the_same_error_on_every_rank_and_nobody_is_left_behind():
    results = on_ranks(2, "test_reduce:on_rank_wrong")
    assert results[0] == results[1]
    said, after = results[0]
    for message, words in zip(said, SAID.values(), strict=True):
        assert words in message
    assert after == 2


@pytest.mark.parametrize("kind", ["op", "device", "sparse", "word", "words", "complex"])
def test_what_is_wrong_is_wrong_in_a_single_process_too(kind):
    with pytest.raises(ValueError, match=SAID[kind].partition(": ")[2].split("got")[0]):
        bad(kind)
