"""What is imported because a file names it: for one's own runs anything, for others only what is known."""

import os
import shlex
import sys
from importlib.util import spec_from_file_location

import gymnasium
import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, train

from rank0rl.run import agents, checkpoint, plan, settings, trust
from rank0rl.run.launch_options import Words
from rank0rl.tools import evaluate, export, play, replay

OWN = {
    "algo": "/somewhere/mine.py:Mine",
    "env_id": "my_envs:Own-v0",
    "env_kwargs": {"size": 3, "kind": "a b"},
    "wrappers": ["my_envs:Wrap"],
}


@pytest.fixture(autouse=True)
def key(tmp_path, monkeypatch):
    """Give this test's user no key yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rank0rl" / "key"


@pytest.mark.parametrize(
    "settings",
    [
        {"env_id": "Walker2d-v5", "algo": "ppo"},
        {
            "env_id": "CartPole",
            "algo": "rank0rl.algos.trpo:TRPO",
            "env_kwargs": {"x": 1, "map": "4x4"},
        },
        {
            "env_id": "NoSuch-v0",
            "wrappers": [
                "TimeLimit(max_episode_steps=5)",
                "ClipReward (x=':')",
                "rank0rl.envs.wrappers:RawReward",
            ],
        },
        {},
    ],
)
def test_what_gymnasium_and_rank0rl_bring_is_imported_for_anybody(settings):
    assert trust.trusted(settings, "file") == settings


@pytest.mark.parametrize(
    "settings",
    [
        {"env_id": "os:system"},
        {"env_id": "gymnasium.envs.registration:make"},
        {"env_id": "rank0rl.launch.fork:mpi_fork"},
        {"env_id": "Foreign-v0"},
        {"env_id": "Foreign"},
        {"algo": "evil"},
        {"algo": "evil.py"},
        {"algo": "evil:ppo"},
        {"algo": "ppo:PPO"},
        {"algo": "rank0rl.algos.evil:PPO"},
        {"algo": "algos.ppo:PPO"},
        {"algo": "../algos/ppo"},
        {"algo": "rank0rl.algos.ppo.evil:PPO"},
        {"wrappers": ["ClipAction", "os:system"]},
        {"wrappers": ["RecordVideo(video_folder='/')"]},
        {"wrappers": [" os:system (x=1)"]},
        {"curriculum": "os:system"},
        {"curriculum": "evil.py:f"},
        {"env_kwargs_of": "os:system"},
        {"init_from": "/a/run"},
        {"data": "/a/rows.npz"},
        {"wandb": "project"},
    ],
)
def test_all_other_code_is_named_and_not_imported(settings, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "train.py", "--resume", "r"])
    spec = gymnasium.envs.registration.EnvSpec("Foreign-v0", entry_point="foreign.env:Env")
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)  # as a plug-in registers it
    with pytest.raises(ValueError, match="imported") as error:
        trust.trusted(settings, "file", Words.read(["--resume", "r"]))
    (name,) = settings
    values = settings[name] if name == "wrappers" else [settings[name]]
    assert name in str(error.value)
    assert all(value in str(error.value) for value in values)
    assert "go on with: python train.py --resume r " in str(error.value)
    with pytest.raises(ValueError, match=r"--resume r --trust$"):
        trust.trusted(settings, "file")  # a tool, which has no option to name it
    assert trust.trusted(settings, "file", trust=True) == settings


def test_the_line_to_go_on_with_is_enough(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--resume", "r"])
    with pytest.raises(ValueError) as error:
        trust.trusted(OWN, "file", Words.read(["--resume", "r"]))
    argv = shlex.split(str(error.value).partition("go on with: python train.py ")[2])
    assert trust.trusted(OWN, "file", Words.read(argv)) == OWN
    for left_out in range(2, len(argv)):
        if not argv[left_out].startswith("--"):
            with pytest.raises(ValueError, match="imported|expected one"):
                trust.trusted(OWN, "file", Words.read([*argv[:left_out], *argv[left_out + 1 :]]))


def test_a_line_that_names_some_of_the_code_goes_on_with_trust(monkeypatch):
    for typed in (OWN["env_id"], f"--algo={OWN['algo']}"):
        line = ["--resume", "r", typed]
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *line])
        with pytest.raises(ValueError, match=f"--resume r {typed} --trust$"):
            trust.trusted(OWN, "file", Words.read(line))


def test_code_is_named_in_either_spelling_and_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"algo": f"{tmp_path}/mine.py:Mine"}
    assert trust.trusted(settings, "f", Words.read(["--algo=mine.py:Mine"])) == settings
    assert trust.trusted(settings, "f", Words.read(["--algo", "./mine.py:Mine"])) == settings


def test_arguments_of_foreign_code_are_named_too():
    settings = {"env_id": "os:system", "env_kwargs": {"command": "rm x", "n": 1.5}}
    for words in (["command=rm x", "n=1.5"], ['command="rm x"', "n=1.5"]):
        argv = ["os:system", "--env-kwargs", *words]
        assert trust.trusted(settings, "f", Words.read(argv)) == settings
    for words in ([], ["n=1.5"], ["command=rm y", "n=1.5"]):
        with pytest.raises(ValueError, match="rm x"):
            trust.trusted(settings, "f", Words.read(["os:system", "--env-kwargs", *words]))


@pytest.mark.parametrize("value", ["/a.xml", "./a", "here", ["x", {"y": "a/b"}], ("/a",)])
def test_a_file_that_an_environment_reads_is_named(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    settings = {"env_id": "Walker2d-v5", "env_kwargs": {"xml_file": value}}
    with pytest.raises(ValueError, match="xml_file") as error:
        trust.trusted(settings, "f", Words.read([]))
    argv = shlex.split(str(error.value))[-2:]
    assert trust.trusted(settings, "f", Words.read(argv)) == settings


@pytest.mark.parametrize("option", ["--resume", "--config", "--run-dir", "--resume="])
def test_the_name_of_a_folder_is_no_name_of_code(option):
    argv = [f"{option}os:system"] if option.endswith("=") else [option, "os:system"]
    with pytest.raises(ValueError, match="imported"):
        trust.trusted({"env_id": "os:system"}, "f", Words.read(argv))


def test_what_a_terminal_would_not_show_is_escaped():
    with pytest.raises(ValueError, match=r"\\x1b\[2J.*--trust$") as error:
        trust.trusted({"algo": "\x1b[2J\n.py"}, "file", Words.read([]))
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "argv",
    [
        ["--hosts", "os:system"],
        ["--wandb=os:system"],
        ["--hosts", "localhost:2", "--info", "os:system"],
    ],
)
def test_the_value_of_another_option_is_no_name_of_code(argv):
    with pytest.raises(ValueError, match="imported"):
        trust.trusted({"env_id": "os:system"}, "f", Words.read(argv))
    for named in ([*argv, "--quiet", "os:system"], ["os:system", *argv]):
        assert trust.trusted({"env_id": "os:system"}, "f", Words.read(named))


@pytest.mark.parametrize("name", ["agent.py", "package/__init__.py", "package/env.py", "robot.xml"])
def test_the_seal_is_of_the_contents_of_what_is_named(tmp_path, monkeypatch, name):
    settings = {
        "algo": "agent.py:Agent",
        "env_id": "package.env:Own-v0",
        "env_kwargs": {"xml_file": "robot.xml"},
    }
    for copy in ("mine", "fork"):
        (tmp_path / copy / "package").mkdir(parents=True)
        for each in ("agent.py", "package/__init__.py", "package/env.py", "robot.xml"):
            (tmp_path / copy / each).write_text("")
    (tmp_path / "fork" / name).write_text("raise SystemExit('evil')")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "mine")
    sealed = trust.sealed(settings)
    assert trust.trusted(sealed, "f") == settings
    monkeypatch.chdir(tmp_path / "fork")
    with pytest.raises(ValueError, match="have changed or gone since you trained"):
        trust.trusted(sealed, "f")
    assert trust.trusted(sealed, "f", trust=True) == settings


def test_the_seal_is_of_modules_that_an_editable_installation_knows(tmp_path, monkeypatch):
    file = tmp_path / "editable.py"

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_file_location(name, file) if name == "editable" else None

    file.write_text("")
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path, Finder])
    sealed = trust.sealed({"env_id": "editable:make"})
    assert trust.trusted(sealed, "f") == {"env_id": "editable:make"}
    file.write_text("raise SystemExit('evil')")
    with pytest.raises(ValueError, match="changed or gone since you trained this run: env_id"):
        trust.trusted(sealed, "f")


def test_ones_own_run_has_a_seal(key):
    settings = trust.sealed(OWN)
    assert trust.words_to_go_on(settings) == ""
    assert trust.trusted(settings, "file") == OWN
    assert key.stat().st_mode & 0o777 == 0o600
    assert os.listdir(key.parent) == ["key"]
    assert trust.trusted({**settings, "lr": 0.5}, "file")  # what imports nothing may be edited
    for change in (
        {"algo": "os:system"},
        {"env_kwargs": {"x": 1}},
        {"seal": "0" * 64},
        {"seal": 5},
    ):
        with pytest.raises(ValueError, match="imported"):
            trust.trusted({**settings, **change}, "file")
    key.unlink()  # another user, or another machine
    with pytest.raises(ValueError, match="imported"):
        trust.trusted(settings, "file")


def readable(key):
    key.chmod(0o644)


def replaceable(key):
    key.parent.chmod(0o777)


def link(key):
    key.rename(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


def fifo(key):
    key.unlink()
    os.mkfifo(key)


def short(key):
    key.write_bytes(b"")


@pytest.mark.parametrize("spoil", [readable, replaceable, link, fifo, short])
def test_a_key_that_others_may_know_is_none(key, spoil):
    settings = trust.sealed(OWN)
    spoil(key)
    with pytest.raises(ValueError, match="imported"):
        trust.trusted(settings, "file")
    assert trust.sealed(OWN) == OWN


def test_the_first_key_stays(key):
    trust.sealed(OWN)
    before = key.read_bytes()
    trust._make_key(key)  # as another process does that found none
    assert key.read_bytes() == before


@pytest.mark.parametrize("home", ["/dev/null", "relative"])
def test_without_a_key_the_line_to_go_on_with_names_the_code(home, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", home)
    monkeypatch.setenv("HOME", "/dev/null")
    assert trust.sealed(OWN) == OWN
    words = shlex.split(trust.words_to_go_on(OWN))
    assert words == [
        *("my_envs:Own-v0", "--env-kwargs", "size=3", 'kind="a b"', "--wrappers", "my_envs:Wrap"),
        *("--algo", "/somewhere/mine.py:Mine"),
    ]
    assert trust.words_to_go_on({"env_id": "CartPole-v1"}) == ""


def test_reference_agents_are_ours_whatever_else_is_called_algos(tmp_path, monkeypatch):
    (tmp_path / "algos").mkdir()
    (tmp_path / "algos" / "cem.py").write_text("raise SystemExit('evil')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rank0rl.algos.cem", raising=False)
    agents.load_agent.cache_clear()
    module = sys.modules[agents.load_agent("cem").__module__]
    assert module.__file__ == str(HERE.parent / "algos" / "cem.py")
    agents.load_agent.cache_clear()


AGENT = """
from pathlib import Path
from rank0rl.algos.ppo import PPO
Path(__file__).with_name("imported").touch()
class Mine(PPO): pass
"""


@pytest.fixture
def mine(tmp_path):
    """Train a run with an agent of one's own."""
    agent = tmp_path / "mine.py"
    agent.write_text(AGENT)
    args = [*SMALL, "--hidden", "8", "--total-steps", "128", "--stop-after-iterations", "1"]
    done = train(tmp_path / "r", *args, "--algo", f"{agent}:Mine")
    (tmp_path / "imported").unlink()
    agents.load_agent.cache_clear()
    return tmp_path / "r", done.stdout


