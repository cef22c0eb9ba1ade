"""Defaults, under a TOML file, under the command line."""

import dataclasses
import tomllib

import pytest

from algos.ppo import PPOOptions
from rank0rl.run import config
from rank0rl.run.config import RunOptions


def load(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return config.apply(config.load(path), RunOptions(), PPOOptions(), source=str(path))


def test_a_file_is_over_the_defaults(tmp_path):
    run, agent = load(
        tmp_path,
        "num_envs = 8\ngamma = 1\nlr = 3e-4\nhidden = [32]\nsteps_per_batch = 80\n"
        "target_kl = 0.02\n[env_kwargs]\nx = 1\n[record]\nnprocs = 4\n",
    )
    assert (run.num_envs, run.steps_per_env, run.env_kwargs) == (8, 10, {"x": 1})
    assert (agent.gamma, agent.lr, agent.hidden, agent.target_kl) == (1.0, 3e-4, (32,), 0.02)
    assert agent.epochs == PPOOptions().epochs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama = 0.9", "setting 'gama' does not exist; did you mean 'gamma'"),
        ("nprocs = 2", "'nprocs' is given on the command line only"),
        ("gamma = 1.5", r"gamma must be in \[0, 1\]: got 1.5"),
        ("hidden = [64, 0]", r"hidden must be in \[1, inf\): got \(64, 0\)"),
        ('lr = "fast"', "lr must be float: got 'fast'"),
        ("anneal = 1", "anneal must be bool: got 1"),
        ('target_kl = "x"', r"target_kl must be float \| None: got 'x'"),
        ("hidden = [64.5]", r"hidden must be tuple\[int, ...\]: got \[64.5\]"),
        ('steps_per_batch = "a"', r"steps_per_batch must be int \| None"),
        ('normalize = "run"', r"normalize must be Literal\['batch', 'minibatch'\]: got 'run'"),
        ("algo = 3", "algo must be str: got 3"),
        ("a = = 1", "is no TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read config .*No such file"):
        config.load(tmp_path / "none.toml")


def test_the_file_of_a_run_gives_its_settings_again(tmp_path):
    run = RunOptions("CartPole-v1", num_envs=4, env_kwargs={"a": "b"}, run_dir="x", nprocs=3)
    agent = dataclasses.replace(PPOOptions(), hidden=(3, 4), target_kl=0.1)
    config.write(tmp_path / "config.toml", (run, agent), {"nprocs": 3})
    again = config.apply(
        config.load(tmp_path / "config.toml"), RunOptions(), PPOOptions(), source=""
    )
    assert again == (dataclasses.replace(run, run_dir=None, nprocs=None), agent)
    config.write(tmp_path / "config.toml", (run, agent), {"nprocs": 2})
    record = tomllib.loads((tmp_path / "config.toml").read_text())["record"]
    assert record == [{"nprocs": 3}, {"nprocs": 2}]  # one for every start


def test_the_file_for_agent_and_environment_is_found(tmp_path):
    for name in ("ppo.toml", "ppo-Walker2d.toml"):
        (tmp_path / name).touch()
    assert config.find(tmp_path, "ppo", "Walker2d") == tmp_path / "ppo-Walker2d.toml"
    assert config.find(tmp_path, "ppo", "ALE/Pong") == tmp_path / "ppo.toml"
    assert config.find(tmp_path, "reinforce", "Hopper") is None
    assert config.find(None, "ppo", "Hopper") is None


@pytest.mark.parametrize("algo", ["ppo", "algos.ppo:PPO", "some/where/ppo.py:PPO"])
def test_an_agent_has_one_name_for_files(algo):
    assert config.short(algo) == "ppo"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs must be in"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_settings_that_cannot_be(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RunOptions(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 1}, "num_envs=1, nprocs=2; raise --num-envs or lower --nprocs"),
        ({"episodes_per_batch": 1}, "episodes_per_batch=1, nprocs=2"),
        ({"nprocs": 3}, "nprocs is 3 in a job of 2"),
        ({"steps_per_batch": 64, "episodes_per_batch": 4}, "either a number of steps or"),
        ({"steps_per_batch": 100, "num_envs": 32}, "nearest is --steps-per-batch 96"),
    ],
)
def test_settings_that_do_not_fit_together(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RunOptions(**kwargs).check(2)


def test_progress_is_of_steps_or_of_episodes():
    assert RunOptions(total_steps=100).progress(25, 99) == 0.25
    assert RunOptions(num_episodes=10).progress(25, 5) == 0.5
