"""Runs that are limited to the instructions of older CPUs."""

import json
import os
import subprocess
import sys

import pytest
from helpers.ranks import HERE
from helpers.runs import SMALL, sha

from rank0rl.run import launch_options, machine, settings

MORE = ["--total-steps", "256", "--hidden", "64", "64"]


def train(folder, *args, expect=0, **env):
    command = [sys.executable, "train.py", *args, "--run-dir", str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_what_libraries_would_choose_does_not_matter(tmp_path):
    """Other types of CPU, as far as they can be had here: the libraries take it for one of them."""
    others = (
        {"OPENBLAS_CORETYPE": "Nehalem"},
        {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "default"},
    )
    for name, other in zip("ab", others, strict=True):
        train(tmp_path / name, *SMALL, *MORE, **other)
        start = settings.starts(tmp_path / name / "config.toml")[0]
        assert start["settings"]["cpu"] == "portable"
        assert "Haswell" in start["blas"]
    assert sha(tmp_path / "a") == sha(tmp_path / "b")
    replay = [sys.executable, "-m", "rank0rl", "replay", str(tmp_path / "a"), "--iteration", "2"]
    done = subprocess.run(
        [*replay, "--env", "0"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": "", "OPENBLAS_CORETYPE": "Nehalem"},
    )
    assert done.stdout.count("the same data") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_native_leaves_the_choice_to_the_libraries(tmp_path):
    train(tmp_path, *SMALL, *MORE, "--cpu", "native", OPENBLAS_CORETYPE="Nehalem")
    start = settings.starts(tmp_path / "config.toml")[0]
    assert start["settings"]["cpu"] == "native"
    assert "Nehalem" in start["blas"]
    portable = subprocess.run(
        [
            sys.executable,
            "-c",
            "from rank0rl.run.launch_options import limit_cpu\n"
            "limit_cpu('portable')\nfrom rank0rl.run import machine\nprint(machine.fingerprint())",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert machine.unlike(portable, start["fingerprint"])


@pytest.mark.slow
def test_a_resume_keeps_the_limit_also_from_a_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('env_id = "CartPole"\ncpu = "native"\nnum_envs = 4\nsteps_per_batch = 64\n')
    run = tmp_path / "run"
    train(
        run,
        "CartPole",
        "--config",
        str(file),
        "--total-steps",
        "128",
        "--stop-after-iterations",
        "1",
        OPENBLAS_CORETYPE="Nehalem",
    )
    done = subprocess.run(
        [sys.executable, "train.py", "--resume", str(run), "--nprocs", "2"],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        check=False,
        env={**os.environ, "OPENBLAS_CORETYPE": "Nehalem"},
    )
    assert done.returncode == 0, done.stderr
    assert "may differ" not in done.stdout
    starts = settings.starts(run / "config.toml")
    assert ["Nehalem" in start["blas"] for start in starts] == [True] * 2


@pytest.mark.parametrize(
    ("cpu", "said"),
    [("avx2", "cpu must be portable or native: got 'avx2'"), ("portable", "before NumPy")],
)
def test_a_wrong_limit(cpu, said, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setattr(sys, "argv", [""])  # as in a notebook
    with pytest.raises(ValueError, match=said):
        launch_options.limit_cpu(cpu)  # NumPy is loaded here
        launch_options.check_cpu(cpu)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_script_that_has_loaded_numpy_begins_anew(nprocs, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import numpy\nimport rank0rl.cli\nprint('begins')\nrank0rl.cli.main()\n")
    words = [
        str(script),
        *SMALL,
        *MORE,
        "--nprocs",
        str(nprocs),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    env = {name: x for name, x in os.environ.items() if name not in launch_options._PORTABLE}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.count("begins") == (2 if nprocs == 1 else 4)
    train(tmp_path / "other", *SMALL, *MORE)
    assert sha(tmp_path / "run") == sha(tmp_path / "other")


def fingerprint(code, **env):
    """Return the fingerprint of a process that runs this code first."""
    bare = {name: x for name, x in os.environ.items() if name not in launch_options._PORTABLE}
    code += "\nfrom rank0rl.run import machine\nprint(machine.fingerprint())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**bare, **env},
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_native_is_native_where_a_tool_has_chosen_portable():
    limit = "from rank0rl.run.launch_options import limit_cpu\nlimit_cpu({!r})"
    assert fingerprint(limit.format("native"), **launch_options._PORTABLE) == fingerprint("")
    assert fingerprint(limit.format("portable")) != fingerprint("")


def test_another_host_answers_with_what_training_would_compute():
    """ssh starts it without the variables of the host that asks."""
    bare = {name: x for name, x in os.environ.items() if name not in launch_options._PORTABLE}
    answer = subprocess.run(
        [sys.executable, "-m", "rank0rl.tools.doctor", "answer"],
        capture_output=True,
        text=True,
        check=True,
        env=bare,
        stdin=subprocess.DEVNULL,
    ).stdout
    assert json.loads(answer)["fingerprint"] == machine.fingerprint()


def test_a_script_begins_anew_once(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import os\nos.environ['MKL_CBWR'] = 'AVX2'\nimport numpy\nimport rank0rl.cli\n"
        "print('begins', flush=True)\nrank0rl.cli.main()\n"
    )
    words = [sys.executable, str(script), *SMALL, *MORE, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stdout.count("begins") == 2
    assert "must be known before NumPy is loaded" in done.stderr


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cli.main(['--help'])", 0),
        ("cli.main(['CartPole'])", 2),
        ("launch_options.limit_cpu_as(['runs'])", 0),
    ],
)
def test_a_cpu_without_avx2_may_ask_for_help_and_use_tools(call, code):
    lines = [
        "from rank0rl import cli",
        "from rank0rl.run import launch_options",
        "launch_options._has_avx2 = lambda: False",
        call,
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("needs a CPU with AVX2" in done.stderr) is bool(code)


def test_a_script_that_has_begun_mpi_is_refused(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import numpy\nfrom mpi4py import MPI\nimport rank0rl.cli\nrank0rl.cli.main()\n"
    )
    env = {name: x for name, x in os.environ.items() if name not in launch_options._PORTABLE}
    done = subprocess.run(
        [sys.executable, str(script), *SMALL, *MORE, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 2
    assert "must be known before NumPy is loaded" in done.stderr


def test_a_tool_reads_the_limit_of_the_first_run_that_a_word_names(tmp_path, monkeypatch):
    limited = []
    monkeypatch.setattr(launch_options, "limit_cpu", limited.append)
    (tmp_path / "config.toml").write_text('cpu = "native"\n')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "1.pt").touch()
    words = ["x" * 300, "--train=" + "y/" * 3000, str(tmp_path / "checkpoints" / "1.pt")]
    launch_options.limit_cpu_as(words)  # the first words can be no paths
    launch_options.limit_cpu_as(words[:2])
    assert limited == ["native", "portable"]
