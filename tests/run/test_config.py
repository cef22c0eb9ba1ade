"""Defaults, under a TOML file, under the command line."""

import dataclasses
import tomllib
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w

from rank0rl import options
from rank0rl.algos.ppo import PPOOptions
from rank0rl.run import launch_options, plan, settings
from rank0rl.run import options as run_options
from rank0rl.run.options import RunOptions


def load(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return options.apply(settings.load(path), RunOptions(), PPOOptions(), source=str(path))


def test_a_file_is_over_the_defaults(tmp_path):
    run, agent = load(
        tmp_path,
        "num_envs = 8\ngamma = 1\nlr = 3e-4\nhidden = [32]\nsteps_per_batch = 80\n"
        "target_kl = 0.02\nentropy_coef = 0\nclip_ratio = 'cosine:0.2:0.1'\n[env_kwargs]\nx = 1\n[record]\nnprocs = 4\n",
    )
    assert (run.num_envs, run.steps_per_env, run.env_kwargs) == (8, 10, {"x": 1})
    assert (agent.gamma, agent.lr, agent.hidden, agent.target_kl) == (1.0, 3e-4, (32,), 0.02)
    assert (agent.clip_ratio, type(agent.entropy_coef)) == ("cosine:0.2:0.1", float)
    assert agent.epochs == PPOOptions().epochs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gama = 0.9",
            "setting 'gama' is not an option of RunOptions or PPOOptions; did you mean 'gamma'",
        ),
        ("gamma = 1.5", r"gamma must be in \[0, 1\]: got 1.5"),
        ("hidden = [64, 0]", r"hidden must be in \[1, inf\): got \(64, 0\)"),
        ('lr = "fast"', "lr: expected a number, linear:START:END .* got 'fast'; set --lr"),
        ("lr = true", r"lr must be float \| str: got True"),
        ("anneal = true", "setting 'anneal' is not an option of RunOptions or PPOOptions"),
        ("state_std = 1", "state_std must be bool: got 1"),
        ('target_kl = "x"', r"target_kl must be float \| None: got 'x'"),
        ("hidden = [64.5]", r"hidden must be a list of int \| None: got \[64.5\]"),
        ('hook = "mine.py:Mine"', "hook must be a list of str: got 'mine.py:Mine'"),
        ('steps_per_batch = "a"', r"steps_per_batch must be int \| None"),
        ('normalize = "run"', r"normalize must be Literal\['batch', 'minibatch'\]: got 'run'"),
        ("algo = 3", "algo must be str: got 3"),
        ("a = = 1", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read config .*No such file"):
        settings.load(tmp_path / "none.toml")


def test_the_file_of_a_run_gives_its_settings_again(tmp_path):
    run = RunOptions("CartPole-v1", num_envs=4, env_kwargs={"a": "b"}, run_dir="x", nprocs=3)
    agent = dataclasses.replace(PPOOptions(), hidden=(3, 4), target_kl=0.1)
    settings.write(tmp_path / "config.toml", options.as_settings(run, agent), {"nprocs": 3})
    again = options.apply(
        settings.load(tmp_path / "config.toml"), RunOptions(), PPOOptions(), source=""
    )
    assert again == (dataclasses.replace(run, run_dir=None, nprocs=None), agent)
    settings.write(tmp_path / "config.toml", options.as_settings(run, agent), {"nprocs": 2})
    record = tomllib.loads((tmp_path / "config.toml").read_text())["record"]
    assert record == [{"nprocs": 3}, {"nprocs": 2}]  # one for every start


def test_the_file_for_agent_and_environment_is_found(tmp_path):
    for name in ("ppo.toml", "ppo-Hopper.toml"):
        (tmp_path / name).touch()
    assert launch_options.find_config(tmp_path, "ppo", "Hopper") == tmp_path / "ppo-Hopper.toml"
    assert launch_options.find_config(tmp_path, "ppo", "ALE/Pong") == tmp_path / "ppo.toml"
    assert launch_options.find_config(tmp_path, "reinforce", "Hopper") is None


FACTS = options.facts(RunOptions)
OTHER = {bool: True, int: 7, float: 0.5, str: "other"}  # a value that no option has by default


def other(name):
    """Return a value of an option's type, in its range, that is not its default."""
    kind = get_type_hints(RunOptions)[name]
    if get_origin(kind) in (tuple, dict):
        return {tuple: ("Other",), dict: {"x": 1}}[get_origin(kind)]
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    kinds = get_args(kind) or (kind,)
    value = next(OTHER[k] for k in kinds if k is not type(None))
    return not getattr(RunOptions, name) if value is True else value


def test_every_option_of_a_run_says_what_it_changes():
    """`setting` asks for it; a field that is made without it would be taken for one of an agent."""
    assert [f.name for f in dataclasses.fields(RunOptions) if "facts" not in f.metadata] == []
    assert not any("option" in vars(module) for module in (run_options, launch_options))


@pytest.mark.parametrize("name", FACTS)
def test_every_number_of_a_run_has_a_range(name):
    kind = get_type_hints(RunOptions)[name]
    assert bool(FACTS[name].interval) == bool({int, float} & {kind, *get_args(kind)})


@pytest.mark.parametrize(
    "name", [name for name in FACTS if FACTS[name].interval[1:5] not in ("", "-inf")]
)
def test_a_number_out_of_its_range_is_refused(name):
    low, interval = float(FACTS[name].interval[1:].split(",")[0]), FACTS[name].interval
    below = int(low) - (interval[0] == "[")
    with pytest.raises(ValueError, match="must be in") as error:
        RunOptions(**{name: below})
    assert all(fact in str(error.value) for fact in (name, interval, f"got {below}"))


def test_a_number_with_its_prefix_has_the_same_range():
    assert RunOptions(keep_checkpoints="spread:10").keep_checkpoints == "spread:10"
    for wrong in ("spread", "spread:", "spread:-1", "10", "linear:1:2", "spread:1.5"):
        with pytest.raises(ValueError, match="a number, or spread: and a number") as error:
            RunOptions(keep_checkpoints=wrong)
        assert f"got {wrong!r}; set --keep-checkpoints" in str(error.value)
    with pytest.raises(ValueError, match=r"must be in \[1, inf\): got 0"):
        RunOptions(keep_checkpoints="spread:0")


def test_what_a_file_may_not_set_is_how_a_run_is_started():
    assert options.names(RunOptions, in_file=False) == {
        *("nprocs", "hosts", "hostfile", "mpiexec", "bind_to_core", "collective_timeout"),
        *("start_timeout", "max_restarts", "config", "resume", "run_dir", "quiet", "phases"),
        *("stop_after_iterations", "stop_after_seconds", "trust", "keep_batches"),
        *("pass_env", "shorter_record", "env_folders", "ranks_per_env", "mpmd", "changed_code"),
    }


def test_what_a_resume_may_change_leaves_the_curve_or_moves_its_end():
    assert options.names(RunOptions, resume=True, changes_curve=True) == {
        *("total_steps", "num_episodes", "device", "on_env_error", "cpu"),
    }
    assert options.names(RunOptions, resume=False, changes_curve=False) == {
        *("eval_every", "eval_episodes", "eval_deterministic", "info"),  # columns of the record
        "run_dir",
    }


@pytest.mark.parametrize("name", FACTS)
def test_a_file_sets_what_it_may(name):
    changed = {name: other(name)}
    assert other(name) != getattr(RunOptions(), name)
    as_toml = tomllib.loads(tomli_w.dumps(changed))
    if FACTS[name].in_file:
        (run,) = options.apply(as_toml, RunOptions(), source="file")
        assert run == RunOptions(**changed)
    else:
        with pytest.raises(ValueError, match="command line only") as error:
            options.apply(as_toml, RunOptions(), source="file")
        assert repr(name) in str(error.value)
    assert (name in options.as_settings(RunOptions())) == FACTS[name].in_file


@pytest.mark.parametrize("name", FACTS)
def test_a_resume_changes_what_it_may(name):
    new, old = (RunOptions(**{name: other(name)}), PPOOptions()), (RunOptions(), PPOOptions())
    if FACTS[name].resume:
        plan._check_unchanged(new, old)
    else:
        with pytest.raises(ValueError, match="settings") as error:
            plan._check_unchanged(new, old)
        assert f"{name} {other(name)}" in str(error.value)


def test_a_resume_changes_nothing_of_an_agent():
    new, old = PPOOptions(gamma=0.5), PPOOptions()
    with pytest.raises(ValueError, match=f"gamma 0.5 in place of {old.gamma}"):
        plan._check_unchanged((RunOptions(), new), (RunOptions(), old))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 1}, "num_envs=1, nprocs=2.*--num-envs.*--nprocs"),
        ({"episodes_per_batch": 1}, "episodes_per_batch=1, nprocs=2"),
        ({"nprocs": 3}, "nprocs is 3 in a job of 2"),
        ({"steps_per_batch": 64, "episodes_per_batch": 4}, "either a number of steps or"),
        ({"steps_per_batch": 100, "num_envs": 32}, "nearest is --steps-per-batch 96"),
    ],
)
def test_settings_that_do_not_fit_together(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RunOptions(**kwargs).check(2)
