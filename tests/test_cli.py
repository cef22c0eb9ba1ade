"""The command line, as a user meets it: each wrong use ends with 2 and one message."""

import inspect
import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest
from helpers import forks
from helpers.ranks import HERE

from rank0rl import __main__, cli
from rank0rl.launch.fork import mpi_fork
from rank0rl.run import settings
from rank0rl.run.launch_options import LaunchOptions, Words


def launch_options(argv):
    return Words.read(argv).launch_options(cli.algos.CONFIGS)


def train(*args):
    return forks.run("train.py", *args)


WRONG = [
    (["Walker2d", "--gamma", "1.5"], "gamma must be in [0, 1]: got 1.5; set --gamma"),
    (["Walker2d", "--hidden", "64", "-1"], "hidden must be in [1, inf)"),
    (["Walker2d", "--gama", "0.9"], "--gamma"),
    (["Walker2d", "--nprocs", "0"], "nprocs must be in [1, inf): got 0; set --nprocs"),
    (["Walker2d", "--nprocs", "x"], "--nprocs: expected a whole number, such as"),
    (["CartPole", "--total-steps", "1.5"], "--total-steps: expected a whole number"),
    (["Walker2d", "--num-envs", "1", "--nprocs", "2"], "raise --num-envs or lower --nprocs"),
    (["helpers.envs:Normalized-v0"], "Normalized-v0 is wrapped in NormalizeObservation"),
    (["helpers.envs:Odd-v0"], "Odd-v0 has Text(1, 5, charset"),
    (["Wolker2d"], "did you mean Walker2d"),
    (["Walker2d-v1"], "did you mean Walker2d-v5?;"),
    (
        ["Walker2d-v1", "--gpu_pct", "0.08", "-n", "2000"],
        "these options have other names here (--gpu_pct: leave it out",
    ),
    (
        ["CartPole", "--learning-rate", "1e-3", "--n_steps=512", "--out", "r"],
        "(--learning-rate: --lr; --n_steps: --steps-per-batch, of all environments; --out: --run-dir)",
    ),
    (
        [
            "Pendulum",
            *[
                "-g",
                "0.9",
                "-l",
                "0.9",
                "-k",
                "0.003",
                "-b",
                "20",
                "-m",
                "10",
                "-v",
                "-1",
                "--kl_targ=0.01",
                "--valfunc_hid_list=[5]",
            ],
        ],
        "(-g: --gamma; -l: --lam; -k: --target-kl; -b: --episodes-per-batch; -m: --hidden, the units of "
        "each layer; -v: --log-std, which is half of it; --kl_targ: --target-kl; --valfunc_hid_list: --value-hidden, "
        "the units of each layer)",
    ),
    (["Walker2d", "--algo", "pop"], "no agent 'pop'"),
    (["Walker2d", "--config", "none.toml"], "cannot read config none.toml"),
    (["Walker2d", "--env-kwargs", "speed=3"], "cannot make environment 'Walker2d-v5'"),
    (["--resume", "none"], "there is none in none/checkpoints; name the folder of a run"),
    (["CartPole", "--nprocs", "40"], "num_envs=8, nprocs=40; raise --num-envs"),
    (["CartPole", "--steps-per-batch", "64", "--episodes-per-batch", "4"], "got both"),
    (["CartPole", "--env-kwargs", "x=null"], "x cannot be or hold null"),
    (["CartPole", "--env-kwargs", 'x={"y": [null]}'], "x cannot be or hold null"),
    (["CartPole", "--hidden", "64", "--hidden=32"], "name all values after one --hidden"),
    (["CartPole", "--env-kwargs", "a=1", "--env_kwargs", "b=2"], "after one --env-kwargs"),
    (["CartPole", "--run-dir", "train.py"], "cannot make the run's folder"),
    ([], "name an environment"),
]


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("args", "message"), WRONG, ids=[" ".join(a) or "nothing" for a, _ in WRONG]
)
def test_wrong_use_ends_with_2_and_one_message(args, message, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "tests")
    done = train(*args)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error") <= 1
    assert done.stdout == ""


@pytest.mark.parametrize("words", ["-m rank0rl doctor", "-m rank0rl plot r", "train.py CartPole"])
def test_without_its_packages_it_says_what_to_activate(words):
    here = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", *words.split()]  # -S: without those of the environment
    done = subprocess.run(
        command, cwd=HERE.parent, env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: Python at \S+ has no '\w+': activate the virtual environment.*\n", done.stderr
    )


