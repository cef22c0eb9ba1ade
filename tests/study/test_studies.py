"""Studies as a user starts them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import tomli_w
from helpers import forks
from helpers.ranks import HERE, LIMIT_S
from helpers.runs import curve, sha, table, train

from rank0rl.run.machine import available_cores
from rank0rl.tools.study import study as tool
from rank0rl.tools.study.training import claim

pytestmark = pytest.mark.usefixtures("forked_python")

STUDY = [sys.executable, "-m", "rank0rl", "study"]
SMALL = ["--num-envs", "4", "--steps-per-batch", "64", "--minibatch-size", "32", "--hidden", "8"]


def study(folder, *args, expect=0):
    done = forks.run("-m", "rank0rl", "study", *args, "--out", str(folder))
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_a_study_trains_what_is_missing_and_names_what_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Count-v0", "helpers.envs:Breaks-v0", "--seeds", "0:1", *SMALL]
    done = study(tmp_path, *args, "--total-steps", "128", expect=1)
    assert "study, 2 of 2" in done.stdout
    assert "failed: Breaks-v0-ppo-seed0: ZeroDivisionError: on purpose" in done.stderr
    assert "output.txt" in done.stderr
    assert "| helpers.envs:Count-v0 | ppo | 1 |" in done.stdout
    assert (tmp_path / "report.html").exists()
    done = study(tmp_path, *args, "--total-steps", "128", "--gamma", "0.9", expect=2)
    assert "holds a run of other settings" in done.stderr
    assert "gamma 0.9 in place of 0.99" in done.stderr
    done = study(tmp_path, *args, "--total-steps", "256", expect=2)
    assert "total_steps was 128, and is now 256" in done.stderr
    # The same study again, with a seed more, from its file.
    (tmp_path / "study.toml").write_text(
        (tmp_path / "study.toml").read_text().replace('"helpers.envs:Breaks-v0",', "")
    )
    done = study(tmp_path, str(tmp_path), "--seeds", "0:2", expect=2)
    assert "study.toml is not as a run of yours" in done.stderr
    assert "helpers.envs:Count-v0']; if you trust it, go on with" in done.stderr
    done = study(tmp_path, str(tmp_path), "--seeds", "0:2", "--trust")
    assert "study, 2 of 2: Count-v0-ppo-seed1" in done.stdout
    assert "seed0" not in done.stdout
    train(
        tmp_path / "alone", "helpers.envs:Count-v0", *SMALL, "--total-steps", "128", "--seed", "1"
    )
    assert sha(tmp_path / "alone") == sha(tmp_path / "Count-v0-ppo-seed1")


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"algo": ["planted:Agent"]}, "planted:Agent"),
        ({"grid": ["hook=planted.py:f"]}, "--hook"),
        ({"search": ["env-kwargs=planted|0"]}, "--env-kwargs"),
        ({"hosts": "planted:1"}, "--hosts"),
        ({"trust": True, "train": "--wrappers=planted:Wrapper"}, "--wrappers"),
        ({"train": "--trust --config planted.toml"}, "--trust"),
        ({"train": "--config planted.toml"}, "algo \\['planted:Agent'\\]"),
        ({"train": "--mpiexec 'touch planted'"}, "--mpiexec"),
        ({"train": "--algo planted.py"}, "planted.py"),
        ({"grid": ["algo=planted.py"]}, "planted.py"),
        ({"grid": ["lr=3e-4 --hook=planted.py:f"]}, "no options"),
        ({"search": ["lr=3e-4 --hook=planted.py:f|1e-3"]}, "no options"),
        ({"search": ["algo=planted.py|ppo"]}, "planted.py"),
        ({"train": "--config planted.toml --info planted:Agent"}, "algo \\['planted:Agent'\\]"),
        ({"envs": ["--mpiexec=sh -c 'touch planted'"]}, "no name like"),
        ({"train": "--wandb planted"}, "--wandb"),
        ({"train": "--init-from planted"}, "--init-from"),
        ({"train": "--algo bc --data planted"}, "--data"),
    ],
)
def test_a_file_of_a_study_imports_nothing_and_starts_no_program(tmp_path, monkeypatch, more, said):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "planted.py").write_text("open('imported', 'w')")
    (tmp_path / "planted.toml").write_text('algo = "planted:Agent"')
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({"envs": ["CartPole"]} | more))
    done = forks.run("-m", "rank0rl", "study", "mine.toml", "--out", "runs", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(said, done.stderr), done.stderr
    assert "if you trust it" in done.stderr or "no options" in said or "no name" in said
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name the environments first"),
        (["CartPole", "--seeds", "x"], "seeds must be numbers"),
        (["CartPole", "--gamma", "2"], "gamma must be in"),
        (["CartPole", "--cores", "0"], "cores must be in"),
        (["CartPole", "--search", "lr"], "NAME=LOW:HIGH"),
        (["none.toml"], "none.toml"),
    ],
)
def test_a_wrong_use(args, said, tmp_path):
    done = study(tmp_path / "s", *args, expect=2)
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_study_that_was_moved_goes_on_where_it_is(tmp_path):
    (tmp_path / "study.toml").write_text('envs = ["CartPole"]\nout = "/where/it/was"\n')
    given, _, source = tool._read([str(tmp_path)])
    assert given.out == str(tmp_path)
    assert source  # which is not trusted


def test_without_matplotlib_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "study"
    assert tool.main(["CartPole", "--seeds", "0", "--out", str(out)]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_a_study_that_is_stopped_saves_and_goes_on(tmp_path):
    args = ["CartPole", "--seeds", "0", *SMALL, "--total-steps", "9600"]
    command = [*STUDY, *args, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "CartPole-ppo-seed0"
    end = time.monotonic() + LIMIT_S
    while not (run / "progress.csv").exists() and time.monotonic() < end:
        time.sleep(0.05)
    other = study(tmp_path, *args, expect=2)
    assert "another process of this machine trains the study" in other.stderr
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "goes on with the same command" in err
    made = json.loads((run / "summary.json").read_text())["iterations"]
    assert made == len(table(run))
    study(tmp_path, *args)
    assert len(table(run)) == 150
    train(tmp_path / "alone", *args[:1], *SMALL, "--total-steps", "9600")
    assert curve(run) == curve(tmp_path / "alone")
    if hasattr(os, "sched_getaffinity") and made < 150:
        starts = (run / "config.toml").read_text()
        assert starts.count(f"nprocs = {min(4, len(available_cores()))}") == 2


@pytest.mark.skipif(len(available_cores()) < 2, reason="two cores stand for two machines")
@pytest.mark.slow
def test_machines_share_a_study(tmp_path, monkeypatch):
    """The second machine is another core of this one, and its ssh a script."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        'while [ $# -gt 2 ]; do shift; done\n[ "$1" = b ] || exit 9\n'
        f'exec taskset -c {available_cores()[1][0]} sh -c "$2"\n'
    )
    ssh.write_text("#!/bin/sh\n" + ssh.read_text())
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    args = ["CartPole", "--seeds", "0:4", *SMALL, "--total-steps", "256"]
    done = study(tmp_path / "s", *args, "--hosts", "localhost:1,b:1")
    assert "CartPole-v1 | ppo | 4 |" in done.stdout
    there = next((tmp_path / "s" / "machines").glob("b.txt")).read_text()
    here, elsewhere = (set(re.findall(r"CartPole-ppo-seed\d", t)) for t in (done.stdout, there))
    assert here
    assert elsewhere
    assert here | elsewhere == {f"CartPole-ppo-seed{seed}" for seed in range(4)}
    assert not here & elsewhere


@pytest.mark.slow
def test_nohup_is_respected(tmp_path):
    words = [*STUDY, "CartPole", "--seeds", "0:1", *SMALL, "--total-steps", "6400"]
    ignore = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", ignore, *words, "--out", str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as process:
        assert process.stdout.readline().startswith("runs: 1")
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="file system with locks.*choose another --out"):
        claim(tmp_path / "r")


def test_a_run_is_claimed_once(tmp_path):
    release = claim(tmp_path / "r")
    assert claim(tmp_path / "r") is None
    release()
    claim(tmp_path / "r")()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork stands for another machine")
def test_the_run_of_a_process_that_was_killed_is_free(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        claim(tmp_path / "r")
        os.write(write, b"claimed")
        time.sleep(LIMIT_S)
        os._exit(1)
    assert os.read(read, 7) == b"claimed"
    assert claim(tmp_path / "r") is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    claim(tmp_path / "r")()
