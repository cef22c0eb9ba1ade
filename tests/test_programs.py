"""Solvers in C: started by their environments, or programs of the same job (MPMD)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import wait_until
from helpers.ranks import HERE, environment, mpiexec, run
from helpers.runs import SMALL, sha, table, train

from rank0rl.launch import tree

ENV = "examples.oscillator:make"
ARGS = [*SMALL[1:], "--num-envs", "2", "--total-steps", "128"]


def started(program, ranks):
    """Return the words of environments that start solvers, each on so many ranks."""
    return ["--env-kwargs", f'program="{program}"', f"ranks={ranks}"]


def command(nprocs, *args, solvers):
    """Return the command of a job: ranks that train, then solvers, each on so many ranks."""
    words = [mpiexec(), "-n", str(nprocs), sys.executable, "train.py", "--nprocs", str(nprocs)]
    words += ["--mpmd", "--quiet", *map(str, args)]
    for program, ranks in solvers:
        words += [":", "-n", str(ranks), *program]
    return words


@pytest.fixture(scope="module")
def oscillator(tmp_path_factory):
    """The solver of an example, compiled."""
    mpicc = Path(mpiexec()).with_name("mpicc")
    if not mpicc.exists():
        pytest.skip("no mpicc beside mpiexec")
    program = tmp_path_factory.mktemp("oscillator") / "oscillator"
    source = HERE.parent / "examples" / "oscillator.c"
    done = subprocess.run(
        [mpicc, "-O2", "-o", program, source], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no C compiler: {done.stderr}")
    return program


@pytest.mark.slow
def test_a_solver_in_c_gives_one_hash_on_any_number_of_ranks(oscillator, tmp_path):
    hashes = set()
    for ranks, nprocs in ((1, 1), (2, 2), (3, 1)):
        folder = tmp_path / str(ranks)
        train(folder, ENV, *started(oscillator, ranks), *ARGS, nprocs=nprocs)
        hashes.add(sha(folder))
    assert len(hashes) == 1


@pytest.mark.slow
def test_pushing_the_chain_is_learned(oscillator, tmp_path):
    """Without a force, the mean return is -23."""
    words = "--num-envs 8 --steps-per-batch 1600 --minibatch-size 200 --total-steps 120000"
    train(tmp_path, ENV, *started(oscillator, 1), *words.split(), nprocs=2)
    assert float(table(tmp_path)[-1]["return_mean"]) > -12


@pytest.mark.slow
def test_a_job_of_several_programs_has_the_hash_of_solvers_that_are_started(oscillator, tmp_path):
    """On one rank and on two, stopped and resumed on one too."""
    one, two, alone = tmp_path / "one", tmp_path / "two", tmp_path / "alone"
    train(alone, ENV, *started(oscillator, 1), *ARGS)
    solvers = [([oscillator], 2), ([oscillator], 1)]
    stop = ["--stop-after-iterations", "1"]
    for done in (
        run(command(1, ENV, *ARGS, "--run-dir", one, solvers=solvers)),
        run(command(2, ENV, *ARGS, *stop, "--run-dir", two, solvers=solvers)),
        run(command(1, "--resume", two, solvers=solvers)),
    ):
        assert done.returncode == 0, done.stderr
    assert sha(alone) == sha(one) == sha(two)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("nprocs", "words", "says"),
    [
        (1, ["--num-envs", "4"], "each environment has one solver: got 2 solvers, and num_envs 4"),
        (1, ["--eval-every", "1"], "no other one has: leave out --eval-every"),
        (1, ["--rank0-envs", "0"], "no other one has: leave out --rank0-envs"),
        (1, ["--nprocs", "2"], "got --nprocs 2, and the launcher started 1 ranks of it after 0"),
        (1, ["--ranks-per-env", "2"], "mpmd needs a launcher that starts this program with one"),
    ],
)
def test_a_mistake_ends_all_programs(oscillator, nprocs, words, says):
    done = run(command(nprocs, ENV, *ARGS, *words, solvers=[([oscillator], 1)] * 2), 60)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_other_programs_that_nobody_has_named_are(oscillator):
    words = command(1, ENV, *ARGS, solvers=[([oscillator], 1)] * 2)
    words.remove("--mpmd")
    done = run(words, 60)
    assert done.returncode == 2
    assert "has started other programs besides this one (" in done.stderr
    assert "add --mpmd" in done.stderr


def test_a_rank_that_has_ended_or_has_not_begun_is_no_other_program(monkeypatch):
    lines = {1: ["hydra_pmi_proxy"], 2: [""], 3: ["hydra_pmi_proxy"], os.getpid(): ["python", "x"]}
    lines |= {4: ["python", "x"], 5: ["/bin/solver"]}
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(tree, "program", lambda process_id: "hydra_pmi_proxy")
    monkeypatch.setattr(tree, "_words", lines.get)
    monkeypatch.setattr(tree, "_BECOMES_S", 0.2)
    for ranks, others in (([2, 3, 4], []), ([3, 4, 5], ["solver"])):
        monkeypatch.setattr(tree, "children", lambda launcher, ranks=ranks: {*ranks, os.getpid()})
        assert tree.other_programs() == others


def test_a_shell_that_becomes_a_rank_is_no_other_program(monkeypatch):
    seen = iter([["bash", "run.sh"]])
    lines = {1: ["hydra_pmi_proxy"], os.getpid(): ["python", "x"]}
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(tree, "program", lambda process_id: "hydra_pmi_proxy")
    monkeypatch.setattr(tree, "_words", lambda at: lines.get(at) or next(seen, ["python", "x"]))
    monkeypatch.setattr(tree, "children", lambda launcher: {2, os.getpid()})
    assert tree.other_programs() == []


def test_the_ranks_that_train_come_first(oscillator):
    train_words = command(1, ENV, *ARGS, solvers=[])[1:]
    done = run([mpiexec(), "-n", "2", oscillator, ":", *train_words], 60)
    assert done.returncode in (2, 9)  # MPICH may give that of the solvers, which it kills
    assert "started 1 ranks of it after 2 others" in done.stderr


def test_it_needs_a_launcher():
    done = run([sys.executable, "train.py", ENV, "--mpmd"])
    assert done.returncode == 2
    assert "mpmd needs a launcher" in done.stderr


@pytest.mark.slow
def test_an_error_ends_all_programs(oscillator, tmp_path):
    env = {"PYTHONPATH": str(HERE)}
    words = ["helpers.simulators:failing", *ARGS, "--run-dir", tmp_path]
    done = run(command(1, *words, solvers=[([oscillator], 1)] * 2), 60, env=env)
    assert done.returncode == 1
    assert "RuntimeError: the tenth step" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("who", ["mpiexec", "python"])
def test_a_signal_saves_and_ends_all_programs(oscillator, tmp_path, who):
    words = [*ARGS[:-1], "1000000", "--run-dir", tmp_path / "run"]
    job = subprocess.Popen(
        command(1, ENV, *words, solvers=[([oscillator], 1)] * 2),
        env=environment({}),
        cwd=HERE.parent,
    )
    with job:
        wait_until((tmp_path / "run" / "progress.csv").exists)
        mine = [*tree.below(job.pid)]
        if who == "python":
            rank = next(each for each in mine if tree.program(each).startswith("python"))
            os.kill(rank, signal.SIGTERM)
        else:
            os.kill(job.pid, signal.SIGINT)
        assert job.wait(60) in ((143,) if who == "python" else (130, 2, 1))
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    wait_until(lambda: all(tree.state(each) in ("", "Z") for each in mine))  # mpiexec ends first


@pytest.mark.slow
def test_a_program_that_does_not_split_the_world_is_named(oscillator):
    """It is waited for, because it may need long to begin."""
    alone = [sys.executable, "-c", "from mpi4py import MPI; import time; time.sleep(60)"]
    job = command(1, ENV, *ARGS, solvers=[(alone, 1)])
    done = subprocess.run(
        ["timeout", "30", *job],
        check=False,
        capture_output=True,
        text=True,
        env=environment({}),
        cwd=HERE.parent,
    )
    assert "each of them must split MPI_COMM_WORLD twice" in done.stderr
