"""Threads are settings, never defaults."""

import torch
from threadpoolctl import threadpool_info

from rank0rl.mpi.threads import set_threads, using_threads


def blas_threads():
    return {library["num_threads"] for library in threadpool_info()}


def test_threads_are_set_for_torch_and_blas_and_given_back():
    set_threads(1)
    with using_threads(2):
        assert (torch.get_num_threads(), blas_threads()) == (2, {2})
    assert (torch.get_num_threads(), blas_threads()) == (1, {1})
    with using_threads(1):
        assert torch.get_num_threads() == 1
