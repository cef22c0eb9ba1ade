"""Nested dicts, numbers and lists of all ranks, on rank 0 or on every rank: at 1, 2, 3 ranks."""

import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks, run

from rank0rl.mpi import comm
from rank0rl.mpi.gather import all_accum_batches, rank0_accum_batches

RANKS = [1, pytest.param(2, marks=pytest.mark.slow), 3]


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


@pytest.mark.fast(1)
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


TENSORS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def tensors_of(rank):
    """Return a batch of tensors: of every dtype, without axes, without rows, not contiguous, in a dict."""
    rows = [2, 0, 3][rank]
    every = {str(dtype): torch.full((rows, 2), rank + 0.1).to(dtype) for dtype in TENSORS}
    return {
        **every,
        "single": {
            "real": torch.tensor(rank + 0.1, dtype=torch.bfloat16),
            "int": torch.tensor(rank),
        },
        "param": torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).T[:, :rows].T * 1.5),
        "conj": torch.full((rows,), rank + 1j).conj(),
        "empty": torch.empty(0, 3),
        "array": np.arange(rows),
    }


def plain_tensors(value):
    """Return a batch as JSON: of each tensor its dtype, shape, numbers, device, and whether it has a gradient."""
    if isinstance(value, dict):
        return {name: plain_tensors(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value)
    wide = value.to(torch.complex128)
    place = str(value.device), value.requires_grad
    return [str(value.dtype), repr(wide.tolist()), *value.shape, *place]


def whole_tensors(n, rows=slice(None)):
    """Return those of n ranks, put together by torch."""

    def together(values):
        if isinstance(values[0], dict):
            return {name: together([value[name] for value in values]) for name in values[0]}
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)[rows]
        return torch.cat([torch.atleast_1d(value.detach()) for value in values])[rows]

    return plain_tensors(together([tensors_of(rank) for rank in range(n)]))


def on_rank_tensors():
    mine, last = tensors_of(comm.rank), comm.rank == comm.nworkers - 1
    return [
        plain_tensors(rank0_accum_batches(mine)),
        plain_tensors(all_accum_batches(mine)),
        plain_tensors(all_accum_batches({"x": torch.ones(2).bfloat16(), "y": 1} if last else {})),
    ]


@pytest.mark.parametrize("n", RANKS)
def test_tensors_come_back_as_tensors(n):
    results = on_ranks(n, "test_gather:on_rank_tensors")
    whole = whole_tensors(n)
    assert [r[0] for r in results] == [whole] + [whole_tensors(n, slice(0))] * (n - 1)
    assert [r[1] for r in results] == [whole] * n
    ones = ["torch.bfloat16", repr([1 + 0j, 1 + 0j]), 2, "cpu", False]
    assert [r[2] for r in results] == [{"x": ones, "y": plain(np.array([1]))}] * n


def test_arrays_of_one_process_are_not_those_that_were_passed():
    batch = {"x": np.ones(3), "in": {"y": np.ones((3, 2))}}
    for gathered in (rank0_accum_batches(batch), all_accum_batches(batch)):
        assert not np.shares_memory(gathered["x"], batch["x"])
        assert not np.shares_memory(gathered["in"]["y"], batch["in"]["y"])


def test_a_tensor_of_one_process_is_not_the_one_that_was_passed():
    x = torch.zeros(2, requires_grad=True)
    rank0_accum_batches({"x": x})["x"][:] = 1
    assert x.tolist() == [0, 0]


def test_torch_is_loaded_only_where_tensors_come(tmp_path):
    """Rank 0 has no tensors, and has not loaded torch before rank 1 sends it some."""
    code = """
import sys
import numpy as np
import rank0rl
if rank0rl.mpi_fork(2) == "parent":
    sys.exit()
arrays = rank0rl.rank0_accum_batches({"x": np.zeros(2)})
loaded = ["torch" in sys.modules]
if rank0rl.rank == 1:
    import torch
batch = rank0rl.rank0_accum_batches({"x": torch.ones(2)} if rank0rl.rank == 1 else {})
rank0rl.print0(loaded, batch)
"""
    (tmp_path / "script.py").write_text(code)
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = run([sys.executable, str(tmp_path / "script.py")], env=paths)
    assert done.stdout == "[False] {'x': tensor([1., 1.])}\n", done.stderr


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
    "a tensor and an array": (
        {"a": torch.zeros(2)},
        {"a": np.zeros(2, np.float32)},
        "'a' is torch.float32 () on rank 0 and <f4 () on rank 1",
    ),
    "tensors of two dtypes": (
        {"a": torch.tensor(1.0)},
        {"a": torch.tensor(1.0).bfloat16()},
        "one number, torch.float32 on rank 0 and one number, torch.bfloat16 on rank 1",
    ),
    "a sparse tensor": (
        {"a": {"b": torch.eye(2).to_sparse()}},
        {},
        "('a', 'b')\": a tensor must be dense and hold data: got one that is sparse; pass "
        "tensor.to_dense()",
    ),
    "a tensor without data": ({}, {"a": torch.ones(2, device="meta")}, "make it on another device"),
    "a tensor that is no array": (
        {"a": torch.ones(2).to(torch.float8_e4m3fn)},
        {"a": np.zeros(2)},
        "rank 0: 'a': a tensor of dtype torch.float8_e4m3fn has no array .*cpu\\(\\).numpy\\(\\)$",
    ),
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
