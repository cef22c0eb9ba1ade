"""Rows from all ranks to rank 0, on one node or on several: at 1, 2, 3 ranks."""

from unittest import mock

import numpy as np
import pytest
from helpers.ranks import on_ranks

from rank0rl.mpi import comm, gather
from rank0rl.mpi.gather import rank0_accum_batches

RANKS = [1, 2, 3]
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", ">f4"]


def batch_of(rank):
    """Return a rank's batch: uneven, empty on rank 1, up to three axes, some non-contiguous."""
    rng = np.random.default_rng(rank)
    rows = [3, 0, 5][rank]
    batch = {f"a{d}": rng.integers(0, 2, (rows, 2)).astype(d) for d in DTYPES}
    batch["images"] = rng.random((rows, 2, 3, 4))
    batch["strided"] = rng.random((4, 2 * rows)).T[::2]
    batch["empty_rows"] = np.empty((rows, 0))
    batch["other_count"] = np.arange(rank + 1)
    batch |= {f"more{i}": np.full(i + rank, i) for i in range(20)}  # more counts than a header has
    batch["text"] = np.full(rows, f"r{rank}", "U3")
    return batch


def on_rank_gather():
    out = rank0_accum_batches(batch_of(comm.rank % 3))
    whole = [batch_of(r % 3) for r in range(comm.nworkers)]
    if comm.rank:
        whole = [{name: array[:0] for name, array in whole[0].items()}]
    wrong = []
    for name in whole[0]:
        each = [batch[name] for batch in whole]
        expected = np.concatenate(each, dtype=each[0].dtype)
        same = out[name].dtype == expected.dtype and np.array_equal(out[name], expected)
        wrong += [] if same else [name]
    return [list(out) == list(whole[0]), wrong]


@pytest.mark.parametrize("n", RANKS)
def test_gather_is_the_concatenation_of_all_batches_on_rank_0_and_no_rows_elsewhere(n):
    assert on_ranks(n, "test_rows:on_rank_gather") == [[True, []]] * n


def on_rank_nothing(absent):
    """Return True if ranks that pass {} get what they get with zero rows of every name."""
    batch = batch_of(comm.rank)
    if comm.rank in absent:
        out = rank0_accum_batches({})
        batch = {name: array[:0] for name, array in batch.items()}
    else:
        out = rank0_accum_batches(batch)
    same = rank0_accum_batches(batch)
    return list(out) == list(same) and all(
        (out[n].dtype, out[n].tobytes()) == (same[n].dtype, same[n].tobytes()) for n in same
    )


@pytest.mark.parametrize("absent", [[0], [2], [0, 1]])
def test_a_rank_that_has_nothing_passes_nothing(absent):
    assert on_ranks(3, "test_rows:on_rank_nothing", absent) == [True] * 3


def on_rank_nothing_at_all():
    return rank0_accum_batches({})


@pytest.mark.parametrize("n", RANKS)
def test_nobody_has_anything(n):
    assert on_ranks(n, "test_rows:on_rank_nothing_at_all") == [{}] * n


def on_rank_nodes(sizes):
    """Return what arrives as if the ranks were on nodes of these sizes, and what all of them exchanged."""
    from mpi4py import MPI

    all_ranks = comm.world()
    alone = comm.nodes(all_ranks)
    ends = np.cumsum(sizes)
    node = int(np.searchsorted(ends, comm.rank, side="right"))
    inner = all_ranks.Split(node, comm.rank)
    outer = all_ranks.Split(0 if inner.rank == 0 else MPI.UNDEFINED, comm.rank)
    outer = outer if inner.rank == 0 else None
    by_node = comm.Nodes(inner, outer, [0, *ends[:-1].tolist()])
    all_ranks.Set_attr(comm._nodes_key(), [by_node])
    sent = []
    wait = comm.wait

    def record(ranks, *args, **kwargs):
        sent.append(ranks)
        wait(ranks, *args, **kwargs)

    weights = np.full(5, comm.rank)
    with mock.patch.object(comm, "wait", record), mock.patch.object(gather, "wait", record):
        gathered = on_rank_gather()
        comm.bcast_(weights)
    all_ranks.Delete_attr(comm._nodes_key())
    return [alone is None, gathered, weights.tolist(), sum(ranks == all_ranks for ranks in sent)]


@pytest.mark.parametrize("sizes", [[2, 1], [1, 2], [2, 2]])
def test_rows_and_weights_travel_by_node(sizes):
    results = on_ranks(sum(sizes), "test_rows:on_rank_nodes", sizes)
    expected = [True, [True, []], [0] * 5, 0]  # nothing but headers among all ranks
    assert results == [expected] * sum(sizes)


def test_more_rows_than_mpi_can_count_are_refused():
    counts = np.array([[2**30], [2**30]])
    with pytest.raises(ValueError, match=f"{gather.MOST_ROWS} rows in one array: got {2**31}"):
        gather._move_rows([np.empty(0)], counts, "rank0_accum_batches", None)
