"""rank0rl from Python: a script, a notebook, and what is refused."""

import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import types

import nbformat
import numpy as np
import pytest
from helpers.ranks import HERE, run
from helpers.runs import resume, table, train
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import rank0rl
from rank0rl import api

pytestmark = pytest.mark.usefixtures("forked_python")

SMALL = {"num_envs": 4, "steps_per_batch": 64, "minibatch_size": 32}
BOOK = HERE.parent / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    return rank0rl.train("CartPole", nprocs=2, total_steps=320, run_dir=folder, **SMALL)


@pytest.mark.slow
def test_the_run_is_that_of_the_command_line(small, tmp_path):
    words = ["--num-envs", "4", "--steps-per-batch", "64", "--minibatch-size", "32"]
    train(tmp_path / "r", "CartPole", "--total-steps", "320", *words)
    assert small.summary["weights_sha256"].startswith(table(tmp_path / "r")[-1]["weights_sha256"])
    assert small.settings["env_id"] == "CartPole-v1"
    assert rank0rl.Run(small.folder).summary == small.summary


@pytest.mark.slow
def test_the_record_is_a_frame_or_arrays(small, monkeypatch):
    frame = small.progress
    assert frame["steps"].tolist() == [64, 128, 192, 256, 320]
    monkeypatch.setitem(sys.modules, "pandas", None)
    arrays = small.progress
    assert list(arrays) == list(frame.columns)
    assert arrays["steps"].tolist() == [64, 128, 192, 256, 320]
    assert arrays["weights_sha256"].tolist() == frame["weights_sha256"].tolist()


@pytest.mark.slow
def test_a_figure_and_a_page(small):
    assert small.plot()._repr_png_().startswith(b"\x89PNG")
    assert small.report().read_text().startswith("<!DOCTYPE html>")


def test_a_policy_acts_on_one_observation_and_on_many(small):
    policy = rank0rl.load(small.folder)
    obs, _ = policy.make_env().reset(seed=0)
    one, many = policy(obs, deterministic=True), policy(np.stack([obs] * 5), deterministic=True)
    assert np.shape(one) == ()
    assert many.tolist() == [one] * 5
    assert {*policy(np.stack([obs] * 100)).tolist()} == {0, 1}
    assert rank0rl.load(small.folder)(obs) == rank0rl.load(small.folder)(obs)
    with pytest.raises(ValueError, match=r"must be of shape \(4,\).*: got ndarray \(3,\)"):
        policy(obs[:3])


@pytest.mark.slow
def test_a_policy_of_a_dict_space_with_masks_and_starts(tmp_path):
    options = {"env_kwargs": {"obs": "dict", "act": "discrete", "masked": True}, "total_steps": 64}
    made = rank0rl.train(
        "helpers.envs:Spaced-v0", run_dir=tmp_path / "r", quiet=True, **options, **SMALL
    )
    policy = made.policy(trust=True)
    obs = policy.observation_space.sample()
    assert policy(obs, mask=[False, True, False]) == 0  # choices begin with -1
    assert policy(obs, deterministic=True, mask=[True, False, False]) == -1


@pytest.mark.slow
def test_a_policy_with_a_memory_is_given_it(tmp_path):
    made = rank0rl.train(
        "CartPole", recurrent="gru", total_steps=64, run_dir=tmp_path / "r", **SMALL
    )
    policy = made.policy()
    obs = np.ones(4, np.float32)
    _act, memory = policy(obs)
    assert memory.shape == (64,)
    _, later = policy(obs, memory=memory)
    assert (later != memory).any()
    acts, memories = policy(np.stack([obs, obs]), memory=np.stack([memory, 0 * memory]))
    assert acts.shape == (2,)
    assert np.array_equal(memories, np.stack([later, memory]))


