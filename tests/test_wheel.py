"""The wheel is the whole program: it trains from an empty folder, with nothing of the checkout."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from helpers.ranks import HERE, LIMIT_S

from rank0rl import __version__

ROOT = HERE.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because setuptools leaves files where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    kept = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "tests", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=kept)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*command, source], check=True, timeout=LIMIT_S)
    (built,) = folder.glob("rank0rl-*.whl")
    return built


def use(python, folder, env=None):
    """Train, resume, evaluate, export and report, in an empty folder."""

    def run(*words):
        command = [python, "-m", "rank0rl", *words]
        env_of = {**os.environ, **(env or {})}
        done = subprocess.run(
            command,
            cwd=folder,
            env=env_of,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    folder.mkdir()
    small = ["--steps-per-batch", "128", "--num-envs", "4", "--minibatch-size", "64"]
    said = run(
        "train", "CartPole", "--nprocs", "2", "--total-steps", "256", "--run-dir", "r", *small
    )
    assert str(ROOT) not in said
    assert "settings: " in said
    assert "configs/ppo.toml" in said
    assert "has ended" in run("train", "--resume", "r")
    assert "3 episodes with actions drawn at random: return" in run(
        "evaluate", "r", "--episodes", "3"
    )
    run("export", "r", "--out", "policy.pt2")
    run("report", "r")
    assert {"r", "policy.pt2"} == {path.name for path in folder.iterdir()}
    assert (folder / "r" / "report.html").exists()


def test_the_citation_and_the_changelog_have_this_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_it_needs_nothing_of_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    use(sys.executable, tmp_path / "empty", {"PYTHONPATH": str(site)})


@pytest.mark.slow
def test_it_is_installed_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, f"{wheel}[mpi,plot]"], check=True, timeout=900)
    use(python, tmp_path / "empty")
    command = [tmp_path / "venv" / "bin" / "rank0rl", "train", "CartPole", "--total-steps", "64"]
    more = ["--run-dir", "s", "--num-envs", "2", "--steps-per-batch", "64"]
    done = subprocess.run(
        [*command, *more], cwd=tmp_path / "empty", capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
