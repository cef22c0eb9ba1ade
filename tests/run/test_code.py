"""Code belongs to the run: copied at each start, compared at the next, another row of a study, found when it has gone."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from helpers import forks
from helpers.ranks import HERE
from helpers.runs import curve, resume, table, train

from rank0rl.policy import load
from rank0rl.run import code, machine
from rank0rl.run.settings import read_saved
from rank0rl.tools import plot

AGENT = """
from dataclasses import replace
from mine_too import FACTOR
from rank0rl.algos.ppo import PPO

class Mine(PPO):
    def process(self, fragment):
        return super().process(replace(fragment, rew=fragment.rew * FACTOR))
"""
SIZE = ["--num-envs", "2", "--steps-per-batch", "32", "--minibatch-size", "16", "--hidden", "8"]
SIZE += ["--checkpoint-every", "1", "--total-steps", "128"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a folder with an agent, a module that it imports, and an environment."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(AGENT)
    (folder / "mine_too.py").write_text("FACTOR = 1.0\n")
    (folder / "not_mine.py").write_text("raise SystemExit\n")
    (folder / "an_env.py").write_text(
        "import gymnasium\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{HERE}")
    return folder


def words(mine, *more):
    return ["an_env:make", "--algo", f"{mine / 'mine.py'}:Mine", *SIZE, *more]


def starts(run):
    return tomllib.loads((run / "config.toml").read_text())["record"]


def verify(run, *more):
    return forks.run("-m", "rank0rl", "verify", str(run), "--trust", *more)


@pytest.mark.slow
def test_a_run_keeps_the_code_of_its_own(mine, tmp_path):
    run = tmp_path / "run"
    train(run, *words(mine))
    copies = {path.name: path.read_text() for path in (run / "code" / "start-1").iterdir()}
    assert copies == {
        name: (mine / name).read_text() for name in ("mine.py", "mine_too.py", "an_env.py")
    }
    [start] = starts(run)
    assert code.recorded(start) == code.hashes(copies)
    assert code.kept(run, start) == copies
    train(tmp_path / "plain", "CartPole", *SIZE)
    assert not (tmp_path / "plain" / "code").exists()
    assert "code" not in starts(tmp_path / "plain")[0]


@pytest.mark.slow
def test_changed_code_is_refused_with_what_has_changed_or_noted(mine, tmp_path):
    run = tmp_path / "run"
    train(run, *words(mine, "--stop-after-iterations", "2", "--keep-checkpoints", "10"))
    (mine / "mine_too.py").write_text("FACTOR = 0.5\n")
    done = resume(run, *words(mine)[1:3], expect=2)
    for line in ("--- mine_too.py, recorded", "-FACTOR = 1.0", "+FACTOR = 0.5", "--changed-code"):
        assert line in done.stderr
    done = resume(run, *words(mine)[1:3], "--changed-code")
    assert "note: code has changed: mine_too.py\n" in done.stdout
    assert len(table(run)) == 4
    first, second = starts(run)
    assert code.kept(run, first)["mine_too.py"] == "FACTOR = 1.0\n"
    assert code.kept(run, second)["mine_too.py"] == "FACTOR = 0.5\n"
    assert (first["code_of_start"], second["code_of_start"]) == (1, 2)
    done = verify(run)
    assert done.returncode == 2
    assert "was changed after iteration 2" in done.stderr
    assert "add --rows 2" in done.stderr
    (mine / "mine_too.py").write_text("FACTOR = 1.0\n")
    assert verify(run, "--rows", "2").returncode == 0
    (mine / "mine_too.py").write_text("FACTOR = 0.5\n")
    resume(run, *words(mine)[1:3], "--total-steps", "192")
    assert starts(run)[2]["code_of_start"] == 2
    assert not (run / "code" / "start-3").exists()
    mine.rename(tmp_path / "moved")  # what has gone is found as it was at the time
    assert verify(run, "--rows", "2").returncode == 0
    for number, of_start in ((1, "start-1"), (2, "start-2"), (6, "start-2")):
        saved = read_saved(run / "checkpoints" / f"{number:08}.pt", trust=True)
        assert saved["settings"]["algo"] == f"{run}/code/{of_start}/mine.py:Mine"


@pytest.mark.slow
def test_verify_names_the_file_and_the_line(mine, tmp_path):
    run = tmp_path / "run"
    train(run, *words(mine))
    assert verify(run).returncode == 0
    (mine / "mine_too.py").write_text("FACTOR = 0.5\n")
    done = verify(run)
    assert done.returncode == 1
    assert "  code has changed:\n    --- mine_too.py, recorded\n" in done.stdout
    assert "    @@ -1 +1 @@\n    -FACTOR = 1.0\n    +FACTOR = 0.5\n" in done.stdout


@pytest.mark.slow
def test_what_has_gone_is_found_in_the_runs_folder_if_it_is_trusted(mine, tmp_path):
    run, whole, of_ppo = tmp_path / "run", tmp_path / "whole", tmp_path / "ppo"
    train(whole, *words(mine))
    train(of_ppo, "an_env:make", *SIZE)
    train(run, *words(mine, "--stop-after-iterations", "2"))
    mine.rename(tmp_path / "moved")
    done = resume(run, expect=2)
    assert "have changed or gone since you trained" in done.stderr
    resume(run, "--trust")
    assert curve(run) == curve(whole)
    assert verify(whole).returncode == 0
    assert verify(of_ppo).returncode == 0
    done = forks.run("-m", "rank0rl", "evaluate", str(whole), "--episodes", "1", "--trust")
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="changed or gone"):
        load(whole)


@pytest.mark.slow
def test_runs_of_other_code_are_another_row(mine, tmp_path):
    for seed, factor in enumerate(("1.0", "1.0", "0.5")):
        (mine / "mine_too.py").write_text(f"FACTOR = {factor}\n")
        train(tmp_path / "runs" / f"{seed}", *words(mine, "--seed", str(seed)))
    groups = plot.by_agent(plot.read_runs(sorted((tmp_path / "runs").iterdir())))
    assert sorted(len(runs) for runs in groups.values()) == [1, 2]
    assert all(agent.startswith("mine code=") for _, agent in groups)


def test_a_module_may_name_a_file_that_is_not_there(mine, tmp_path):
    """As torch.ops does: "_ops.py" is in no folder."""
    args = ["train.py", *words(mine), "--run-dir", str(tmp_path / "run")]
    done = forks.run(str(HERE.parent / args[0]), *args[1:], cwd=mine)
    assert done.returncode == 0, done.stderr
    assert "_ops.py" not in code.recorded(starts(tmp_path / "run")[0])


def test_a_copy_elsewhere_is_no_copy(tmp_path):
    (tmp_path / "secret.py").write_text("secret")
    for path in ("../../../secret.py", str(tmp_path / "secret.py"), "./secret.py", "a\nnote.py"):
        start = {"code": {path: "0"}, "code_of_start": 1}
        assert code.kept(tmp_path / "a" / "b", start) == code.recorded(start) == {}
    run = tmp_path / "run"
    (run / "code" / "start-1").mkdir(parents=True)
    (run / "code" / "start-2").symlink_to(tmp_path)
    (run / "code" / "start-1" / "secret.py").symlink_to(tmp_path / "secret.py")
    for number in (1, 2):
        start = {"code": {"secret.py": "0"}, "code_of_start": number}
        assert code.kept(run, start) == {"secret.py": ""}
    assert code.kept(tmp_path, {"code": {"secret.py": "0"}, "code_of_start": "x"}) == {
        "secret.py": ""
    }
    assert code.recorded({"code": 7}) == {}


def test_differences_are_short_and_printable():
    [*lines, last] = code.difference({"a": ""}, {"a": "\x1b[2J\n" * 100})
    assert lines[3] == "+[2J"
    assert len(lines) == 30
    assert last == "and more lines"
    long = {"a": "x\n" * 1_000_000}
    assert code.difference({"a": ""}, long) == ["a has changed; it is too long to be compared"]
    many = {f"{i}": "y" * 1000 + "\n" + "x\n" * 4000 for i in range(200)}
    assert max(map(len, code.difference({}, many))) == 200


def test_copies_are_written_into_folders_that_are_new(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "code").mkdir(parents=True)
    outside.mkdir()
    (run / "code" / "start-1").symlink_to(outside)
    (run / "code" / "start-2").symlink_to(tmp_path / "nowhere")
    (run / "code" / "start-3").mkdir()
    assert code.keep({"a.py": "x"}, run, [])["code_of_start"] == 4
    assert [*outside.iterdir()] == []
    assert (run / "code" / "start-4" / "a.py").read_text() == "x"
    (tmp_path / "code").touch()
    with pytest.raises(ValueError, match="code must be a folder, for copies of code"):
        code.keep({"a.py": "x"}, tmp_path, [])


def test_only_what_the_run_has_written_is_a_copy(tmp_path):
    names = ["/gone/agents/main.py:A", "/gone/hooks/main.py:f", "ppo", "a_module_of_mine:make"]
    texts = {"agents/main.py": "a", "hooks/main.py": "b", "a_module_of_mine.py": "c"}
    start = code.keep(texts, tmp_path, [])
    settings = {"algo": names[0], "hook": [names[1]], "env_id": names[3], "lr": 1.0}
    folder = tmp_path / "code" / "start-1"
    assert code.with_copies(settings, tmp_path, start) == {
        **settings,
        "algo": f"{folder}/agents/main.py:A",
        "hook": [f"{folder}/hooks/main.py:f"],
    }
    assert sys.path.pop() == str(folder)
    assert code.with_copies({"algo": "ppo"}, tmp_path, start) == {"algo": "ppo"}
    for path in ("agents/main.py", "tensorboard.py"):
        (folder / path).write_text("changed")
        with pytest.raises(ValueError, match="are not as the run has written them"):
            code.with_copies(settings, tmp_path, start)
        (folder / path).write_text("a")


@pytest.mark.fast(1)
@pytest.mark.parametrize("algo", ["rank0rl.algos.ppo:PPO", "ppo"])
def test_a_folder_of_somebody_imports_nothing(algo, tmp_path, monkeypatch):
    """Its code was found once: where an agent of rank0rl was named as a module."""
    run = tmp_path / "run"
    train(run, "CartPole", "--algo", algo, *SIZE)
    copies = run / "code" / "start-1"
    (copies / "rank0rl" / "algos").mkdir(parents=True)
    for name in ("rank0rl/algos/ppo.py", "tensorboard.py", "sitecustomize.py"):
        (copies / name).write_text("raise SystemExit(99)")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "victim"))
    before = [*sys.path]
    load(run)
    assert sys.path == before
    resume(run, "--total-steps", "192")


def test_naming_code_does_not_import_a_copy_of_it(mine, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(run, *words(mine, "--stop-after-iterations", "2"))
    mine.rename(tmp_path / "moved")
    (run / "code" / "start-1" / "mine.py").write_text("raise SystemExit(99)")
    done = resume(run, *words(mine)[1:3], expect=2)
    assert "an_env" in done.stderr
    done = resume(run, "--trust", expect=2)
    assert "are not as the run has written them: put the files back" in done.stderr


def test_python_itself_is_not_of_a_run(tmp_path):
    own = tmp_path / "own.py"
    own.touch()
    assert code._is_own(own, {tmp_path})
    assert not code._is_own(Path(re.__file__).resolve(), {Path("/")})


def test_an_own_file_that_is_not_in_git_makes_the_commit_dirty(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
    script, own = tmp_path / "script.py", tmp_path / "own.py"
    script.touch()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    own.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    elsewhere = tmp_path.parent / "elsewhere.py"
    plain = machine.provenance([{"host": "a"}], [script, elsewhere])["commit"]
    assert re.fullmatch("[0-9a-f]{40}", plain)
    assert machine.provenance([{"host": "a"}], [elsewhere, own])["commit"] == f"{plain}-dirty"
    monkeypatch.setattr(sys, "argv", [sysconfig.get_path("scripts") + "/rank0rl"])
    assert machine.provenance([{"host": "a"}], [script])["commit"] == plain