def test_episodes_are_those_of_the_tool(small, capsys):
    from rank0rl.tools.evaluate import main

    main([str(small.folder), "--episodes", "5", "--deterministic"])
    ended = rank0rl.evaluate(small, 5, deterministic=True)
    assert f"return {ended['return'].mean():.6g} " in capsys.readouterr().out
    assert len(ended["length"]) == 5


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gamma": 2.0}, "gamma must be in"),
        pytest.param({"gama": 0.9}, "--gama", marks=pytest.mark.slow),
        pytest.param({"nprocs": 40}, "num_envs=8, nprocs=40", marks=pytest.mark.slow),
        ({"algo": "pop"}, "no agent 'pop'"),
        (
            {"algo": type("Cell", (rank0rl.Agent,), {"__module__": "__none__"})},
            "%%writefile mine.py",
        ),
        (
            {"hook": type("Local", (rank0rl.Hook,), {"__qualname__": "f.Local"})},
            "inside another one",
        ),
    ],
)
def test_a_wrong_use_is_a_value_error(options, text, capfd):
    with pytest.raises(ValueError, match=re.escape(text)):
        rank0rl.train("CartPole", **options)
    assert capfd.readouterr().err == ""


SCRIPT = """
import rank0rl
from rank0rl import api
from rank0rl.algos.reinforce import Reinforce

class Mine(Reinforce):
    pass

class Stop(rank0rl.Hook):
    def after(self, agent, iteration, record):
        if iteration == 2:
            self.stop()

def main():
    return rank0rl.train(
        "CartPole", algo=Mine, nprocs=2, hook=Stop, num_envs=2, steps_per_batch=64, run_dir="r"
    )
"""


def script(tmp_path, end):
    (tmp_path / "script.py").write_text(SCRIPT + end)
    env = {"PYTHONPATH": str(HERE.parent)}
    return run([sys.executable, "script.py"], cwd=tmp_path, env=env)


@pytest.mark.slow
def test_an_agent_and_a_hook_of_the_script(tmp_path):
    done = script(tmp_path, "if __name__ == '__main__':\n    print(len(main().progress))\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"


@pytest.mark.slow
def test_a_script_that_trains_when_it_is_imported_is_told_so(tmp_path):
    done = script(tmp_path, "main()\n")
    assert done.returncode == 1
    assert "call it under" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_is_a_runtime_error(tmp_path):
    done = script(tmp_path, "Mine.act = None\nif __name__ == '__main__':\n    main()\n")
    assert "RuntimeError: training ended with exit code 1" in done.stderr


def cells(*texts):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])


