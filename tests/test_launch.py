"""Start n ranks of this very command, and supervise them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from on_ranks import HERE, mpiexec, run

from rank0rl import launch

RECIPE = [sys.executable, str(HERE / "recipe.py")]


def recipe(*args, **kwargs):
    return run([*RECIPE, *args], env={"PYTHONPATH": str(HERE.parent)}, **kwargs)


def test_one_rank_is_the_child_itself():
    assert launch.mpi_fork(1) == "child"
    done = recipe("--nprocs", "1")
    assert (done.returncode, done.stdout) == (0, "rows 2 weights [0.0] ''\n")


def test_the_recipe_on_three_ranks(tmp_path):
    done = recipe("--nprocs", "3", "--text", "a b 'c'", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gathered, parent = done.stdout.splitlines()
    assert gathered == f"""rows 6 weights [12.0] {"a b 'c'"!r}"""
    assert parent == "parent [] []"  # the supervisor imports neither numpy, torch nor mpi4py


def test_a_failed_job_gives_its_exit_code_and_no_parent():
    done = recipe("--nprocs", "2", "--end", "code")
    assert done.returncode == 3
    assert "job failed with 3" in done.stdout
    assert "parent" not in done.stdout


def test_an_exception_on_one_rank_ends_the_job():
    done = recipe("--nprocs", "3", "--end", "raise", limit_s=30)
    assert done.returncode == 1
    assert "rank 1 of 3 failed" in done.stderr
    assert "KeyError: 'on purpose'" in done.stderr


def test_inside_a_job_nothing_is_started():
    done = run([mpiexec(), "-n", "2", *RECIPE], env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rows 4 weights [4.0] ''\n"


def test_another_number_than_the_launchers_is_an_error():
    command = [mpiexec(), "-n", "2", *RECIPE, "--nprocs", "4"]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)})
    assert done.returncode != 0
    assert "got nprocs=4 in a job of 2" in done.stderr


def test_ranks_that_mpi_does_not_see_are_no_job():
    """As when mpiexec belongs to another MPI than mpi4py: every process is rank 0 of 1."""
    code = "from rank0rl import comm; comm.world()"
    done = run([sys.executable, "-c", code], env={"OMPI_COMM_WORLD_SIZE": "2"})
    assert done.returncode == 1
    assert "MPI sees 1" in done.stderr


def test_two_signals_end_a_job_that_hangs():
    process = subprocess.Popen(
        [*RECIPE, "--nprocs", "2", "--end", "hang"],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(6)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM, out


def test_no_mpiexec_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(launch.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit) as end:
        launch.run_ranks(2)
    assert end.value.code == 2
    assert "pip install mpi4py mpich" in capsys.readouterr().err


def test_no_command_line_to_repeat():
    code = "import rank0rl; rank0rl.mpi_fork(2)"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 2
    assert "put it into a script" in done.stderr


def test_no_ranks_are_one():
    assert launch.mpi_fork(0) == "child"


EARLY = """
import sys, rank0rl
if "parent" == rank0rl.mpi_fork(2): sys.exit()
from rank0rl import launch
if launch.world_rank() == 1: raise KeyError("before MPI")
rank0rl.rank0_accum_batches({})
"""


def test_an_exception_before_the_first_collective_ends_the_job(tmp_path):
    """Rank 0 waits for rank 1 in MPI's own start; nobody there notices that rank 1 has gone."""
    (tmp_path / "early.py").write_text(EARLY)
    command = [sys.executable, str(tmp_path / "early.py")]
    done = run(command, env={"PYTHONPATH": str(HERE.parent)}, limit_s=40)
    assert done.returncode == 1
    assert "KeyError: 'before MPI'" in done.stderr


def alive(token):
    """Processes whose environment holds the token."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_supervisor(signum):
    token = f"RANK0RL_TEST={uuid.uuid4()}"
    name, _, value = token.partition("=")
    process = subprocess.Popen(
        [*RECIPE, "--nprocs", "2", "--end", "hang"],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 30
    while len(alive(token)) < 4:  # supervisor, mpiexec, two ranks
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signum)
    process.wait(timeout=30)
    end = time.monotonic() + 12
    while alive(token):
        assert time.monotonic() < end, "ranks are still there"
        time.sleep(0.1)
