"""Folders of other people: what is written into them, what is read from them, and what tools import beside them."""

import os
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import forks
from helpers.runs import SMALL, curve, needs_onnx, sha, train

from rank0rl import start
from rank0rl.envs import demonstrations
from rank0rl.envs.make import make
from rank0rl.envs.spaces import describe
from rank0rl.launch import usage_error
from rank0rl.mpi import world
from rank0rl.options import OptionError
from rank0rl.run import checkpoint, files, folder, settings, trust
from rank0rl.run.launch_options import Words
from rank0rl.run.logger import check_rows
from rank0rl.tools import export, plot, report, sbatch, video
from rank0rl.tools.study import results, study, training


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "r"
    train(folder, *SMALL, "--hidden", "8", "--total-steps", "128", "--seed", "0")
    return folder


@pytest.fixture
def run(tmp_path, trained):
    """Copy a run, beside a file that nobody may change."""
    (tmp_path / "outside").write_text("mine")
    return shutil.copytree(trained, tmp_path / "r", symlinks=True)


def links(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent.parent / "outside")


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "name", ["report.html", "learning.png", "table.md", "table.csv", "runs.csv"]
)
def test_an_output_takes_the_place_of_a_link(run, name):
    study = run.parent
    study_file = study / "study.toml"
    study_file.write_text('envs = ["CartPole"]\n')
    run.rename(study / "CartPole-ppo-seed0")
    path = study / name
    path.symlink_to(study / "outside")
    results.write(study)
    assert (study / "outside").read_text() == "mine"
    assert not path.is_symlink()
    assert path.stat().st_size


def test_pages_and_pictures_of_a_run_take_the_place_of_a_link(run, capsys):
    for tool, path in ((report, run / "report.html"), (plot, run / "curve.png")):
        links(path)
        assert tool.main([str(run), "--out", str(path)]) == 0
        assert not path.is_symlink()
    assert (run.parent / "outside").read_text() == "mine"


def test_nothing_is_appended_through_a_link(tmp_path):
    (tmp_path / "outside").write_text("mine")
    for name in ("output.txt", "claim"):
        (tmp_path / "r").mkdir(exist_ok=True)
        links(tmp_path / "r" / name)
    with pytest.raises(OSError, match="symbolic"):
        files.append(tmp_path / "r" / "output.txt")
    with pytest.raises(OSError, match="symbolic"):
        training.claim(tmp_path / "r")
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_folder_with_a_link_is_not_trained_in(run):
    other = run.parent / "other"
    (run / "checkpoints").rename(other)
    (run / "checkpoints").symlink_to(other)
    kept = sorted(other.iterdir())
    with pytest.raises(ValueError, match="checkpoints is a link"):
        folder.lock(run, 0)
    done = forks.run("train.py", "--resume", str(run), "--total-steps", "256")
    assert done.returncode == 2
    assert "checkpoints is a link" in done.stderr
    assert sorted(other.iterdir()) == kept


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{'a.' * 60_000}a = 1", "more than 64 parts"),
        (f"x = {{{'a.' * 60_000}a = 1}}", "more than 64 parts"),
        (f"[{'a.' * 60_000}a]", "more than 64 parts"),
        ('"=".' * 30_000 + "a = 1", "more than 64 parts"),
        ("x = '''a'''''\n" + "'='." * 30_000 + "a = 1", "more than 64 parts"),
        ("\n".join(f"k{i}." + "a." * 55 + "a = 1" for i in range(30_000)), "squared parts"),
        (f"x = {('{' + 'a.' * 60 + 'a = ') * 40}1{'}' * 40}", "more than 64 levels"),
        (f"x = {'[' * 3000}{']' * 3000}", "not TOML"),
        ('env_id = "\\u001b[2J"', "control characters"),
        ('["\\u001b[2J"]', "control characters"),
        ("x = [[['\\u009b']]]".replace("'", '"'), "control characters"),
    ],
)
def test_a_small_file_takes_no_time_and_writes_to_no_terminal(tmp_path, text, said):
    (tmp_path / "config.toml").write_text(text)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=said) as error:
        files.read_toml(tmp_path / "config.toml", "config")
    assert time.monotonic() < begun + 5
    assert "\x1b" not in str(error.value)


def test_an_ordinary_file_is_read(tmp_path):
    (tmp_path / "c.toml").write_text(
        f"# {'.' * 100}\nd = '{'0.1 ' * 100}'\n"
        'a = [0.5, 1.5]\ntext = """two\nlines"""\n[[record]]\nb.c = 1\n'
    )
    found = files.read_toml(tmp_path / "c.toml", "config")
    assert found.pop("d").count(".") == 100
    assert found == {"a": [0.5, 1.5], "text": "two\nlines", "record": [{"b": {"c": 1}}]}