def client(book, folder):
    return NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    )


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_notebook(tmp_path, nprocs):
    book = nbformat.read(BOOK, as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace("nprocs=2", f"nprocs={nprocs}")
        cell.source = cell.source.replace("40_000", "8_192").replace("=10,", "=2,")
    client(book, tmp_path).execute()
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert "run folder: runs/notebook" in outputs[0][0].text
    assert any("image/png" in output.get("data", {}) for output in outputs[2])
    train(tmp_path / "one", "CartPole", "--total-steps", "8192")
    sha256 = json.loads((tmp_path / "one" / "summary.json").read_text())["weights_sha256"]
    assert outputs[-1][-1].data["text/plain"] == repr(sha256)


@pytest.mark.slow
def test_a_notebook_that_is_interrupted_has_saved_its_run(tmp_path):
    book = cells(
        "import rank0rl\n"
        "rank0rl.train('CartPole', nprocs=2, num_envs=4, steps_per_batch=64, run_dir='r', total_steps=10**7)"
    )
    kernel = client(book, tmp_path)

    def interrupt():
        while not (tmp_path / "r" / "progress.csv").exists():
            time.sleep(0.1)
        time.sleep(1)
        os.kill(kernel.km.provisioner.process.pid, signal.SIGINT)  # as Jupyter does

    threading.Thread(target=interrupt).start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        kernel.execute()
    rows = len(table(tmp_path / "r"))
    assert rows > 0
    resume(tmp_path / "r", "--stop-after-iterations", str(rows + 1))
    assert len(table(tmp_path / "r")) == rows + 1


def test_a_mask_may_be_of_integers(small):
    policy = rank0rl.load(small.folder)
    obs = np.zeros((50, 4), np.float32)
    assert policy(obs, mask=np.tile(np.array([[0, 1]], np.int8), (50, 1))).tolist() == [1] * 50
    assert policy(obs[0], mask=np.array([1, 0], np.int8)) == 0


def test_loading_leaves_the_callers_random_numbers_alone(small):
    np.random.seed(1)
    expected = np.random.random(3)
    np.random.seed(1)
    rank0rl.load(small.folder)
    assert np.random.random(3).tolist() == expected.tolist()


def test_episodes_are_at_least_one(small):
    with pytest.raises(ValueError, match="episodes must be at least 1: got 0"):
        rank0rl.evaluate(small, 0)


@pytest.mark.slow
def test_many_choices_as_observations_are_many(tmp_path):
    made = rank0rl.train("FrozenLake", total_steps=64, run_dir=tmp_path / "r", quiet=True, **SMALL)
    policy = made.policy()
    each = [policy(i, deterministic=True) for i in range(16)]
    assert policy(np.arange(16), deterministic=True).tolist() == each
    assert policy(np.eye(16), deterministic=True).tolist() == each
    obs, _ = policy.make_env().reset()  # flattened
    assert policy(obs, deterministic=True) == each[0]
    assert [policy(row, deterministic=True) for row in np.eye(16, dtype=obs.dtype)] == each


def test_parts_of_observations_are_taken_as_in_training(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made = rank0rl.train(
        "helpers.envs:cartpole_keys", total_steps=64, run_dir=tmp_path / "r", quiet=True, **SMALL
    )
    policy, space = made.policy(True), made.policy(True).observation_space
    obs = {name: np.full(part.shape, 9.0) for name, part in space.items()}  # float64, out of bounds
    one = policy(obs, deterministic=True)
    assert policy([obs, obs], deterministic=True).tolist() == [one, one]
    with pytest.raises(ValueError, match="must be of shape"):
        policy({}, deterministic=True)


@pytest.mark.slow
def test_a_process_that_an_environment_leaves_behind_keeps_nobody_waiting(tmp_path):
    (tmp_path / "leaves.py").write_text(
        "import subprocess, gymnasium\n"
        "def make():\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    (tmp_path / "script.py").write_text(
        "import time, rank0rl, leaves\n"
        "if __name__ == '__main__':\n"
        "    rank0rl.train(leaves.make, num_envs=1, steps_per_batch=64, total_steps=64)\n"
    )
    start = time.monotonic()
    done = run([sys.executable, "script.py"], cwd=tmp_path, env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 50


def test_modules_below_pythons_own_folder_are_those_of_the_script_too(monkeypatch, tmp_path):
    """As with `python -m venv .`, or in /usr/src with the system's Python."""
    monkeypatch.setattr(api.sys, "prefix", str(tmp_path))
    packages = str(tmp_path / "lib" / "python3" / "site-packages")
    monkeypatch.setattr(api.sys, "path", [str(tmp_path), packages, sysconfig.get_path("stdlib")])
    assert api._environment()["PYTHONPATH"] == str(tmp_path)


@pytest.mark.slow
def test_an_exception_in_the_caller_ends_the_job(tmp_path):
    """A signal's handler raises while the ranks train, as that of a time limit does."""
    folder = tmp_path / "r"

    def late(signum, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, late)

    def raise_soon():
        while not (folder / "progress.csv").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=raise_soon).start()
    try:
        with pytest.raises(TimeoutError):
            rank0rl.train(
                "CartPole", nprocs=2, total_steps=10**7, run_dir=folder, quiet=True, **SMALL
            )
    finally:
        signal.signal(signal.SIGUSR1, before)
    rows = len(table(folder))
    time.sleep(1)
    assert len(table(folder)) == rows


def test_code_of_a_script_is_named_as_the_option_wants_it(monkeypatch):
    """Wrappers and environments by their module; with `python -m`, all that is in the script."""
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = "/x/mine.py", None
    monkeypatch.setitem(sys.modules, "__main__", main)
    mine = type("Mine", (), {"__module__": "__main__"})
    names = [api._name(option, mine) for option in ("wrappers", "env_id", "algo")]
    assert names == ["mine:Mine", "mine:Mine", "/x/mine.py:Mine"]
    main.__spec__ = types.SimpleNamespace(name="pkg.mine")
    assert {api._name(option, mine) for option in ("wrappers", "algo")} == {"pkg.mine:Mine"}
    main.__spec__ = types.SimpleNamespace(name="__main__")  # of a folder
    assert api._name("algo", mine) == "/x/mine.py:Mine"


def test_a_message_of_several_lines_is_whole(tmp_path, monkeypatch, capfd):
    (tmp_path / "bad.py").write_text("[][3]")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot import 'bad'.*\n(.*\n)*.*IndexError"):
        rank0rl.train("bad:make")
    assert capfd.readouterr().err == ""
