"""The speedup tool from end to end: whole studies, wrong use, and runs that fail."""

import csv
import json
import math
import sys

import pytest
from helpers.ranks import HERE, run
from helpers.runs import train

from rank0rl.tools.speedup import probes, speedup

pytestmark = pytest.mark.usefixtures("forked_python")

ENV = {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
SLEEPS = ["helpers.envs:Sleeps-v0", "--num-envs", "4", "--hidden", "8", "--epochs", "1"]


def study(*args, expect=0):
    command = [sys.executable, "-m", "rank0rl", "speedup", *map(str, args)]
    done = run(command, 230, env=ENV)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def rows_of(folder):
    with (folder / "speedup.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_study(tmp_path):
    args = [*SLEEPS, "--steps-per-batch", "80", "--nprocs", 1, 2, "--iterations", 3]
    done = study(*args, "--repeats", 1, "--out", tmp_path / "s")
    one, two = rows_of(tmp_path / "s")
    assert (one["nprocs"], two["nprocs"]) == ("1", "2")
    assert two["return_mean"] == one["return_mean"]
    rates = float(two["steps_per_s"]) / float(one["steps_per_s"])
    assert float(two["speedup"]) == pytest.approx(rates, rel=1e-4)
    assert float(two["efficiency"]) == pytest.approx(rates / 2, rel=1e-4)
    assert 1 < float(two["ceiling"]) <= 2
    about = json.loads((tmp_path / "s" / "speedup.json").read_text())
    assert "all 2 runs" in about["notes"][0]
    assert "NOT" not in about["notes"][0]
    assert about["machine"]["mpi"] != "none"
    assert "| 2" in done.stdout


@pytest.mark.slow
def test_a_study_with_a_prediction(tmp_path):
    args = [*SLEEPS, "--steps-per-batch", "80", "--nprocs", 1, "--iterations", 2, "--repeats", 1]
    study(*args, "--predict", 2, 8, "--out", tmp_path)
    with (tmp_path / "predicted.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {each["nprocs"] for each in table} == {"1", "2", "4", "8"}
    assert float(table[0]["predicted"]) == pytest.approx(float(table[0]["measured"]), rel=1e-2)


def test_wrong_use(tmp_path, capsys):
    for args, code, fact in (
        ([], 2, "environment"),
        (["CartPole", "--repeats", 0], 2, "repeats must"),
        (["CartPole", "--script", "none.py"], 2, "none.py"),
        (["CartPole", "--run-dir", "x"], 2, "leave out --run-dir; see --out"),
        (["CartPole", "--num-envs", 2, "--nprocs", 1, 3, "--out", tmp_path], 1, "nprocs=3"),
    ):
        assert speedup.main([*map(str, args)]) == code
        assert fact in capsys.readouterr().err


def test_a_run_that_is_over_at_once_and_one_that_fails(tmp_path, capsys):
    folder = tmp_path / "runs" / "2-1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "progress.csv").write_text("iteration\n1\n")
    for script, fact in (("", "made 1 iterations"), ("raise ValueError('on purpose')", "on purp")):
        (tmp_path / "s.py").write_text(script)
        args = ["CartPole", "--script", str(tmp_path / "s.py"), "--out", str(tmp_path)]
        assert speedup.main(args) == 1
        assert fact in capsys.readouterr().err


def test_bare_stepping_takes_allowed_actions_only():
    settings = {"env_id": "helpers.envs:Spaced-v0", "wrappers": [], "env_kwargs": {"masked": True}}
    assert probes.bare_rate(settings, 2, 0.2, HERE) > 0
    assert math.isnan(probes.bare_rate({**settings, "env_id": "Nothing-v0"}, 2, 0.2, HERE))


@pytest.mark.slow
def test_collecting_is_measured_with_one_game_and_with_all(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    words = ["helpers.games:make_hunt", "--num-envs", "9", "--steps-per-batch", "99"]
    train(tmp_path / "r", *words, "--hidden", "8", "--total-steps", "99")
    found = probes.collect_costs(tmp_path / "r", HERE)
    assert [*found["per_step"]] == ["3", "9"]


def test_a_module_of_the_folder_does_not_replace_one_of_python(tmp_path):
    (tmp_path / "random.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")  # numpy's
    own = "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    (tmp_path / "own.py").write_text(own)
    settings = {"env_id": "own:make", "wrappers": [], "env_kwargs": {}}
    assert probes.bare_rate(settings, 1, 0.1, tmp_path) > 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_environments_that_cannot_be_made_elsewhere(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import gymnasium, rank0rl.cli, helpers.envs\n"
        "gymnasium.register('Own-v0', helpers.envs.Count)\n"
        "rank0rl.cli.main()\n"
    )
    args = ["--num-envs", 2, "--steps-per-batch", 64, "--iterations", 1, "--repeats", 1]
    done = study("Own", "--script", script, *args, "--out", tmp_path / "own")
    assert "env.step could not be measured" in done.stdout
    for each in rows_of(tmp_path / "own"):
        assert each["expected"] == each["ceiling"]
