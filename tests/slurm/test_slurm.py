"""Jobs on a real Slurm of two nodes: the same curve, and what a scheduler does to a job."""

import json
import sys
import time

import pytest
from cluster import cluster, missing
from helpers import forks
from helpers.ranks import HERE
from helpers.runs import SMALL, sha, table, train

reason = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]

ROOT = HERE.parent
SLOW = ["--algo", f"{HERE}/helpers/agents.py:SlowPPO", "--checkpoint-every", "1000"]
LENGTH = {"short": ["--total-steps", "3200"], "long": ["--total-steps", "25600"]}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submit(slurm, folder, *args, switches=(), options=("--nodes", "2")):
    """Submit the script that `sbatch` prints for SlowPPO; return the job's id."""
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, *SLOW, *args]
    words = ["-m", "rank0rl", "sbatch", *options, "--", *command]
    done = forks.run(*words, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    (folder / "job.sh").write_text(done.stdout)
    return slurm.submit(folder / "job.sh", *switches)


def wait_for_rows(slurm, job, run, count):
    end = time.monotonic() + 240
    while not (run / "progress.csv").exists() or len(table(run)) < count:
        assert time.monotonic() < end, f"{slurm.job(job)}\n{slurm.logs()}"
        time.sleep(0.1)


def ends_like(slurm, job, run, folder, *args, restarts):
    """Check that a job completes after so many restarts, as the run that nobody disturbed."""
    known = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    log = "".join(file.read_text() for file in run.parent.parent.glob("slurm-*.out"))
    assert (known["JobState"], int(known["Restarts"])) == ("COMPLETED", restarts), log
    train(folder / "whole", *SMALL, *args)
    assert sha(run) == sha(folder / "whole"), log


def test_two_nodes_have_the_curve_of_one_process(slurm, tmp_path):
    job = submit(
        slurm, tmp_path, *LENGTH["short"], options=("--nodes", "2", "--ntasks-per-node", "2")
    )
    run = tmp_path / "runs" / f"slurm-{job}"
    ends_like(slurm, job, run, tmp_path, *LENGTH["short"], restarts=0)
    assert json.loads((run / "summary.json").read_text())["nprocs"] == 4
    config = (run / "config.toml").read_text()
    assert '"one"' in config
    assert '"two"' in config


def test_a_cancelled_job_is_saved_and_leaves_no_process(slurm, tmp_path):
    job = submit(slurm, tmp_path, *LENGTH["long"])
    run = tmp_path / "runs" / f"slurm-{job}"
    wait_for_rows(slurm, job, run, 3)
    slurm.run("scancel", job)
    time.sleep(5)
    assert slurm.ranks() == []
    known = slurm.wait(job, "CANCELLED", limit_s=10)
    assert known["Restarts"] == "0"
    assert json.loads((run / "summary.json").read_text())["iterations"] == len(table(run)) >= 3


def requeue(slurm, job):
    slurm.run("scontrol", "requeue", job)


def preempt(slurm, job):
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")


@pytest.mark.parametrize(
    ("partition", "disturb"),
    [("low", requeue), ("low", preempt), ("graced", preempt)],
    ids=["requeue", "preemption", "preemption with a grace time"],
)
def test_a_job_that_is_taken_away_goes_on_by_itself(partition, disturb, slurm, tmp_path):
    job = submit(slurm, tmp_path, *LENGTH["short"], switches=[f"--partition={partition}"])
    run = tmp_path / "runs" / f"slurm-{job}"
    wait_for_rows(slurm, job, run, 3)
    disturb(slurm, job)
    ends_like(slurm, job, run, tmp_path, *LENGTH["short"], restarts=1)


def test_a_job_outlasts_its_time_limit(slurm, tmp_path):
    switches = ["--time=1", "--signal=USR1@20"]
    job = submit(slurm, tmp_path, *LENGTH["long"], switches=switches)
    run = tmp_path / "runs" / f"slurm-{job}"
    wait_for_rows(slurm, job, run, 3)
    end = time.monotonic() + 90
    while slurm.job(job)["Restarts"] == "0":
        assert time.monotonic() < end
        time.sleep(0.5)
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=10")
    ends_like(slurm, job, run, tmp_path, *LENGTH["long"], restarts=1)


def test_ranks_that_are_started_without_srun(slurm, tmp_path):
    options = ["--no-srun", "--ntasks-per-node", "2"]
    job = submit(slurm, tmp_path, *LENGTH["short"], options=options)
    run = tmp_path / "runs" / f"slurm-{job}"
    wait_for_rows(slurm, job, run, 3)
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1 does
    ends_like(slurm, job, run, tmp_path, *LENGTH["short"], restarts=1)


def test_an_array_makes_a_study(slurm, tmp_path):
    options = ["--array-seeds", "3:5"]
    job = submit(slurm, tmp_path, *LENGTH["short"], options=options)
    for seed in (3, 4):
        slurm.wait(f"{job}_{seed}", "COMPLETED")
        run = tmp_path / "runs" / f"slurm-{job}" / f"seed{seed}"
        train(tmp_path / f"{seed}", *SMALL, *LENGTH["short"], "--seed", str(seed))
        assert sha(run) == sha(tmp_path / f"{seed}")


def test_environments_on_several_ranks_of_srun(slurm, tmp_path):
    args = ["examples.heat:make", "--num-envs", "4", "--steps-per-batch", "80"]
    args += ["--minibatch-size", "40", "--total-steps", "160"]
    train(tmp_path / "alone", *args)
    run = tmp_path / "run"
    words = [sys.executable, str(ROOT / "train.py"), *args, "--run-dir", str(run)]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=2", "--mpi=pmi2"]
    done = slurm.run(*srun, *words, "--ranks-per-env", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sha(run) == sha(tmp_path / "alone")


def test_solvers_of_srun(slurm, tmp_path, monkeypatch):
    """Within an allocation, and ended with it."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.simulators:Solved", *SMALL[1:], "--total-steps", "128"]
    train(tmp_path / "alone", *args)
    run = tmp_path / "run"
    words = [sys.executable, str(ROOT / "train.py"), *args, "--run-dir", str(run)]
    launcher = 'launcher=["srun","--mpi=pmi2","--overlap","--exact","--nodes=1","--ntasks=2"]'
    done = slurm.run("salloc", "--nodes=2", *words, "--env-kwargs", launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sha(run) == sha(tmp_path / "alone")


def test_the_pmi_that_is_missing_is_named(slurm):
    """By training, and by the doctor, each in one line of all ranks."""
    train_py = [sys.executable, str(ROOT / "train.py"), "CartPole"]
    done = slurm.run("srun", "--nodes=2", *train_py)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "srun --mpi=pmi" in line
    doctor = [sys.executable, "-m", "rank0rl", "doctor"]
    done = slurm.run("srun", "--nodes=2", *doctor)
    assert done.returncode != 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("NOT OK")]
    pmi = line.rpartition("=")[2].strip()
    done = slurm.run("srun", "--nodes=2", f"--mpi={pmi}", *doctor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks gathered" in done.stdout
