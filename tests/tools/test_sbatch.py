"""The batch script for Slurm, and what ranks of srun say without their PMI. Jobs: tests/slurm."""

import subprocess
import sys

import pytest
from helpers.ranks import HERE, run

from rank0rl.tools import sbatch

TRAIN = ["python", "train.py", "Walker2d", "--num-envs", "32"]


def lines(*options, command=TRAIN):
    """Return the lines of a script, which bash can read."""
    given = sbatch.tyro.cli(sbatch.Options, args=options)
    text = sbatch._script(given, [*command])
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True)
    assert done.stderr == ""
    return text.splitlines()


def test_a_job_on_two_nodes_is_requeued_after_either_signal():
    found = lines("--nodes", "2", "--ntasks-per-node", "8", "--mpi", "pmix", "--time", "1:00:00")
    for line in (
        *("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --time=1:00:00"),
        *("#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --signal=USR1@120"),
        "run=runs/slurm-$SLURM_JOB_ID",
        f"srun --mpi=pmix {sys.executable} train.py Walker2d --num-envs 32 "
        f'--run-dir "$run" --resume auto',
        'case $code in 138|143) scontrol requeue "$SLURM_JOB_ID" ;; esac',
    ):
        assert line in found
    assert not [line for line in found if "--array" in line]


def test_the_pmi_is_that_of_the_mpi(monkeypatch):
    for made_by, pmi in (("Open MPI", "pmix"), ("MPICH", "pmi2"), ("Intel MPI", "pmi2")):
        monkeypatch.setattr(sbatch, "vendor", lambda _, made_by=made_by: made_by)
        assert [line for line in lines() if line.startswith(f"srun --mpi={pmi} ")]


def test_a_seed_for_each_job_of_an_array():
    found = lines("--array-seeds", "3:8")
    assert "#SBATCH --array=3-7" in found
    assert "run=runs/slurm-$SLURM_ARRAY_JOB_ID/seed$SLURM_ARRAY_TASK_ID" in found
    [line] = [line for line in found if line.startswith("srun")]
    assert '--seed "$SLURM_ARRAY_TASK_ID"' in line


def test_a_folder_of_ones_own():
    command = [*TRAIN, "--run-dir", "/shared/my run"]
    found = lines(command=command)
    assert not [line for line in found if line.startswith("run=")]
    [line] = [line for line in found if line.startswith("srun")]
    assert line.endswith("--run-dir '/shared/my run' --resume auto")


def test_without_srun_the_shell_passes_the_signal_on():
    found = lines("--no-srun", "--ntasks-per-node", "4")
    assert "#SBATCH --signal=B:USR1@120" in found
    assert [line for line in found if line.endswith("--resume auto --nprocs 4 &")]
    assert 'trap "kill -USR1 $training" USR1' in found
    found = lines("--no-srun", "--ntasks-per-node", "4", command=[*TRAIN, "--ranks-per-env", "2"])
    assert [line for line in found if line.endswith("--resume auto --nprocs 2 &")]


def test_other_words_may_be_the_name_of_the_package():
    lines(command=["python", "mine.py", "--group", "rank0rl", "--lr", "1e-3"])
    lines(command=["rank0rl", "train", "CartPole"])


def test_ranks_without_an_environment_are_refused_for_training_alone():
    lines("--nodes", "4", command=[*TRAIN[:3], "--num-envs", "2", "--ranks-per-env", "2"])
    lines("--nodes", "40", command=["python", "my_script.py"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--nodes 2", "expected a training command after --: got none"),
        ("-- python -m rank0rl study CartPole", "after --: got python -m rank0rl study CartPole;"),
        ("--nodes 2 --no-srun -- python train.py CartPole", "got --nodes 2"),
        ("--array-seeds 5:5 -- python train.py CartPole", "got '5:5'"),
        ("--array-seeds 5 -- python train.py CartPole", "got '5'"),
        ("--array-seeds 0:2 -- python train.py CartPole --run-dir r", "leave --run-dir out"),
        ("--array-seeds 0:2 -- python x.py --keep-batches b", "leave --keep-batches out"),
        ("--array-seeds 0:2 -- python x.py --seed 7", "has its own seed: leave --seed out"),
        ("-- python train.py --resume r", "leave --resume out"),
        ("-- python train.py CartPole --nprocs 2", "leave --nprocs out"),
        ("--nodes 4 -- python train.py CartPole --num-envs 3", "num_envs=3, nprocs=4"),
        ("--nodes 3 -- python -m rank0rl train CartPole --num-envs 2", "num_envs=2, nprocs=3"),
        ("--nodes 3 -- python train.py CartPole --ranks-per-env 2", "got 3, and --ranks-per-env 2"),
        ("--no-srun -- python own.py --ranks-per-env 2", "got 1, and --ranks-per-env 2"),
        ("--nodes 2 -- python train.py CartPole --ranks-per-env 0", "ranks_per_env must be in"),
    ],
)
def test_wrong_use(argv, said, capsys):
    assert sbatch.main(argv.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_of_srun_that_see_themselves_alone_name_the_pmi(rank):
    """One of them says it."""
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank}
    done = run([sys.executable, str(HERE.parent / "train.py"), "CartPole"], env=env)
    assert done.returncode == 2
    assert done.stdout == ""
    assert ("srun --mpi=pmi" in done.stderr) == (rank == "0")
    assert len(done.stderr.splitlines()) == (rank == "0")
    done = run([sys.executable, "-m", "rank0rl", "doctor"], env=env)
    assert done.returncode == 1
    if rank == "0":
        [line] = [line for line in done.stdout.splitlines() if line.startswith("NOT OK")]
        assert "; start them with srun --mpi=pmi" in line
    else:
        assert done.stdout == ""
