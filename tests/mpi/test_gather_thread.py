"""Batches that travel in a thread, beside the main one."""

import numpy as np
import pytest
from helpers.ranks import on_ranks

from rank0rl.mpi import comm
from rank0rl.mpi.gather import GatherThread, rank0_accum_batches


def on_rank_thread():
    thread, r, large = GatherThread(), comm.rank, np.arange(2e5)
    thread.begin({"x": large[r * 1000 :]})
    thread.begin({"x": np.full(r, r)} if r else {})
    between = rank0_accum_batches({"y": np.full(1, r)})["y"].tolist()
    first, second = thread.take()
    thread.begin({"x" if r else "z": large})
    try:
        thread.take()
        said = "nothing"
    except ValueError as error:
        said = str(error)
    nothing = thread.take()
    thread.begin({"x": large[:2]})
    [last] = thread.take()
    whole = np.concatenate([large[k * 1000 :] for k in range(comm.nworkers)])
    same = first["x"].tobytes() == (b"" if r else whole.tobytes())
    return [same, second["x"].tolist(), between, said, nothing, len(last["x"])]


@pytest.mark.parametrize("n", [2, 3])
def test_batches_that_travel_beside_the_main_thread(n):
    first, *others = on_ranks(n, "test_gather_thread:on_rank_thread")
    rows = [r for r in range(n) for _ in range(r)]
    said = "gather_rows: all ranks must pass the same names"
    assert first[:3] == [True, rows, list(range(n))]
    assert first[3].startswith(said)
    assert first[4:] == [[], 2 * n]
    for other in others:
        assert other == [True, [], [], first[3], [], 0]
