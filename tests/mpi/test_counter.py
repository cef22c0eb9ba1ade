"""The counter that ranks share: every number of a round once."""

import itertools

import pytest
from helpers.ranks import on_ranks

from rank0rl.mpi import comm
from rank0rl.mpi.comm import Counter


def on_rank_draw(most):
    counter = Counter(7)
    rounds = []
    for _ in range(4):
        rounds.append(list(counter.round(most if comm.rank == 0 else None)))
        comm.barrier()
    return rounds


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("most", [None, 0, 2])
def test_every_number_goes_to_one_rank_in_every_round(n, most):
    ranks = on_ranks(n, "test_counter:on_rank_draw", most)
    for numbers in zip(*ranks, strict=True):
        if most is not None:
            assert len(numbers[0]) <= most
        if n > 1 or most is None:
            assert sorted(itertools.chain(*numbers)) == list(range(7))
