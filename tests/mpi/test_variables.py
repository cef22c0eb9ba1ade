"""Environment variables of a job on several hosts: what leaves this host, and what its ranks still have."""

import json
import os
import subprocess
import sys

import pytest
from helpers.ranks import HERE, run

from rank0rl.launch import fork, job, mpiexec
from rank0rl.launch.hosts import Host

OF_USERS = {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": "secret", "MY_1": "a b;'c'\n", "MY_2": "x"}


def test_names_are_those_of_the_list_and_those_that_the_user_adds():
    assert mpiexec._passed_variables(None, OF_USERS) == {"OMP_NUM_THREADS"}
    assert mpiexec._passed_variables("MY_1", OF_USERS) == {"OMP_NUM_THREADS", "MY_1"}
    assert mpiexec._passed_variables("MY_*, WANDB_API_KEY", OF_USERS) == {*OF_USERS}


def test_a_name_that_is_not_set_is_refused():
    with pytest.raises(ValueError, match=r"--pass-env.*'MY_3'"):
        mpiexec._passed_variables("MY_1,MY_3", OF_USERS)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_is_left_out_is_in_a_file_that_any_shell_reads(tmp_path, shell):
    env = {**OF_USERS, "PATH": os.environ["PATH"], "RANK0RL_JOB": "x", "UID": "0", "odd.name": "x"}
    of_all = mpiexec.keep_variables_here(env, {"MY_2"}, tmp_path / "environment")
    assert of_all == {
        name: env[name] for name in ("OMP_NUM_THREADS", "MY_2", "PATH", "RANK0RL_JOB")
    }
    script = f". {tmp_path}/environment && exec {sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    done = subprocess.run([shell, "-c", script], env=of_all, capture_output=True, check=True)
    seen = json.loads(done.stdout)
    assert {name: seen[name] for name in OF_USERS} == OF_USERS


def test_the_list_is_documented():
    page = (HERE.parent / "docs" / "several-machines.md").read_text()
    assert [name for name in mpiexec.PASSED_VARIABLES if f"`{name}`" not in page] == []


LAUNCHER = """#!/bin/sh
[ "$1" = --version ] && echo HYDRA && exit
env -0 > {folder}/launcher
shift 4  # -hosts HOSTS -n N
export PMI_SIZE=2
PMI_RANK=0 "$@" &
PMI_RANK=1 RANK0RL_JOB=/nowhere/${{RANK0RL_JOB##*/}} "$@" &
wait
"""
SCRIPT = """
import os, sys, rank0rl
if rank0rl.mpi_fork(hosts="localhost,elsewhere", mpiexec="{folder}/mpiexec", pass_env="MY_1") == "parent":
    sys.exit()
names = [name for name in {names} if name in os.environ]
open("{folder}/rank" + os.environ["PMI_RANK"], "w").write(" ".join(names))
"""


def test_a_launcher_that_starts_nothing_on_other_hosts_is_no_wrong_use(monkeypatch, tmp_path):
    monkeypatch.setenv(job.GROUP, "1")  # as mpi_fork does
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, text in (("ssh", "exec cat"), ("mpiexec", "echo HYDRA; echo no slots >&2; exit 9")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    two = [Host("localhost", 1), Host("elsewhere", 1)]
    launcher = mpiexec.Launcher([str(tmp_path / "mpiexec")], [sys.executable, "-c", ""])
    assert [fork._run_ranks(2, launcher, two[:k]) for k in (1, 2)] == [2, 1]


def test_the_launcher_and_other_hosts_see_no_more_than_the_list(tmp_path):
    """A launcher and an ssh of the test's own: the second rank does not see the job's folder."""
    (tmp_path / "mpiexec").write_text(LAUNCHER.format(folder=tmp_path))
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=tmp_path, names=sorted(OF_USERS)))
    for name in ("mpiexec", "ssh"):
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**OF_USERS, "PATH": path, "PYTHONPATH": str(HERE.parent)}
    done = run([sys.executable, str(tmp_path / "script.py")], env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").read_text() == "MY_1 MY_2 OMP_NUM_THREADS WANDB_API_KEY"
    assert (tmp_path / "rank1").read_text() == "MY_1 OMP_NUM_THREADS"
    assert b"secret" not in (tmp_path / "launcher").read_bytes()
