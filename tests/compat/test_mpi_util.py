"""mpi_util's names, and what a script has besides the collectives."""

import random
import sys
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.ranks import on_ranks, run

import rank0rl
from rank0rl import seeding
from rank0rl.compat import mpi_util
from rank0rl.launch import fork, job
from rank0rl.mpi import comm

# Seed and rank -> the first numbers of Python, NumPy and torch. They must never change: a script's
# curve depends on them.
DRAWN = {
    (0, 0): [0.536342272055764, 0.7849563596787257, 0.14366072416305542],
    (0, 3): [0.9600891909208356, 0.015566785214498391, 0.13661181926727295],
    (7, 0): [0.6435901180060855, 0.5988345009141778, 0.6767458319664001],
    (7, 3): [0.02464667976235224, 0.7786855178789948, 0.7480490803718567],
}


@pytest.mark.parametrize(("seed", "rank"), DRAWN)
def test_a_seed_and_a_rank_always_give_the_same_numbers(monkeypatch, seed, rank):
    monkeypatch.setattr(comm, "get_rank", lambda: rank)
    mpi_util.set_global_seeds(seed)
    assert [random.random(), np.random.random(), torch.rand(()).item()] == DRAWN[seed, rank]


def test_a_negative_seed_is_an_error():
    with pytest.raises(ValueError, match="at least 0: got -1"):
        mpi_util.set_global_seeds(-1)


def test_the_streams_of_scripts_are_those_that_the_trainer_leaves_to_them(monkeypatch):
    monkeypatch.setattr(comm, "get_rank", lambda: 3)
    mpi_util.set_global_seeds(7)
    random_here = random.random()
    random.seed(int(seeding.stream(7, "script", 3).integers(2**63)))
    assert random_here == random.random()


def test_the_whole_family_can_be_imported_from_here():
    family = (
        "mpi_fork rank nworkers tf_config set_global_seeds rank0_accum_batches all_accum_batches "
        "rank0_bcast_wts all_sum all_mean all_avg_wts bcast print0 steps_sec timeit chksum "
        "accum_batches all_sum_scalar all_mean_scalar cumsum_steps"
    )
    assert sorted(mpi_util.__all__) == sorted(family.split())
    for name in mpi_util.__all__:
        assert getattr(mpi_util, name) == getattr(rank0rl, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(mpi_util, "nothing")


def test_to_import_the_family_loads_neither_mpi_nor_torch():
    code = "from rank0rl.compat.mpi_util import mpi_fork, rank, steps_sec; import sys"
    done = run([sys.executable, "-c", f"{code}; print({{'mpi4py', 'torch'}} & set(sys.modules))"])
    assert done.stdout == "set()\n", done.stderr


def on_rank_steps_sec(at_s):
    """The rates of two calls, what was printed, on clocks that show at_s of this rank in turn."""
    clock = SimpleNamespace(perf_counter=iter(at_s[comm.rank]).__next__)  # comm's is left alone
    said = StringIO()
    with mock.patch.object(mpi_util, "time", clock), redirect_stdout(said):
        laps = mpi_util.Laps()
        rates = [laps.steps_sec(1000 * (comm.rank + 1)), laps.steps_sec(0)]
    assert laps.cumsum_steps == sum(1000 * (rank + 1) for rank in range(comm.nworkers))
    return [rates, said.getvalue()]


@pytest.mark.parametrize(("n", "rates"), [(1, [500.0, 0.0]), (3, [3000.0, 0.0])])
def test_steps_of_all_ranks_per_second_of_rank_0(n, rates):
    at_s = [[10.0, 12.0, 13.0], [0.0, 50.0, 70.0], [7.0, 7.5, 8.0]]
    results = on_ranks(n, "test_mpi_util:on_rank_steps_sec", at_s)
    assert [result[0] for result in results] == [rates] * n
    said = f"steps/s {rates[0]:,.0f}\nsteps/s 0\n"
    assert [result[1] for result in results] == [said] + [""] * (n - 1)


def test_timeit_keeps_the_seconds_of_a_loop_by_label(monkeypatch, capsys):
    now = iter([0.0, 1.0, 1.5, 4.5, 4.75, 5.0, 9.0])
    monkeypatch.setattr(mpi_util.time, "perf_counter", lambda: next(now))
    laps = mpi_util.Laps()
    laps.timeit("------ loop")
    assert laps.timeit("roll") == {"roll": 0.5}
    assert laps.timeit("update") == {"roll": 0.5, "update": 3.0}
    assert laps.timeit("roll") == {"roll": 0.75, "update": 3.0}
    assert laps.timeit("------ loop") == {"roll": 0.75, "update": 3.0, "------ loop": 0.25}
    assert laps.timeit("roll") == {"roll": 4.0}
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["   1.0000 s ------ loop", "   0.5000 s roll"]
    assert said[4:6] == ["   0.2500 s ------ loop", "   4.0000 s the last loop"]


def test_the_device_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank0rl.tf_config == torch.device("cpu")


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 1), (5, 1)])
def test_ranks_share_the_gpus_and_their_memory(monkeypatch, rank, number):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: asked.append(args)
    )
    monkeypatch.setattr(comm, "get_rank", lambda: rank)
    monkeypatch.delenv(job.GPU_PCT, raising=False)
    assert rank0rl.tf_config == torch.device("cuda", number)
    assert asked == []
    monkeypatch.setenv(job.GPU_PCT, "0.25")
    assert rank0rl.tf_config == torch.device("cuda", number)
    assert asked == [(0.25, torch.device("cuda", number))]


