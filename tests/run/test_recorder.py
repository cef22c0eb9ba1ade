"""The record of a run: what a row says of episodes, ranks and memory, and what the console shows."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from helpers.envs import NoiseAgent, NoOptions
from helpers.ranks import HERE, run
from helpers.runs import SMALL, resume, resume_on_ranks, table, train, train_here

from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.run import record, usage
from rank0rl.run.record import Recorder
from rank0rl.run.state import Progress

COUNT = ["helpers.envs:Count-v0", "--num-envs", "4", "--steps-per-batch", "64", "--hidden", "8"]


@pytest.mark.slow
def test_the_spread_of_the_last_100_episodes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    train(
        tmp_path,
        *COUNT,
        "--env-kwargs",
        "vary=true",
        "--total-steps",
        "64",
        "--keep-checkpoints",
        "1",
    )
    [row] = table(tmp_path)
    returns = {n * (n + 1) / 2 for n in range(3, 10)}  # of episodes of 3 to 9 steps
    low, high = float(row["return_min"]), float(row["return_max"])
    assert low in returns
    assert high in returns
    assert low < float(row["return_mean"]) < high
    assert 0 < float(row["return_std"]) < high - low


@pytest.mark.slow
def test_a_start_without_an_update_says_nothing_of_updates(tmp_path):
    def summary():
        return json.loads((tmp_path / "summary.json").read_text())

    train(tmp_path, *SMALL, "--total-steps", "64")
    before = summary()
    assert before.pop("updates") == "compiled"
    resume(tmp_path)
    assert summary() == before


@pytest.mark.slow
def test_silence_is_kept_but_for_errors(tmp_path):
    done = train(tmp_path / "a", *SMALL, "--total-steps", "128", "--quiet", nprocs=2)
    assert done.stdout == done.stderr == ""
    done = train(tmp_path / "b", *SMALL, "--quiet", "--gamma", "2", expect=2)
    assert "gamma" in done.stderr


class Takes(NoiseAgent):
    """Returns a name of the record from its update."""

    name = "iteration"

    def update(self, batch, rng, progress):
        return {"rows": 1.0, self.name: 7}


@pytest.mark.parametrize("name", ["iteration", "return_mean", "update_s", "weights_sha256"])
def test_a_name_of_the_record_is_refused_in_the_first_iteration(name, tmp_path, monkeypatch):
    monkeypatch.setattr(Takes, "name", name)
    small = {"env_id": "Pendulum", "num_envs": 1, "steps_per_batch": 4, "quiet": True}
    with pytest.raises(ValueError, match=f"update: '{name}' is a column of the record already"):
        train_here(Takes, NoOptions(), tmp_path, **small)
    assert json.loads((tmp_path / "summary.json").read_text())["iterations"] == 0
    assert not (tmp_path / "progress.csv").exists()


class Clock:
    """Stands in for the module time: a second goes by with every look at it."""

    now = 0.0

    def monotonic(self):
        self.now += 1
        return self.now


@pytest.mark.parametrize(
    ("seconds", "most", "more"), [(0.5, 1, {}), (7.5, 7, {}), (0.5, 1, {"num_episodes": 9})]
)
def test_a_run_stops_after_so_many_seconds(seconds, most, more, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "time", Clock())
    _, kept = train_here(
        *(PPO, PPOOptions(hidden=(8,)), tmp_path),
        env_id="CartPole",
        num_envs=2,
        steps_per_batch=4 if more else 32,  # no episode ends
        stop_after_seconds=seconds,
        **more,
    )
    assert 1 <= kept.iteration <= most
    assert kept.saved == kept.iteration == len(table(tmp_path))


@pytest.mark.slow
def test_a_run_that_stopped_after_some_seconds_goes_on(tmp_path):
    done = train(tmp_path, *SMALL, "--total-steps", "100000000", "--stop-after-seconds", "0.1")
    assert "as asked" in done.stdout
    first = len(table(tmp_path))
    resume_on_ranks(tmp_path, "--stop-after-seconds", "0.1", nprocs=2)
    assert len(table(tmp_path)) > first


def test_the_time_that_is_left(tmp_path, monkeypatch):
    """It is that of the pace since the first iteration, which waits for the compiler."""
    _, kept = train_here(
        *(PPO, PPOOptions(hidden=(8,)), tmp_path),
        env_id="CartPole",
        num_envs=2,
        steps_per_batch=32,
        total_steps=320,
        stop_after_iterations=2,
    )
    began, share = kept._paced
    assert share == pytest.approx(0.1)
    monkeypatch.setattr(record.time, "monotonic", lambda: began + 10.0)  # for a tenth of the run
    assert kept._seconds_left() == pytest.approx(80.0)


def console(folder, *args):
    """Train; return the lines of the console without notes, such as that of a slow compiler."""
    lines = train(folder, *args).stdout.splitlines()
    return [line for line in lines if not line.startswith("note: ")]


def test_the_console_shows_return_length_kl_and_entropy_and_phases_if_asked_for(tmp_path):
    args = [*SMALL, "--total-steps", "128"]
    how, plain = console(tmp_path / "a", *args)[1:3]
    assert how == "updates: compiled"
    figures = r"return \S+  length \d+  kl \S+  entropy \S+  \S+/s"
    assert re.fullmatch(rf"1: 64 steps \(50%\)  {figures}", plain)
    asked = console(tmp_path / "b", *args, "--phases")[2]
    assert re.search(r"/s  collect \d+%  ", asked)


def test_a_run_without_an_episode_says_so(tmp_path):
    args = ["Pendulum", "--num-envs", "2", "--steps-per-batch", "64", "--total-steps", "128"]
    lines = console(tmp_path / "r", *args)
    assert re.fullmatch(r"1: 64 steps \(50%\)  no episode has ended  kl \S+  .*", lines[2])
    assert "return          no episode has ended" in lines
    assert not any("nan" in line or "None" in line for line in lines)


def test_the_line_of_a_long_run_fits_the_console(tmp_path, monkeypatch):
    _, kept = train_here(
        *(PPO, PPOOptions(hidden=(8,)), tmp_path),
        env_id="CartPole",
        num_envs=2,
        steps_per_batch=32,
        total_steps=32,
    )
    progress = kept.state.progress
    progress.iteration, progress.steps = 48830, 100_000_000
    monkeypatch.setattr(progress, "returns", [12345.6])
    monkeypatch.setattr(progress, "lengths", [1000])
    monkeypatch.setattr(kept.state, "share_over", lambda: 0.98)
    line = record._console_line(
        kept.state, 36_000.0, 12345.0, {"kl": 0.0123456, "entropy": -12.3456}, []
    )
    assert "(98%, 10:00:00 left)" in line
    assert len(line) <= 100


def test_times_on_the_console():
    times = [record._clock(s) for s in (0.4, 59.6, 3599, 3723)]
    assert times == ["0:00", "1:00", "59:59", "1:02:03"]


@pytest.mark.slow
def test_a_run_that_has_ended_says_so_when_it_is_resumed(tmp_path):
    (tmp_path / "tells.py").write_text(
        "from rank0rl.algos.ppo import PPO\n"
        "class Tells(PPO):\n    def prepare(self):\n        print('prepares')\n        super().prepare()\n"
    )
    words = [*SMALL, "--algo", f"{tmp_path}/tells.py:Tells", "--total-steps", "64"]
    assert "prepares" in train(tmp_path / "r", *words).stdout
    said = resume(tmp_path / "r").stdout
    assert "has ended, by total_steps 64: to go on, raise --total-steps" in said
    assert "prepares" not in said


GROWS = """
import numpy as np
from rank0rl.run import usage as memory
before = memory.peak_mb()
block = np.ones(64 << 17)  # 64 MB
grown = memory.peak_mb() - before
del block
print(grown, memory.peak_mb() - before)
"""


def test_memory_counts_what_is_new_and_keeps_the_peak():
    done = run([sys.executable, "-c", GROWS])  # this process may have had a higher peak before
    grown, after = map(float, done.stdout.split())
    assert 50 < grown < 80
    assert after == pytest.approx(grown, abs=1)


LEAN = """
import os, resource
from rank0rl.algos.ppo import PPO
from rank0rl.mpi import comm
class Lean(PPO):
    calls = 0
    def act(self, step):
        type(self).calls += 1
        if self.calls % 1600 == 0:  # after every 100 iterations
            with open(os.environ["GROWTH"] + str(comm.rank), "a") as file:
                print(open("/proc/self/statm").read().split()[1], file=file)
        return super().act(step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--overlap"], ["--eval-every", "10"]])
def test_no_rank_grows(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("GROWTH", str(tmp_path / "pages"))
    (tmp_path / "lean.py").write_text(LEAN)
    args = [*SMALL, "--algo", f"{tmp_path / 'lean.py'}:Lean", "--total-steps", str(64 * 500)]
    train(tmp_path / "r", *args, *mode, nprocs=2)
    for rank in range(2):
        pages = [int(line) for line in (tmp_path / f"pages{rank}").read_text().split()]
        assert len(pages) >= 5
        grown = (pages[4] - pages[1]) * 4096 / 2**20  # over 300 iterations, after 200 to warm up
        assert grown < 3


_OF_100_MB = """
from rank0rl.algos.ppo import PPO
from rank0rl.run import usage

usage.peak_mb = lambda: 100.0

class Same(PPO):
    pass
"""


@pytest.mark.slow
def test_every_rank_is_counted_also_one_without_envs(tmp_path):
    (tmp_path / "same.py").write_text(_OF_100_MB)
    args = [*SMALL, "--total-steps", "64", "--algo", f"{tmp_path / 'same.py'}:Same"]
    train(tmp_path / "1", *args)
    train(tmp_path / "2", *args, "--rank0-envs", "0", nprocs=2)
    [one], [two] = (table(tmp_path / n) for n in ("1", "2"))
    assert (one["memory_mb"], two["memory_mb"]) == ("100", "200")


def test_memory_that_processes_share_counts_once():
    assert usage.peak_mb() < usage._peak_resident_mb() - 5  # others map torch's code as well


def test_an_evaluation_that_is_no_number_is_never_the_best():
    run = object.__new__(Recorder)
    run.state = SimpleNamespace(progress=Progress())
    returns = (float("nan"), 1.0, float("nan"), 0.5, 2.0)
    best = [run._is_best(ret) for ret in returns]
    assert best == [False, True, False, False, True]
    assert run.state.progress.best_eval == 2.0
    assert not run._is_best("")
