"""Signals of a batch system, which come to any or to all processes of a job."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import end, folder_of, processes, start, wait_until
from helpers.ranks import HERE
from helpers.ranks import mpiexec as find_mpiexec
from helpers.runs import SMALL, table, wait_for_rows

from rank0rl.launch import job, mpiexec

ARGS = [*SMALL, "--algo", f"{HERE}/helpers/agents.py:SlowPPO", "--total-steps", "64000"]


def preempted(folder, signum, whom, *args):
    """Send a signal to processes of a job of three ranks; return its exit code and its output."""
    args = [*ARGS, "--checkpoint-every", "1000", "--max-restarts", "1", *args]
    process, token = start("train.py", *args, "--nprocs", "3", "--run-dir", str(folder))
    wait_for_rows(process, folder, 3)
    for process_id in whom(process, token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signum)
    began = time.monotonic()
    out, err = end(process, token)
    assert time.monotonic() - began < 8, "the supervisor had to end rank 0"
    saved = json.loads((folder / "summary.json").read_text())["iterations"]
    assert saved == len(table(folder)) >= 3
    assert f"{signal.Signals(signum).name}: saved iteration {saved}; go on with" in out
    return process.returncode, err


def rank(number):
    return lambda _, token: [int((folder_of(token) / f"rank.{number}").read_text())]


def each_process(_, token):
    return processes(token)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("whom", "signum"),
    [
        (rank(2), signal.SIGUSR1),
        (each_process, signal.SIGTERM),
        pytest.param(rank(0), signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(rank(1), signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(each_process, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(lambda process, _: [process.pid], signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_process_saves_and_ends_the_job(whom, signum, tmp_path):
    """Without a restart, and with an exit code that tells a script to begin the job again."""
    assert preempted(tmp_path / "r", signum, whom) == (128 + signum, "")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_environments_in_processes_outlast_the_signal(signum, tmp_path):
    code, err = preempted(tmp_path / "r", signum, each_process, "--env-processes")
    assert (code, err) == (128 + signum, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 0])
def test_ranks_without_a_supervisor_end_together_with_the_code(number, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        f"import os, sys\nos.execv({find_mpiexec()!r}, [{find_mpiexec()!r}, '-n', '3', {sys.executable!r}, *sys.argv[1:]])"
    )
    args = ["train.py", *ARGS, "--checkpoint-every", "1000", "--run-dir", str(tmp_path / "r")]
    process, token = start(str(script), *args)
    wait_for_rows(process, tmp_path / "r", 3)
    os.kill(rank_of(token, number), signal.SIGUSR1)
    out, err = end(process, token, patience_s=5.0)  # the launcher does not wait for those it kills
    assert process.returncode == 128 + signal.SIGUSR1, err
    assert "SIGUSR1: saved iteration" in out


def rank_of(token, number):
    """Return the process id of a rank of a launcher's."""
    for process_id in processes(token):
        variables = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
        if {f"PMI_RANK={number}".encode(), f"OMPI_COMM_WORLD_RANK={number}".encode()} & {
            *variables
        }:
            return process_id
    raise AssertionError(f"no rank {number}")


def test_the_shell_around_a_rank_outlasts_the_signals(tmp_path):
    job.create(tmp_path, 1)
    command = ["sh", "-c", mpiexec._SHELL, "sh", "sh", "-c", "sleep 1; exit 7"]
    env = {**os.environ, job.FOLDER: str(tmp_path), "PMI_RANK": "0"}
    shell = subprocess.Popen(command, env=env)
    try:
        about = tmp_path / "shell.0"
        wait_until(lambda: about.exists() and len(about.read_text().split()) == 4)
        for signum in job.END_SIGNALS:
            shell.send_signal(signum)
        status = tmp_path / "status.0"
        wait_until(lambda: status.exists() and status.read_text() == "7\n")
    finally:
        shell.kill()
        shell.wait()


@pytest.mark.slow
def test_the_launcher_is_not_reached_by_the_signals(tmp_path):
    seen = []

    def launcher_of(process, token):
        status = Path(f"/proc/{(folder_of(token) / 'launcher').read_text()}/status").read_text()
        seen.append(int(status.partition("SigBlk:")[2].split()[0], 16))
        return [process.pid]

    preempted(tmp_path / "r", signal.SIGTERM, launcher_of)
    assert all(seen[0] >> (signum - 1) & 1 for signum in job.END_SIGNALS)
