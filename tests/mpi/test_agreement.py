"""Ranks agree before data moves; a disagreement is one error, the same on every rank."""

import numpy as np
import pytest
from helpers.ranks import on_ranks

from rank0rl.mpi import comm
from rank0rl.mpi.agreement import check_layout
from rank0rl.mpi.gather import rank0_accum_batches

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
    """Return the error of each disagreement in turn, then gather well: no rank was left behind."""
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
    results = on_ranks(n, "test_agreement:on_rank_disagree")
    said = results[0][0]
    assert all(result[0] == said for result in results)
    assert all(f"rank {n - 1}" in message for message in said)
    assert all("'b'" in m or "'a'" in m for m in said)
    assert [result[1] for result in results] == [2 * n] + [0] * (n - 1)


@pytest.mark.parametrize("kind", ["object", "text"])
def test_what_is_no_array_of_rows_is_refused_on_one_rank_too(kind):
    with pytest.raises(ValueError, match="'b' must be a numpy array with rows"):
        rank0_accum_batches(WRONG[kind])


def on_rank_mixed_up():
    if comm.rank == 1:
        check_layout({}, "something else")
    rank0_accum_batches({})


def test_ranks_in_different_collectives_are_told_in_which():
    first, second = (each["message"] for each in on_ranks(2, "test_agreement:on_rank_mixed_up"))
    assert first.startswith("rank0_accum_batches: ")
    assert second.startswith("something else: ")
    for message in (first, second):
        assert "rank 0 is in 'rank0_accum_batches' and rank 1 in 'something else'" in message


def on_rank_numbers(count):
    numbers = [100 * comm.rank + i for i in range(count)]
    told = check_layout({"x": "f8"}, "numbers", numbers=numbers).tolist()
    absent = comm.rank == 1
    layout, mine = ({}, []) if absent else ({"x": "f8"}, numbers)
    some = check_layout(layout, "numbers", numbers=mine, or_nothing=True).tolist()
    return [told, some]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 3, 32, 33, 100])
def test_numbers_of_all_ranks_are_told_whatever_their_count(n, count):
    told = [[100 * rank + i for i in range(count)] for rank in range(n)]
    some = [[-1] * count if rank == 1 else told[rank] for rank in range(n)]
    assert on_ranks(n, "test_agreement:on_rank_numbers", count) == [[told, some]] * n