def test_mpi_fork_tells_the_ranks_their_share(monkeypatch):
    monkeypatch.setenv(job.GPU_PCT, "")
    monkeypatch.setattr(fork, "_become_rank", lambda: None)
    assert rank0rl.mpi_fork(1, 0.05) == "child"
    assert job.os.environ[job.GPU_PCT] == "0.05"
    with pytest.raises(ValueError, match=r"gpu_pct must be in \[0, 1\]"):
        rank0rl.mpi_fork(1, gpu_pct=5)


def test_steps_of_all_calls_are_added_up():
    before = rank0rl.cumsum_steps
    rank0rl.steps_sec(7)
    assert mpi_util.cumsum_steps == rank0rl.cumsum_steps == before + 7


def test_batches_of_one_rank_are_put_together():
    batches = [
        {"x": np.full((n, 2), n, np.int16), "t": torch.ones(n).bfloat16(), "n": n, "l": [n]}
        for n in (2, 0, 1)
    ]
    whole = mpi_util.accum_batches([{"in": batch, "y": batch["x"]} for batch in batches])
    assert (whole["y"].dtype, whole["y"].tolist()) == (np.int16, [[2, 2], [2, 2], [1, 1]])
    assert whole["in"]["x"].tolist() == whole["y"].tolist()
    assert (whole["in"]["t"].dtype, whole["in"]["t"].tolist()) == (torch.bfloat16, [1] * 3)
    assert (whole["in"]["n"].tolist(), whole["in"]["l"]) == ([2, 0, 1], [2, 0, 1])
    with pytest.raises(ValueError, match=r"got \('a',\) and \('a', 'b'\)"):
        mpi_util.accum_batches([{"a": 1, "b": 1}, {"a": 1}])
    with pytest.raises(ValueError, match="got no batch"):
        mpi_util.accum_batches([])
    for part in ([1.0], {"b": 1}, torch.ones(1), np.ones(1), 1):
        with pytest.raises(ValueError, match="the same kind of values: 'a' is .*float32"):
            mpi_util.accum_batches([{"a": part}, {"a": np.ones(1, np.float32)}])


@pytest.mark.parametrize("module", [rank0rl, mpi_util])
def test_a_name_that_is_not_here_says_what_to_do(module):
    words = "'set_wt': use rank0_bcast_wts, which overwrites weights in place"
    with pytest.raises(AttributeError, match=words):
        module.set_wt


def test_the_recipes_names_are_here():
    assert np.array_equal(rank0rl.bcast(np.arange(3)), [0, 1, 2])
    assert rank0rl.all_accum_batches({"x": [1]}) == {"x": [1]}
    assert (rank0rl.all_sum_scalar(2), rank0rl.all_mean_scalar(np.float64(0.5))) == (2, 0.5)
