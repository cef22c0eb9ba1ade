"""The ranks, and arrays between them: every collective at 1, 2, 3 ranks."""

import itertools
import resource
import time

import numpy as np
import pytest
from on_ranks import on_ranks

from rank0rl.mpi import comm, world
from rank0rl.mpi.counter import Tickets
from rank0rl.mpi.gather import rank0_accum_batches

RANKS = [1, 2, 3]
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", ">f4"]


def part(rank):
    """This rank's part of a batch: uneven, empty on rank 1, of up to three axes, non-contiguous."""
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
    out = rank0_accum_batches(part(comm.rank % 3))
    whole = [part(r % 3) for r in range(comm.nworkers)]
    if comm.rank:
        whole = [{name: array[:0] for name, array in whole[0].items()}]
    wrong = []
    for name in whole[0]:
        parts = [batch[name] for batch in whole]
        expected = np.concatenate(parts, dtype=parts[0].dtype)
        same = out[name].dtype == expected.dtype and np.array_equal(out[name], expected)
        wrong += [] if same else [name]
    return [list(out) == list(whole[0]), wrong]


@pytest.mark.parametrize("n", RANKS)
def test_gather_is_the_concatenation_of_the_parts_on_rank_0_and_no_rows_elsewhere(n):
    assert on_ranks(n, "test_comm:on_rank_gather") == [[True, []]] * n


def on_rank_nothing(absent):
    """As a gather of zero rows by the ranks that are absent, but these do not know any name."""
    batch = part(comm.rank)
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
def test_a_rank_that_has_nothing_comes_with_nothing(absent):
    assert on_ranks(3, "test_comm:on_rank_nothing", absent) == [True] * 3


def on_rank_nothing_at_all():
    return rank0_accum_batches({})


@pytest.mark.parametrize("n", RANKS)
def test_nobody_has_anything(n):
    assert on_ranks(n, "test_comm:on_rank_nothing_at_all") == [{}] * n


def on_rank_nodes(sizes):
    """As if the ranks were on nodes of these sizes: what arrives, and what went between nodes."""
    from mpi4py import MPI

    everyone = comm.world()
    alone = world.nodes(everyone)
    ends = np.cumsum(sizes)
    node = int(np.searchsorted(ends, comm.rank, side="right"))
    inner = everyone.Split(node, comm.rank)
    outer = everyone.Split(0 if inner.rank == 0 else MPI.UNDEFINED, comm.rank)
    outer = outer if inner.rank == 0 else None
    nodes = world.Nodes(inner, outer, [0, *ends[:-1].tolist()])
    everyone.Set_attr(world._nodes_key(), [nodes])
    sent = []
    waits = comm.wait
    comm.wait = lambda ranks, *args, **kwargs: sent.append(ranks) or waits(ranks, *args, **kwargs)
    gathered = on_rank_gather()
    weights = np.full(5, comm.rank)
    comm.bcast_(weights)
    at_large = sum(ranks == everyone for ranks in sent)
    return [alone is None, gathered, weights.tolist(), at_large]


@pytest.mark.parametrize("sizes", [[2, 1], [1, 2], [2, 2]])
def test_rows_and_weights_travel_by_node(sizes):
    results = on_ranks(sum(sizes), "test_comm:on_rank_nodes", sizes)
    expected = [True, [True, []], [0] * 5, 2]  # all at once they only agree, in two messages
    assert results == [expected] * sum(sizes)


def on_rank_tickets(most):
    tickets = Tickets(7)
    rounds = []
    for _ in range(4):
        rounds.append(list(tickets.round(most if comm.rank == 0 else None)))
        comm.barrier()
    return rounds


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("most", [None, 0, 2])
def test_every_ticket_goes_to_one_rank_in_every_round(n, most):
    ranks = on_ranks(n, "test_comm:on_rank_tickets", most)
    for numbers in zip(*ranks, strict=True):
        if most is not None:
            assert len(numbers[0]) <= most
        if n > 1 or most is None:
            assert sorted(itertools.chain(*numbers)) == list(range(7))


