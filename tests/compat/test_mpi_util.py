"""What a script of one's own has besides the collectives."""

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

import rank0rl
from rank0rl.compat import mpi_util
from rank0rl.mpi import comm, job, launch


def on_rank_steps_sec(capture):
    from contextlib import redirect_stdout
    from io import StringIO

    said = StringIO()
    laps = mpi_util.Laps()
    laps._steps_since -= 2.0 if comm.rank == 0 else 50.0  # rank 0's clock counts
    with redirect_stdout(said):
        rates = [laps.steps_sec(1000 * (comm.rank + 1)), laps.steps_sec(0)]
    return [rates, said.getvalue() if capture else ""]


@pytest.mark.parametrize("n", [1, 3])
def test_steps_of_all_ranks_per_second_of_rank_0(n):
    results = on_ranks(n, "test_mpi_util:on_rank_steps_sec", True)
    rates, said = results[0]
    steps = 1000 * n * (n + 1) // 2
    assert steps / 2.5 < rates[0] < steps / 2.0
    assert rates[1] == 0.0
    assert said == f"steps/s {rates[0]:,.0f}\nsteps/s 0\n"
    assert all(result == [rates, ""] for result in results[1:])


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
    monkeypatch.setattr(launch, "_become_rank", lambda: None)
    assert rank0rl.mpi_fork(1, 0.05) == "child"
    assert job.os.environ[job.GPU_PCT] == "0.05"
    with pytest.raises(ValueError, match=r"gpu_pct must be in \[0, 1\]"):
        rank0rl.mpi_fork(1, gpu_pct=5)


def test_the_recipes_names_are_here():
    assert np.array_equal(rank0rl.bcast(np.arange(3)), [0, 1, 2])
    assert rank0rl.all_accum_batches({"x": [1]}) == {"x": [1]}