def test_a_run_whose_own_settings_could_not_be_read_again_does_not_begin(tmp_path):
    done = forks.run(
        "train.py", *SMALL, "--env-kwargs", 'x="\\u001b[2J"', "--run-dir", str(tmp_path)
    )
    assert done.returncode
    with pytest.raises(ValueError, match="control characters"):
        settings.write(tmp_path / "config.toml", {"env_id": "\x1b[2J"}, {})
    assert not (tmp_path / "config.toml").exists()


def test_the_version_of_an_mpi_ends_in_no_zero_byte(monkeypatch):
    """As Open MPI's does: a run's config.toml holds it."""
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Get_library_version", lambda: "Open MPI v5.0\tbuild\0")
    assert world._library() == "Open MPI v5.0 build"


def test_a_column_that_would_write_to_a_terminal_is_refused(tmp_path):
    (tmp_path / "progress.csv").write_text("iteration,\x1b[2J\n1,2\n")
    with pytest.raises(ValueError, match="no column of a run"):
        files.read_table(tmp_path / "progress.csv", "record")


def test_an_error_does_not_write_to_the_terminal(capsys):
    usage_error("no \x1b[2J é\nand more")
    assert capsys.readouterr().err == "error: no \\x1b[2J é\nand more\n"


@pytest.mark.parametrize("words", [["--time", "1\nrm x"], ["--", "python", "train.py", "a\nb"]])
def test_a_script_has_no_line_of_somebody_elses(words, capsys):
    command = words if "--" in words else [*words, "--", "python", "train.py", "Walker2d"]
    assert sbatch.main(command) == 2
    assert "control characters" in capsys.readouterr().err


def test_nor_from_the_name_of_its_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "a\nb").mkdir()
    monkeypatch.chdir(tmp_path / "a\nb")
    assert sbatch.main(["--", "python", "train.py", "Walker2d"]) == 2
    assert "control characters" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["verify", "study", "check"])
@pytest.mark.slow
def test_tools_import_nothing_from_the_working_folder_before_the_library(run, tool):
    """A file there that is called as one of the standard library's would be imported by the processes of a tool."""
    where = run.parent
    (where / "tomllib.py").write_text("open('ran', 'w')")
    words = {
        "verify": ["r", "--rows", "1"],
        "study": ["CartPole", "--seeds", "0:1", *SMALL[1:], "--total-steps", "64", "--out", "s"],
        "check": ["CartPole", "--algo", "reinforce"],
    }[tool]
    command = [sys.executable, "-P", "-m", "rank0rl", tool, *words]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (where / "ran").exists()


OPTIONAL = (
    "org cuda pynvml torchcomms dill jax triton latex"  # what libraries look for, and do without
)


@pytest.mark.parametrize("tool", ["report", "plot", "evaluate", "export", "doctor"])
@pytest.mark.slow
def test_libraries_find_nothing_in_the_working_folder(run, tool):
    """They look for modules that are not installed, entry points of plugins, and files of settings."""
    where = run.parent
    ran = f"open({str(where / 'ran')!r}, 'w')"
    for name in (*OPTIONAL.split(), "plugin", "pickle"):
        (where / f"{name}.py").write_text(ran)
    plugin = where / "plugin-1.0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    points = "[torch.backends]\np = plugin:f\n[gymnasium.envs]\np = plugin:f\n"
    (plugin / "entry_points.txt").write_text(points)
    (where / "matplotlibrc").write_text("text.usetex: True\n")
    words = {"doctor": [], "evaluate": ["r", "--episodes", "1"]}.get(tool, ["r"])
    command = [str(Path(sys.executable).parent / "rank0rl"), tool, *words]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (where / "ran").exists()


