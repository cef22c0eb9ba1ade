"""Threads are settings, never defaults."""

import torch
from threadpoolctl import threadpool_info

from rank0rl.mpi.threads import set_threads


def test_threads_are_set_for_torch_and_blas():
    for n in (2, 1):
        set_threads(n)
        assert torch.get_num_threads() == n
        assert {library["num_threads"] for library in threadpool_info()} == {n}