def test_a_run_of_ones_own_asks_nothing_and_one_of_others_does(mine, key, monkeypatch, capsys):
    run, said = mine
    imported, agent = run.parent / "imported", f"{run.parent}/mine.py:Mine"
    assert f"go on with: python train.py --resume {run}\n" in said
    monkeypatch.setattr(plan, "lock", lambda *_, **__: lambda: None)
    argv = ["--resume", str(run)]
    assert plan.prepare(Words.read(argv), None, 1).options.algo == agent
    assert imported.exists()
    toml = run / "config.toml"
    assert trust.trusted(settings.load(toml), str(toml))["algo"] == agent  # for --config
    imported.unlink()
    key.unlink()
    agents.load_agent.cache_clear()
    with pytest.raises(ValueError, match="imported"):
        plan.prepare(Words.read(argv), None, 1)
    with pytest.raises(ValueError, match="imported"):  # the settings of a run, in a new one
        plan.prepare(Words.read(["--config", str(run / "config.toml")]), None, 1)
    for tool, more in (
        (evaluate, []),
        (export, []),
        (play, ["--video", "a.mp4"]),
        (replay, ["--iteration", "1", "--env", "0"]),
    ):
        assert tool.main([str(run), *more]) == 2
        err = capsys.readouterr().err
        assert "--trust" in err
        assert len(err.splitlines()) == 1
    assert not imported.exists()
    assert plan.prepare(Words.read([*argv, "--trust"]), None, 1).options.algo == agent
    assert plan.prepare(Words.read([*argv, "--algo", agent]), None, 1).options.algo == agent
    assert plan.prepare(Words.read([]), None, 1, restart=str(run)).options.algo == agent
    assert evaluate.main([str(run), "--episodes", "1", "--trust"]) == 0


