"""Damaged and forged files of a run: one line that says what is wrong, or the right curve. No code of theirs runs.

All is done in this process, under an audit hook, with the function that --resume calls.
"""

import contextlib
import io
import os
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from helpers.runs import curve, sha

from rank0rl import start
from rank0rl.mpi import comm
from rank0rl.run import checkpoint, machine
from rank0rl.run.agents import load_agent
from rank0rl.run.launch_options import Words
from rank0rl.tools import evaluate, replay

SMALL = ["CartPole", "--num-envs", "2", "--steps-per-batch", "16", "--minibatch-size", "8"]
SMALL += ["--hidden", "8", "--total-steps", "64", "--keep-checkpoints", "1", "--quiet"]
ENDS = ("os.", "subprocess.", "pty.", "socket.connect", "ctypes.dlopen")
HARMLESS = {"os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.truncate"}
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"

watched = []  # sets of what is seen now


def watch(event, args):
    """Note what would be code of a file: a module, code that is executed, a process, a connection."""
    for seen in watched or ():  # None at the end of Python
        if event == "import":
            seen.add(("import", args[0]))
        elif event == "exec":
            seen.add(("exec", args[0].co_filename))
        elif event.startswith(ENDS) and event not in HARMLESS:
            seen.add((event, str(args)))


@contextlib.contextmanager
def watching():
    """Give the set of what is seen until the end."""
    watched.append(set())
    try:
        yield watched[-1]
    finally:
        watched.pop()


class Ended(BaseException):
    """The job has been ended."""


def resume(folder, *args):
    """Resume a run; return the exit code, what was said, and what was seen."""
    said, argv = io.StringIO(), ["--resume", str(folder), "--quiet", *args]
    with watching() as seen, contextlib.redirect_stderr(said):
        try:
            code = start.start(Words.read(argv), None, lambda options: None, lambda *options: [])
        except Ended as end:
            code = end.args[0]
    return code, said.getvalue(), seen


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that was stopped, the same run to its end, and what resuming it imports."""
    patch = pytest.MonkeyPatch()

    def abort(code):
        raise Ended(code)

    patch.setattr(comm, "abort", abort)
    patch.setattr(machine, "_commit", lambda _: "unknown")  # starts git
    folder = tmp_path_factory.mktemp("hostile")
    patch.chdir(folder)
    for name in ("evil.py", "algos/__init__.py", "algos/ppo.py", "algos/evil.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(EVIL)
    patch.syspath_prepend(str(folder))  # as the folder of python -m rank0rl is
    stopped, whole = folder / "stopped", folder / "whole"
    argv = [*SMALL, "--stop-after-iterations", "2", "--run-dir", str(stopped)]
    assert start.start(Words.read(argv), None, lambda options: None, lambda *options: []) == 0
    load_agent("cem")  # which some settings name
    sys.addaudithook(watch)
    usual = set()
    for _ in range(2):  # what is imported once is not imported again
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(stopped, whole)
        code, _, usual = resume(whole)
        assert code == 0
    yield stopped, whole, usual
    patch.undo()


def flip(data, rng):
    """Flip one to three bits."""
    data = bytearray(data)
    for bit in rng.integers(0, 8 * len(data), rng.integers(1, 4)):
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def cut(data, rng):
    return data[: rng.integers(0, len(data))]


def refill(data, rng):
    """Overwrite a part with other bytes, or with zeros as after a crash."""
    at, length = rng.integers(0, len(data)), rng.integers(1, 200)
    new = bytes(length) if rng.random() < 0.5 else rng.bytes(length)
    return data[:at] + new + data[at + length :]


def swap_lines(data, rng):
    lines = data.splitlines(keepends=True)
    i, j = rng.integers(0, len(lines), 2)
    lines[i] = lines[j]
    return b"".join(lines)


DAMAGES = [flip, flip, cut, refill, swap_lines]
NAMES = ["checkpoint", "progress.csv", "config.toml"]

# Each lets code run where it is believed: a command, or a file of the working folder.
CODE = [
    {"env_id": "os:system", "env_kwargs": {"command": "touch ran"}},
    {"env_id": "subprocess:run", "env_kwargs": {"args": ["touch", "ran"]}},
    {"env_id": "evil:Evil-v0"},
    {
        "env_id": "rank0rl.launch.fork:mpi_fork",
        "env_kwargs": {"n": 1, "launcher": ["touch", "ran"]},
    },
    {"algo": "evil.py"},
    {"algo": "evil:PPO"},
    {"algo": "evil"},
    {"algo": "rank0rl.algos.evil:PPO"},
    {"algo": str(Path("evil.py:PPO"))},
    {"wrappers": ["os:system"]},
    {"wrappers": ["evil:Wrapper(x=1)"]},
    {"wrappers": ["RecordVideo(video_folder='ran')"]},
    {"env_id": "os:system", "seal": "0" * 64},
    {"algo": "evil.py", "trust": True},
]
WRONG = [
    {"env_id": 5},
    {"env_id": "NoSuch-v0"},
    {"env_id": "MountainCar-v0"},
    {"env_kwargs": {"env_id": "os:system"}},
    {"env_kwargs": {5: "x"}},
    {"env_kwargs": {"id": "os:system"}},
    {"env_kwargs": []},
    {"wrappers": "os:system"},
    {"wrappers": ["vector"]},
    {"wrappers": ["TimeLimit(max_episode_steps=__import__('os').system('touch ran'))"]},
    {"wrappers": ["FlattenObservation(" + "(" * 500]},
    {"algo": "cem"},
    {"algo": None},
    {"algo": "\0.py"},
    {"num_envs": 0},
    {"num_envs": 4},
    {"num_envs": "2"},
    {"hidden": [16]},
    {"hidden": [10**9, 10**9]},
    {"hidden": 8},
    {"steps_per_batch": 15},
    {"gamma": float("nan")},
    {"gamma": "1"},
    {"device": "cpu; touch ran"},
    {"no_such": 1},
    {"run_dir": "/"},
    {5: 5},
]


def forge(path, change):
    """Change a checkpoint's settings, as somebody does who can compute a SHA-256."""
    state = checkpoint.read(path)
    settings = change if not isinstance(change, dict) else {**state["settings"], **change}
    checkpoint.write(path, {**state, "settings": settings})


