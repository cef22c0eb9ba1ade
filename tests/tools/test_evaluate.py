"""Evaluation of a run's policy on whole episodes that training does not see."""

import math
import re

import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from helpers import forks
from helpers.ranks import HERE
from helpers.runs import SMALL, train

from rank0rl.api import evaluate
from rank0rl.tools.evaluate import main

PATH = {"PYTHONPATH": str(HERE)}


def command(*args):
    return forks.run("-m", "rank0rl", "evaluate", *map(str, args), env=PATH)


def test_known_returns_and_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Count-v0", "--env-kwargs", "length=4", "--num-envs", "2", "--hidden", "8"]
    train(tmp_path / "r", *args, "--steps-per-batch", "8", "--total-steps", "16")
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    done = command(tmp_path / "r", "--episodes", "33")
    assert done.returncode == 0, done.stderr
    numbers = [float(number) for number in re.findall(r"[\d.]+", done.stdout)]
    assert numbers == [33, 10, 0, 10, 10, 4]  # episodes, mean, deviation, least, most, length
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_episodes_and_noise_can_be_left_out(tmp_path):
    args = ["Pendulum", "--num-envs", "2", "--steps-per-batch", "64", "--total-steps", "64"]
    train(tmp_path, *args)
    one, two, other = (evaluate(tmp_path, 3, seed)["return"].tolist() for seed in (1, 1, 2))
    assert one == two != other
    assert evaluate(tmp_path, 2, 1)["return"].tolist() == one[:2]
    fixed = evaluate(tmp_path, 3, 1, deterministic=True)["return"].tolist()
    assert fixed != one
    assert fixed == evaluate(tmp_path, 3, 1, deterministic=True)["return"].tolist()


def test_an_error_of_the_environment_is_no_wrong_use(tmp_path, monkeypatch):
    train(tmp_path, *SMALL, "--total-steps", "64")
    monkeypatch.setattr(CartPoleEnv, "step", lambda *_: math.sqrt(-1))
    with pytest.raises(ValueError, match="math domain error|nonnegative"):
        main([str(tmp_path)])


def test_wrong_use(tmp_path, capsys):
    for args, fact in (
        ([tmp_path], "checkpoint"),
        ([tmp_path, "--episodes", "0"], "--episodes"),
    ):
        assert main([str(arg) for arg in args]) == 2
        assert fact in capsys.readouterr().err


@pytest.mark.parametrize("algo", ["cem"])
def test_any_agent(algo, tmp_path):
    sizes = ["--population", "4", "--episodes-per-batch", "4", "--total-steps", "128"]
    train(tmp_path, "CartPole", "--algo", algo, "--num-envs", "4", *sizes)
    assert len(evaluate(tmp_path, 5)["length"]) == 5


def test_without_noise_masks_hold_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Spaced-v0", "--env-kwargs", "masked=1", *SMALL[1:], "-n", "20"]
    train(tmp_path, *args)
    ended = evaluate(tmp_path, 20, deterministic=True)  # the environment refuses what it forbids
    assert ended["length"].tolist() == [7] * 20