def test_where_no_key_can_be_the_run_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    agent = tmp_path / "mine.py"
    agent.write_text(AGENT)
    args = [*SMALL, "--hidden", "8", "--total-steps", "128", "--stop-after-iterations", "1"]
    done = train(tmp_path / "r", *args, "--algo", f"{agent}:Mine")
    assert f"--resume {tmp_path / 'r'} --algo {agent}:Mine\n" in done.stdout
    assert "seal" not in checkpoint.read(checkpoint.latest(tmp_path / "r"))["settings"]


@pytest.mark.fast(1)
@pytest.mark.parametrize("class_name", [":Mine", ""])
def test_the_file_of_ones_own_agent_may_move_with_the_run(mine, key, monkeypatch, class_name):
    """As to another machine, whose key is another one; a second file of that name is refused."""
    run, _ = mine
    monkeypatch.setattr(plan, "lock", lambda *_, **__: lambda: None)
    old, new = run.parent / "mine.py", run.parent / "moved" / "mine.py"
    new.parent.mkdir()
    new.write_text(old.read_text())
    argv = ["--resume", str(run), "--algo", f"{new}{class_name}"]
    with pytest.raises(ValueError, match="a resumed run keeps its own settings: got algo"):
        plan.prepare(Words.read([*argv, "--trust"]), None, 1)
    old.unlink()
    key.unlink()
    assert plan.prepare(Words.read(argv), None, 1).options.algo == f"{new}{class_name}"


@pytest.mark.parametrize(("trained", "is_same"), [("", True), (":Mine", True), (":Other", False)])
def test_an_agent_that_moved_may_be_named_with_its_class_or_without(tmp_path, trained, is_same):
    now = f"{tmp_path / 'mine.py'}:Mine"
    saved = {"algo": f"{tmp_path / 'gone' / 'mine.py'}{trained}"}
    found = settings._with_moved_agent(saved, Words.read(["--resume", "r", "--algo", now]))
    assert (found["algo"] == now) == is_same
