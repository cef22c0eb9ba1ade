"""Streams that never meet."""

import random

import numpy as np
import torch
from helpers.ranks import on_ranks

from rank0rl import seeding
from rank0rl.compat.mpi_util import set_global_seeds
from rank0rl.mpi import comm


def test_a_stream_is_the_same_each_time():
    a, b = (seeding.stream(3, "act", 5, 7).random(4) for _ in range(2))
    assert a.tolist() == b.tolist()


def test_streams_of_other_seeds_purposes_and_fragments_differ():
    keys = [
        (seed, purpose, i, fragment_id)
        for seed in range(3)
        for purpose in ("act", "reset", "update")
        for i in range(5)
        for fragment_id in range(5)
    ]
    first = {seeding.stream(*key).random() for key in keys}
    assert len(first) == len(keys)
    assert len({seeding.integer(*key) for key in keys}) == len(keys)
    assert len({seeding.integer(0, "reset", i, j) for i in range(3) for j in range(200)}) == 600


def test_integers_fit_into_31_bits():
    values = [seeding.integer(0, "reset", env, 0) for env in range(500)]
    assert min(values) >= 0
    assert 2**29 < max(values) < 2**31


def on_rank_draw(seed):
    set_global_seeds(seed)
    return [random.random(), np.random.random(), torch.rand(()).item(), comm.rank]


def test_global_seeds_differ_between_ranks_and_neighbouring_runs_and_repeat():
    runs = [on_ranks(3, "test_seeding:on_rank_draw", seed) for seed in (0, 1, 0)]
    assert runs[0] == runs[2]
    draws = [value for run in runs[:2] for *values, _ in run for value in values]
    assert len(set(draws)) == len(draws)