WRONG = {
    "missing name": {"a": np.zeros((2, 3))},
    "other dtype": {"a": np.zeros((2, 3)), "b": np.zeros(2, np.float32)},
    "other trailing shape": {"a": np.zeros((2, 4)), "b": np.zeros(2)},
    "other axes": {"a": np.zeros((2, 3, 1)), "b": np.zeros(2)},
    "list": {"a": np.zeros((2, 3)), "b": [1.0, 2.0]},
    "scalar": {"a": np.zeros((2, 3)), "b": np.float64(1)},
    "object": {"a": np.zeros((2, 3)), "b": np.array([None, {}])},
    "text": {"a": np.zeros((2, 3)), "b": "word"},
    "unpicklable": {"a": np.zeros((2, 3)), "b": [lambda: 0]},
}


def on_rank_disagree():
    """Each kind of disagreement in turn, then a gather that works: nobody was left behind."""
    right = {"a": np.zeros((2, 3)), "b": np.zeros(2)}
    said = []
    for wrong in WRONG.values():
        try:
            rank0_accum_batches(wrong if comm.rank == comm.nworkers - 1 else right)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return [said, len(rank0_accum_batches(right)["a"])]


@pytest.mark.parametrize("n", [2, 3])
def test_a_disagreement_raises_the_same_error_on_every_rank(n):
    results = on_ranks(n, "test_comm:on_rank_disagree")
    said = results[0][0]
    assert all(result[0] == said for result in results)
    assert all(f"rank {n - 1}" in message for message in said)
    assert all("'b'" in m or "'a'" in m for m in said)
    assert [result[1] for result in results] == [2 * n] + [0] * (n - 1)


@pytest.mark.parametrize("kind", ["object", "text"])
def test_what_is_no_array_of_rows_is_refused_on_one_rank_too(kind):
    with pytest.raises(ValueError, match="'b' must be a numpy array with rows"):
        rank0_accum_batches(WRONG[kind])


def on_rank_broadcast():
    comm._CHUNK = 7  # bytes: several messages for one array
    array = np.arange(12.0).reshape(3, 4) * (comm.rank + 1)
    comm.bcast_(array)
    shared = comm.bcast_obj({"a": [1, "x"]} if comm.rank == 0 else None)
    grown = comm.bcast(
        array[:2] > 0 if comm.rank == 0 else None
    )  # its shape is not known elsewhere
    kinds = [np.array(5.0), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), [1, 2]]
    sent = [comm.bcast(kind if comm.rank == 0 else None) for kind in kinds]
    with pytest.raises(ValueError, match="bcast: rank 0 must have an array .* got dict"):
        comm.bcast({} if comm.rank == 0 else None)
    return [array.tolist(), shared, grown.tolist(), [repr(x) for x in sent]]


@pytest.mark.parametrize("n", RANKS)
def test_broadcast_and_share_give_every_rank_what_rank_0_has(n):
    array = np.arange(12.0).reshape(3, 4)
    kinds = [np.array(5.0), np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), np.array([1, 2])]
    kinds = [repr(x) for x in kinds]
    expected = [array.tolist(), {"a": [1, "x"]}, (array[:2] > 0).tolist(), kinds]
    assert on_ranks(n, "test_comm:on_rank_broadcast") == [expected] * n


def on_rank_wait():
    comm.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    if comm.rank == 0:
        time.sleep(2)
    comm.barrier()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_waiting_rank_sleeps():
    _, waiting = on_ranks(2, "test_comm:on_rank_wait")
    assert waiting < 0.5, f"{waiting} s of a core during a wait of 2 s: a spinning rank takes 2"


def test_a_single_process_is_rank_0_of_1():
    assert (comm.rank, comm.nworkers, comm.world()) == (0, 1, None)


def on_rank_mixed_up():
    if comm.rank == 1:
        comm.check_layout({}, "something else")
    rank0_accum_batches({})


def test_ranks_in_different_collectives_are_told_in_which():
    said = {answer["message"] for answer in on_ranks(2, "test_comm:on_rank_mixed_up")}
    assert said == {
        "rank0_accum_batches: all ranks must call the same collective, in the same order: rank 0 is "
        "in 'rank0_accum_batches' and rank 1 in 'something else'",
        "something else: all ranks must call the same collective, in the same order: rank 0 is "
        "in 'rank0_accum_batches' and rank 1 in 'something else'",
    }