def check(folder, whole, usual, what):
    code, said, found = resume(folder)
    assert found <= usual, (what, found - usual)
    assert not Path("ran").exists(), what
    if code:
        assert code in (1, 2), (what, said)
        assert said.startswith("error: "), (what, said)
        assert len(said.splitlines()) == 1, (what, said)
        return "refused"
    assert sha(folder) == sha(whole), what
    assert curve(folder) == curve(whole), what
    return "right"


def damaged(run, tmp_path, seeds):
    """Damage a file for each seed; return how many were refused, and how many gave the right curve."""
    stopped, whole, usual = run
    ends = {"refused": 0, "right": 0}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        name, damage = NAMES[seed % 3], DAMAGES[seed // 3 % len(DAMAGES)]
        folder = tmp_path / str(seed)
        shutil.copytree(stopped, folder)
        path = checkpoint.latest(folder) if name == "checkpoint" else folder / name
        path.write_bytes(damage(path.read_bytes(), rng))
        ends[check(folder, whole, usual, f"seed {seed}: {damage.__name__} of {name}")] += 1
        shutil.rmtree(folder)
    return ends


def test_damaged_files_are_refused_or_give_the_right_curve(run, tmp_path):
    ends = damaged(run, tmp_path, range(9))
    assert ends["refused"] > 0


@pytest.mark.slow
def test_500_damaged_files_are_refused_or_give_the_right_curve(run, tmp_path):
    ends = damaged(run, tmp_path, range(500))
    print(ends)
    assert ends["refused"] > 250


@pytest.mark.parametrize("change", CODE, ids=str)
def test_forged_settings_run_nothing(run, tmp_path, change, capsys):
    stopped, whole, usual = run
    folder = tmp_path / "r"
    shutil.copytree(stopped, folder)
    forge(checkpoint.latest(folder), change)
    assert check(folder, whole, usual, change) == "refused"
    toml = tomllib.loads((stopped / "config.toml").read_text())
    (folder / "config.toml").write_text(tomli_w.dumps({**toml, **change}))
    argv = ["--config", str(folder / "config.toml"), "--run-dir", str(tmp_path / "new")]
    with watching() as seen:
        assert start.start(Words.read(argv), None, lambda options: None, lambda *options: []) == 2
        assert evaluate.main([str(folder)]) == 2
        assert replay.main([str(folder), "--iteration", "1", "--env", "0"]) == 2
    assert {name for kind, name in seen - usual if kind != "import"} <= {"<string>"}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert all(line.startswith("error: ") for line in said)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("change", "event"),
    [
        ({"env_id": "os:system", "env_kwargs": {"command": "touch ran"}}, "os.system"),
        ({"algo": "evil.py"}, "exec"),
    ],
)
def test_what_runs_is_seen(run, tmp_path, change, event):
    shutil.copytree(run[0], tmp_path / "r")
    forge(checkpoint.latest(tmp_path / "r"), change)
    code, _, seen = resume(tmp_path / "r", "--trust")
    assert code
    assert event in {name for name, _ in seen - run[2]}
    Path("ran").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("change", [*WRONG, 5, [], "x"], ids=lambda change: repr(change)[:40])
def test_wrong_settings_are_one_line(run, tmp_path, change):
    stopped, whole, usual = run
    shutil.copytree(stopped, tmp_path / "r")
    forge(checkpoint.latest(tmp_path / "r"), change)
    assert check(tmp_path / "r", whole, usual, change) == "refused"


@pytest.mark.parametrize("name", ["progress.csv", "config.toml"])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\xff\xfe", b"[[[", b"record = 5\n", "a FIFO", "nothing"]
)
def test_a_resume_on_a_damaged_record_is_one_line(run, tmp_path, name, content):
    stopped, whole, usual = run
    path = tmp_path / "r" / name
    shutil.copytree(stopped, tmp_path / "r")
    path.unlink()
    if content == "a FIFO":
        os.mkfifo(path)
    elif content != "nothing":
        path.write_bytes(content)
    end = check(tmp_path / "r", whole, usual, content)
    assert end == ("right" if (name, content) == ("config.toml", "nothing") else "refused")