def test_drawing_without_a_display_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "mujoco").mkdir()
    (tmp_path / "mujoco" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    video._do_without_display.__wrapped__()
    os.environ.pop("MUJOCO_GL", None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_an_export_takes_the_place_of_a_link(run, kind, capsys):
    if kind == "onnx":
        needs_onnx()
    path = run.parent / f"policy.{kind}"
    path.symlink_to(run.parent / "outside")
    assert export.main([str(run), "--out", str(path)]) == 0
    assert (run.parent / "outside").read_text() == "mine"
    assert path.stat().st_size > 1000


def test_a_study_of_someone_else_stays_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    file = tmp_path / "theirs" / "x.toml"
    monkeypatch.chdir(tmp_path / "theirs")
    for out, is_ok in (("mine", True), ("../elsewhere", False), (str(tmp_path / "other"), False)):
        file.write_text(f'envs = ["CartPole"]\nout = "{out}"\n')
        if is_ok:
            study._read([str(file)])
            continue
        with pytest.raises(ValueError, match="a folder elsewhere"):
            study._read([str(file)])
        study._read([str(file), "--trust"])


def test_names_do_not_pretend_to_be_lines(run, capsys):
    odd = run.parent / "runs" / "\x1b[2Jevil\nerror: fake"
    odd.mkdir(parents=True)
    (odd / "progress.csv").write_text("iteration\n")
    run.rename(odd.parent / "r")
    out = run.parent / "a\nb.png"
    assert plot.main([str(odd), str(odd.parent / "r"), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out.splitlines()[-1].endswith(r"a\nb.png")


def test_rows_reach_the_disk_before_a_checkpoint_does(tmp_path, monkeypatch):
    """A power cut keeps what was synced alone. So at each rename of a checkpoint, its rows have been."""
    synced, rows = [], []
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(number):
        synced.append(os.path.realpath(f"/proc/self/fd/{number}"))
        real_sync(number)

    def replace(path, target):
        if path.parent.name == "checkpoints" and int(target.stem):  # the first one has no rows
            rows.append(
                str(tmp_path / "r" / "progress.csv") in synced and str(tmp_path / "r") in synced
            )
            synced.clear()
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    words = [*SMALL, "--hidden", "8", "--total-steps", "192", "--checkpoint-every", "1", "--quiet"]
    words += ["--run-dir", str(tmp_path / "r")]
    assert start.start(Words.read(words), None, lambda _: None, lambda *_: []) == 0
    assert rows == [True, True, True]


@pytest.mark.fast(1)
@pytest.mark.parametrize("lost", ["all that follows", "zeros"])
def test_a_run_goes_on_from_the_newest_checkpoint_whose_rows_are_there(tmp_path, lost):
    args = [*SMALL, "--hidden", "8", "--total-steps", "384", "--checkpoint-every", "1"]
    args += ["--keep-checkpoints", "spread:9"]
    train(tmp_path / "whole", *args)
    train(tmp_path / "r", *args, "--stop-after-iterations", "4")
    table = tmp_path / "r" / "progress.csv"
    lines = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(lines[:4]) + (b"" if lost == "all that follows" else bytes(99)))
    done = forks.run("train.py", "--resume", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "progress.csv has lost rows: going on from" in done.stderr
    assert curve(tmp_path / "r") == curve(tmp_path / "whole")
    assert sha(tmp_path / "r") == sha(tmp_path / "whole")
    table.write_bytes(lines[0])
    done = forks.run("train.py", "--resume", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "must have the rows up to iteration 6" in done.stderr
    assert "--shorter-record" in done.stderr
    assert len([*(tmp_path / "r").glob("checkpoints/*.pt")]) == 7


@pytest.mark.parametrize("kept", [None, 0, 1, 2])
@pytest.mark.slow
def test_a_run_without_its_rows_goes_on_with_a_shorter_record(tmp_path, kept):
    """Its curve is the same from there on, and it can be resumed and verified as any other."""
    args = [*SMALL, "--hidden", "8", "--total-steps", "384", "--checkpoint-every", "1"]
    train(tmp_path / "whole", *args)
    folder = tmp_path / "r"
    train(folder, *args, "--stop-after-iterations", "4", "--keep-checkpoints", "1")
    table = folder / "progress.csv"
    if kept is None:
        table.unlink()
    else:
        table.write_bytes(b"".join(table.read_bytes().splitlines(keepends=True)[:kept]))
    on = ["--resume", str(folder)]
    done = forks.run("train.py", *on, "--shorter-record", "--stop-after-iterations", "5")
    assert done.returncode == 0, done.stderr
    assert "lost rows: going on from" in done.stderr
    assert [row["iteration"] for row in curve(folder)] == (["1", "5"] if kept == 2 else ["5"])
    assert forks.run("train.py", *on).returncode == 0
    assert curve(folder)[-2:] == curve(tmp_path / "whole")[-2:]
    assert sha(folder) == sha(tmp_path / "whole")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["summary.json", "progress.csv", "config.toml"])
def test_a_folder_whose_files_are_none_is_not_trained_in(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ValueError, match="not a regular file"):
        folder.lock(tmp_path, 0)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda saved: saved["progress"].update(iteration=3),
            "of the iteration in its name: got 3",
        ),
        (lambda saved: saved["progress"].update(steps=10**400), r"steps must be in \[0, 2\*\*63\)"),
        (lambda saved: saved["settings"].update(gamma=10**400), "gamma must be at most"),
        (lambda saved: saved["collector"].update(settings={1: "["}), "Expecting value"),
        (lambda saved: saved["collector"].update(settings={1: "{}"}), "settings that are not in"),
        (
            lambda saved: saved["settings"].update(info=["x"] * 100_000),
            "at most 131,072 characters",
        ),
    ],
)
def test_a_state_that_cannot_be_is_one_line(run, change, said, capsys):
    path = checkpoint.latest(run)
    saved = checkpoint.read(path)
    change(saved)
    checkpoint.write(path, saved)
    done = forks.run("train.py", "--resume", str(run), "--total-steps", "256")
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1
    assert re.search(said, done.stderr)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iteration,steps\n" + "\n" * (1 << 21), "lines"),
        ("iteration,steps\n" + "1,\n" * (1 << 21), "lines"),
        ("a,\n" + "," * (1 << 25), "commas"),
    ],
)
def test_a_record_of_line_breaks_is_refused_at_once(tmp_path, text, said):
    path = tmp_path / "progress.csv"
    path.write_text(text)
    tracemalloc.start()
    for read in (folder.read_rows, lambda of: check_rows(of, 1, "")):
        with pytest.raises(ValueError, match=rf"expected at most .* {said}"):
            read(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    tracemalloc.stop()


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", [60_000, 60_000]),
        ("value_hidden", [60_000, 60_000]),
        ("hidden", [1] * 20_000),
        ("memory_size", 60_000),
        ("hidden", ["a", "b"]),
        ("num_envs", 10**9),
        ("num_envs", "4"),
    ],
)
def test_settings_of_more_than_a_checkpoint_holds_are_refused(run, name, value):
    path = checkpoint.latest(run)
    state = checkpoint.read(path)
    checkpoint.write(path, {**state, "settings": {**state["settings"], name: value}})
    with pytest.raises(ValueError, match="must hold|does not hold|holds no run"):
        settings.read_saved(path)