def test_without_mpi4py_ranks_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = train("CartPole", "--nprocs", "2", "--run-dir", str(tmp_path / "r"))
    assert done.returncode == 2
    said = r"error: more than one rank needs mpi4py, and \S+ has none: pip install mpi4py mpich\n"
    assert re.fullmatch(said, done.stderr)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_tool_that_is_interrupted_cleans_up_and_says_so(monkeypatch, capsys, signum):
    cleaned_up = []

    def interrupted(argv):
        try:
            signal.raise_signal(signum)
        finally:
            cleaned_up.append(True)

    monkeypatch.setattr(sys, "argv", ["rank0rl", "evaluate", "runs/mine"])
    monkeypatch.setattr("rank0rl.tools.evaluate.main", interrupted)
    assert __main__.main() == 128 + signum
    assert cleaned_up
    assert capsys.readouterr().err == "interrupted\n"


def test_help_shows_meaning_and_default_of_every_option():
    done = train("--help", "--nprocs", "4")
    assert done.returncode == 0
    shown = " ".join(done.stdout.replace("│", "").split())
    for word in (
        "--nprocs",
        "--clip-ratio",
        "--learner-threads",
        "--num-episodes",
        "default: 0.99",
    ):
        assert word in shown


def test_file_and_command_line_are_recorded(tmp_path):
    (tmp_path / "c.toml").write_text(
        "num_envs = 4e0\nsteps_per_batch = 16\nepochs = 2\nlr = 1e-3\n"
    )
    args = ["CartPole-v0", "--config", str(tmp_path / "c.toml"), "--epochs", "3"]
    done = train(*args, "--total-steps", "1.6e1", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert f"settings: {tmp_path / 'c.toml'}" in done.stdout
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert settings["env_id"] == "CartPole-v0"
    assert (settings["num_envs"], settings["epochs"], settings["lr"]) == (4, 3, 1e-3)
    assert settings["total_steps"] == 16
    assert isinstance(settings["num_envs"], int)  # 4e0 is a whole number in files too
    assert settings["record"][0]["versions"]["python"]
    again = train(*args, "--run-dir", str(tmp_path / "run"))
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def test_the_command_lines_kind_of_end_is_over_the_files(tmp_path):
    (tmp_path / "c.toml").write_text("num_episodes = 20")
    words = ["CartPole", "--config", str(tmp_path / "c.toml")]
    for more, expected in (
        ([], 20),
        (["--total-steps", "5000"], None),
        (["-n", "9", "--total-steps", "5"], 9),
    ):
        found = settings.read(Words.read([*words, *more]), cli.algos.CONFIGS)
        assert found.options.num_episodes == expected


@pytest.mark.parametrize("algo", ["ppo", "rank0rl.algos.ppo:PPO"])
def test_the_configs_file_of_an_environment_is_loaded_by_itself(tmp_path, algo):
    """And the command line's kind of batch is over the file's."""
    args = ["Hopper", "--total-steps", "1", "--run-dir", str(tmp_path), "--algo", algo]
    done = train(*args, "--episodes-per-batch", "2")
    assert done.returncode == 0, done.stderr
    assert "settings: " in done.stdout
    assert "configs/ppo-Hopper.toml" in done.stdout
    settings = tomllib.loads((tmp_path / "config.toml").read_text())
    assert settings["episodes_per_batch"] == 2
    assert "steps_per_batch" not in settings


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("text", "more", "source"),
    [
        ("class Mine(PPO): pass", [], "configs/ppo-Hopper.toml"),
        ("class Mine(PPO):\n    settings = 'trpo'", [], "configs/trpo.toml"),
        (
            "class Mine(PPO):\n    settings = ''",
            [],
            "defaults, because its class names none in configs/;",
        ),
        ("class Mine(PPO):\n    settings = ''", ["--config", "ppo"], "configs/ppo-Hopper.toml"),
    ],
)
def test_an_agent_trains_with_the_settings_that_its_class_names(tmp_path, text, more, source):
    (tmp_path / "mine.py").write_text(f"from rank0rl.algos.ppo import PPO\n{text}\n")
    size = ["--num-envs", "1", "--steps-per-batch", "64", "--total-steps", "1"]
    args = ["Hopper", "--algo", f"{tmp_path / 'mine.py'}", *size, *more]
    done = train(*args, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "settings: " in line]
    assert source in line


