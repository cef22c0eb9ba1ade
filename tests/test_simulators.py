"""Environments that are programs: where they are, which ranks they have, how they end."""

import json
import signal
import time

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, interrupt, train
from helpers.simulators import Placed

from rank0rl import Place
from rank0rl.envs.make import make
from rank0rl.tools.verify import main as verify

ENV = "helpers.simulators:placed"
EVALUATED = ["--eval-every", "100", "--eval-episodes", "2"]


@pytest.fixture(autouse=True)
def _helpers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def places(folder):
    """Return index, evaluation and folder of every environment that was made, in order."""
    found = [json.loads(file.read_text()) for file in folder.iterdir()]
    return sorted((each["evaluation"], each["index"], each["folder"]) for each in found)


def logged(tmp_path):
    (tmp_path / "log").mkdir()
    return [ENV, "--env-kwargs", f'log="{tmp_path / "log"}"']


@pytest.mark.slow
@pytest.mark.parametrize("batch", [("--steps-per-batch", "40"), ("--episodes-per-batch", "8")])
def test_every_environment_knows_which_one_it_is(tmp_path, batch):
    args = ["--num-envs", "4", "--total-steps", "40", "--eval-every", "1", "--eval-episodes", "4"]
    train(tmp_path / "run", *logged(tmp_path), *args, *batch, nprocs=2)
    found = places(tmp_path / "log")
    looked_at = (True, 0, None)  # by rank 0, before the run begins
    assert found.count(looked_at) == 2
    assert set(found) == {(kind, i, None) for kind in (False, True) for i in range(4)}
    assert len(found) == 9


@pytest.mark.fast(1)
@pytest.mark.parametrize("more", [[], ["--env-processes"]])
def test_folders_of_environments_go_and_those_of_failures_stay(tmp_path, more):
    scratch = tmp_path / "scratch"
    args = ["--num-envs", "2", "--steps-per-batch", "10", "--total-steps", "10", *more]
    args += ["--env-folders", str(scratch)]
    env = logged(tmp_path)
    train(tmp_path / "run", *env, *args)
    folders = [folder for *_, folder in places(tmp_path / "log") if folder]
    assert sorted(folder.rpartition("/")[2][:7] for folder in folders) == ["env-000", "env-001"]
    assert not list(scratch.iterdir())
    done = train(tmp_path / "failed", *env, "fails=3", *args, expect=1)
    left = list(scratch.iterdir())
    assert [(each / "scratch").exists() for each in left] == [True]
    assert f"Its files are in {left[0]}" in done.stderr


@pytest.mark.slow
def test_a_run_whose_environments_need_folders_is_verified(tmp_path):
    args = [*SMALL[1:], "--total-steps", "128", "--env-folders", str(tmp_path / "scratch")]
    train(tmp_path / "run", "helpers.simulators:in_folder", *args)
    assert verify([str(tmp_path / "run")]) == 0


def test_a_class_and_a_registered_one_get_their_place_too(tmp_path):
    import gymnasium as gym

    place = Place(3)
    assert make("helpers.simulators:Placed", (), place, log=tmp_path).unwrapped.place == place
    gym.register("Placed-v0", Placed)
    gym.register("PlacedByName-v0", "helpers.simulators:Placed")
    try:
        for env_id in ("Placed-v0", "PlacedByName-v0"):
            assert make(env_id, (), place, log=tmp_path).unwrapped.place == place
    finally:
        del gym.registry["Placed-v0"], gym.registry["PlacedByName-v0"]
    make("CartPole-v1", (), place)


@pytest.mark.slow
def test_a_communicator_of_one_rank(tmp_path):
    args = [*SMALL[1:], "--total-steps", "64"]
    for more in ([], ["--env-processes"]):
        folder = tmp_path / f"run{len(more)}"
        train(folder, "helpers.simulators:summed", *args, *more, nprocs=2)


def closing(tmp_path, *more):
    (tmp_path / "log").mkdir()
    env = ["helpers.simulators:Closes", "--env-kwargs", f'log="{tmp_path / "log"}"', *more]
    return [*env, *SMALL[1:], *EVALUATED, "--total-steps", "10000000"]


def closed(tmp_path):
    return {file.name for file in (tmp_path / "log").iterdir()}


@pytest.mark.fast(1)
@pytest.mark.parametrize("more", [[], ["--env-processes"]])
@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_environments_are_closed_after_a_signal(tmp_path, more, nprocs, signum):
    interrupt(tmp_path / "run", [*closing(tmp_path), *more], nprocs, signum, after=1)
    every = {f"env-{i}" for i in range(4)} | {f"evaluation-{i}" for i in range(2)}
    assert closed(tmp_path) >= every


@pytest.mark.fast(1)
@pytest.mark.parametrize("nprocs", [1, 2])
def test_environments_are_closed_after_an_error(tmp_path, nprocs):
    done = train(tmp_path / "run", *closing(tmp_path, "fails=30"), nprocs=nprocs, expect=1)
    assert "OSError: on purpose" in done.stderr
    assert closed(tmp_path) >= {f"env-{i}" for i in range(4)}


def test_environments_are_closed_when_the_disk_is_full(tmp_path):
    (tmp_path / "full.py").write_text(
        "from rank0rl.launch import job\n"
        "class Full:\n"
        "    def after(self, agent, iteration, record): raise job.Failure('cannot write')\n"
    )
    args = [*closing(tmp_path), "--hook", f"{tmp_path}/full.py:Full"]
    done = train(tmp_path / "run", *args, expect=1)
    assert done.stderr == "error: cannot write\n"
    assert closed(tmp_path) >= {f"env-{i}" for i in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_what_does_not_close_in_time_ends_all_the_same(tmp_path, nprocs):
    begun = time.monotonic()
    interrupt(tmp_path / "run", closing(tmp_path, "hangs=3600"), nprocs, signal.SIGINT, after=1)
    assert time.monotonic() - begun < 40
    (tmp_path / "log").rename(tmp_path / "first")
    args = closing(tmp_path, "hangs=3600", "fails=30")
    done = train(tmp_path / "failed", *args, nprocs=nprocs, expect=1)
    assert "OSError: on purpose" in done.stderr


@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.slow
def test_a_run_is_saved_although_rank_0_is_in_a_call_of_c(tmp_path, nprocs):
    args = ["helpers.simulators:Computes", "--env-kwargs", "begin=40", *SMALL[1:]]
    out = interrupt(tmp_path, [*args, "--total-steps", "1000"], nprocs, signal.SIGINT, after=2)
    assert "saved iteration 2" in out