@pytest.mark.parametrize(
    "change",
    [
        {"wrappers": ["FrameStackObservation(stack_size=200000000)"]},
        {"wrappers": ["FrameStackObservation(stack_size=2e8)"]},
        {"wrappers": ["ResizeObservation(shape=(100000, 100000))"]},
        {"wrappers": ["FrameStackObservation(stack_size=200)"] * 2},
        {"wrappers": ["TimeLimit(max_episode_steps=-1)"]},
        {"wrappers": ["TimeLimit(max_episode_steps=1e400)"]},
        {"env_kwargs": {"max_episode_steps": -1}},
        {"env_kwargs": {"max_episode_steps": 10**9}},
        {"env_kwargs": {"frame_skip": 10**9}},
        {"env_kwargs": {"map": {"sizes": [5, 10**9]}}},
    ],
    ids=str,
)
def test_arguments_that_ask_for_much_need_trust(change):
    asked = {"env_id": "Pendulum-v1", **change}
    with pytest.raises(ValueError, match="numbers above 10,000"):
        trust.trusted(asked, "its file")
    assert trust.trusted(asked, "its file", trust=True) == asked


def test_ordinary_arguments_need_none():
    asked = {
        "env_id": "Walker2d-v5",
        "wrappers": ["FrameStackObservation(stack_size=4)", "TimeLimit(max_episode_steps=9000)"],
        "env_kwargs": {
            "healthy_z_range": [0.5, float("inf")],
            "max_episode_steps": 500,
            "terminate_when_unhealthy": False,
            "reset_noise_scale": 1e-3,
        },
    }
    assert trust.trusted(asked, "its file") == asked


@pytest.mark.slow
def test_a_small_file_of_many_arrays_is_refused(tmp_path):
    spaces = describe(make("CartPole-v1"))
    obs, act = np.zeros((1 << 26, 4), np.float32), np.zeros(1, np.int64)
    np.savez_compressed(tmp_path / "d.npz", obs=obs, act=act)
    assert (tmp_path / "d.npz").stat().st_size < 1 << 21
    tracemalloc.start()
    with pytest.raises(OptionError, match="expected at most"):
        demonstrations.read(str(tmp_path / "d.npz"), spaces)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