def test_a_name_without_settings_is_refused_with_those_that_there_are(tmp_path):
    done = train("Hopper", "--config", "pop", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert (
        "settings in configs/ (a2c, bc, cem, cmaes, es, klppo, ppo, trpo): got 'pop'" in done.stderr
    )


def test_the_supervisor_and_the_ranks_read_the_same():
    """Both parsers take the fields of `LaunchOptions`, and no other value of them."""
    argv = ["CartPole", "--nprocs", "2", "--num_envs=3", "--max-restarts", "1", "--bind-to-core"]
    argv += ["--hosts", "None", "--collective-timeout", "1.5", "--lr", "1", "--hidden", "8", "8"]
    given = launch_options(argv)
    run, _ = settings._read_line(Words.read(argv), {}, "")
    assert given == LaunchOptions(**{name: getattr(run, name) for name in vars(given)})
    assert (given.nprocs, given.num_envs, given.max_restarts) == (2, 3, 1)
    assert (given.hosts, given.bind_to_core, given.collective_timeout) == (None, True, 1.5)
    assert set(given.how()) < set(inspect.signature(mpi_fork).parameters)


def test_help_starts_no_ranks():
    assert launch_options(["--nprocs", "8", "--hosts", "a:8", "--help"]).how()["hosts"] is None


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--nprocs 3 --num-envs 2", ""),
        ("--nprocs 33", ""),
        ("--nprocs 33", "num_envs = 8"),
        ("--nprocs 41", "num_envs = 40"),
        ("--nprocs 33", "num_envs = 'x'"),
        ("--hosts localhost:33", ""),
    ],
)
def test_ranks_without_an_environment_are_refused_before_they_start(
    tmp_path, monkeypatch, argv, text
):
    (tmp_path / "c.toml").write_text(text)
    monkeypatch.setattr(cli.algos, "CONFIGS", tmp_path)
    with pytest.raises(ValueError, match="--num-envs"):
        launch_options(argv.split())
    with pytest.raises(ValueError, match="--num-envs"):
        launch_options([*argv.split(), "--config", str(tmp_path / "c.toml")])


@pytest.mark.parametrize("more", [["--algo", "mine.py:Mine"], ["--config", "ppo"]])
def test_settings_that_are_named_may_have_environments_for_more_ranks(tmp_path, monkeypatch, more):
    monkeypatch.setattr(cli.algos, "CONFIGS", tmp_path)
    (tmp_path / "ppo.toml").write_text("num_envs = 40")
    (tmp_path / "ppo-Pong.toml").write_text("num_envs = 41")
    assert launch_options(["Pong", "--nprocs", "41", *more]).nprocs == 41
    with pytest.raises(ValueError, match="num_envs=40, nprocs=41"):
        launch_options(["Hopper", "--nprocs", "41", *more])


def test_a_file_may_have_environments_for_more_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.algos, "CONFIGS", tmp_path)
    (tmp_path / "a2c.toml").write_text("num_envs = 40")
    (tmp_path / "a2c-Pong.toml").write_text("num_envs = 41")
    (tmp_path / "config.toml").write_text("num_envs = 42")
    a2c = ["--algo", "a2c"]
    for argv in (["40", *a2c], ["41", *a2c, "Pong-v5"], ["42", "--resume", str(tmp_path)]):
        given = launch_options(["--nprocs", *argv])
        assert given.nprocs == int(argv[0])


def test_a_file_may_have_environments_for_fewer_ranks(tmp_path, monkeypatch):
    """And another agent's default more: whether an agent of one's own has that file is not known yet."""
    monkeypatch.setattr(cli.algos, "CONFIGS", tmp_path)
    (tmp_path / "ppo.toml").write_text("num_envs = 8")
    with pytest.raises(ValueError, match="num_envs=8, nprocs=9"):
        launch_options(["Hopper", "--nprocs", "9"])
    assert launch_options(["Hopper", "--nprocs", "9", "--algo", "mine.py:Mine"]).nprocs == 9


@pytest.mark.parametrize("algo", ["ppo", "some/ppo.py:PPO", "rank0rl.algos.ppo:PPO"])
@pytest.mark.parametrize("env", ["Hopper", "Hopper-v5", "module:Hopper-v5"])
def test_the_file_that_bounds_the_ranks_is_found_as_rank_0_finds_it(tmp_path, algo, env):
    """Whatever the agent and the environment are called."""
    (tmp_path / "ppo-Hopper.toml").write_text("num_envs = 40")
    argv = [env, "--algo", algo, "--nprocs"]
    assert Words.read([*argv, "40"]).launch_options(tmp_path).nprocs == 40
    with pytest.raises(ValueError, match="num_envs=40, nprocs=41"):
        Words.read([*argv, "41"]).launch_options(tmp_path)
