"""python -m rank0rl sbatch: print a batch script for Slurm that goes on after a preemption or a time limit."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from rank0rl import algos
from rank0rl.launch import exit_code_after, usage_error
from rank0rl.launch.job import END_SIGNALS
from rank0rl.launch.mpiexec import find_mpiexec, vendor
from rank0rl.options import CheckedOptions, flag, option
from rank0rl.run.launch_options import LaunchOptions, Words

_USAGE = "python -m rank0rl sbatch --nodes 2 --ntasks-per-node 8 -- python train.py Walker2d"
_HEAD = """\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --time={time}
#SBATCH --chdir={folder}
#SBATCH --output=slurm-{output}.out
#SBATCH --open-mode=append
#SBATCH --requeue
"""
# A job that is requeued keeps its id, so it finds its run again.
_RUN = """
# The run's folder must be on storage that all nodes see.
run={run}
"""
_WITH_SRUN = """#SBATCH --signal=USR1@120
{run}
srun --mpi={mpi} {command}
code=$?
"""
# bash acts on a signal at once only while it waits for a command in the background.
_WITHOUT_SRUN = """#SBATCH --signal=B:USR1@120
{run}
{command} --nprocs {nprocs} &
training=$!
trap "kill -USR1 $training" USR1
while wait $training; code=$?; [ $code -gt 128 ] && kill -0 $training 2> /dev/null; do :; done
"""
_TAIL = """
# The run was saved after a signal: before the time limit, or because of a preemption.
case $code in {codes}) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $code
"""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Print a batch script for a training command, which comes after --. Give options of Slurm when you submit the script: sbatch --partition long job.sh."""

    nodes: int = option(1, "[1, inf)")
    """Number of nodes."""
    ntasks_per_node: int = option(1, "[1, inf)")
    """Processes per node: ranks times --ranks-per-env."""
    time: str = "24:00:00"
    """Time limit of one start. The run is saved 120 s before it, and goes on in the next start."""
    array_seeds: str | None = None
    """Seeds of an array of jobs, such as 0:5 for 0 to 4: one run per seed. None: one job, with the seed of its command."""
    srun: bool = True
    """Start the ranks with srun. --no-srun lets rank0rl start them, on one node."""
    mpi: Literal["pmi2", "pmix"] | None = None
    """The PMI by which srun connects the ranks, that of the MPI that mpi4py uses. None: pmix if the mpiexec of this Python is Open MPI's, else pmi2."""


def main(argv: list[str]) -> int:
    """Run the tool; return its exit code: 0, or 2 for a wrong use."""
    where = argv.index("--") if "--" in argv else len(argv)
    mine, command = argv[:where], argv[where + 1 :]
    try:
        given = tyro.cli(Options, args=mine, prog="python -m rank0rl sbatch")
        print(_script(given, command), end="")
    except ValueError as error:
        return usage_error(str(error))
    return 0


def _script(given: Options, command: list[str]) -> str:
    """Return the batch script of a training command. A ValueError says which options do not fit together."""
    other_tool = re.search(r"(^(\S*/)?| -m )rank0rl (?!train\b)", shlex.join(command))
    if not command or other_tool:
        got = shlex.join(command) or "none"
        raise ValueError(f"expected a training command after --: got {got}; example: {_USAGE}")
    if given.nodes > 1 and not given.srun:
        raise ValueError(
            f"without srun all ranks are on one node: got --nodes {given.nodes}; leave --no-srun out"
        )
    for word in (given.time, os.getcwd(), *command):
        if not word.isprintable():
            raise ValueError(f"a line of a script holds no control characters: got {word!r}")
    words = [sys.executable if command[0] in ("python", "python3") else command[0], *command[1:]]
    named = Words.read(command).given
    for name, by in (("resume", "--resume auto"), ("nprocs", "the number of ranks")):
        if name in named:
            raise ValueError(
                f"the script sets {by}: leave {flag(name)} out of the training command"
            )
    each = _checked_ranks_per_env(given, command, named)
    seeds = _seeds(given.array_seeds)
    is_open_mpi = vendor(find_mpiexec() or "") == "Open MPI"
    own = "slurm-$SLURM_ARRAY_JOB_ID/seed$SLURM_ARRAY_TASK_ID" if seeds else "slurm-$SLURM_JOB_ID"
    line = shlex.join(words)
    folder = ""
    given_words = {word.partition("=")[0].replace("_", "-") for word in command}
    for word, what in (("--run-dir", "folder"), ("--keep-batches", "folder"), ("--seed", "seed")):
        if seeds and word in given_words:
            raise ValueError(f"each run of an array has its own {what}: leave {word} out")
    if "run_dir" not in named:
        folder = _RUN.format(run=f"runs/{own}")
        line += ' --run-dir "$run"'
    line += ' --seed "$SLURM_ARRAY_TASK_ID"' if seeds else ""
    head = _HEAD.format(
        nodes=given.nodes,
        tasks=given.ntasks_per_node,
        time=given.time,
        folder=shlex.quote(os.getcwd()),
        output="%A_%a" if seeds else "%j",
    )
    body = (_WITH_SRUN if given.srun else _WITHOUT_SRUN).format(
        run=folder,
        mpi=given.mpi or ("pmix" if is_open_mpi else "pmi2"),
        command=f"{line} --resume auto",
        nprocs=given.ntasks_per_node // each,
    )
    codes = "|".join(str(exit_code_after(signum)) for signum in sorted(END_SIGNALS))
    return head + seeds + body + _TAIL.format(codes=codes)


def _checked_ranks_per_env(given: Options, command: list[str], named: Mapping[str, Any]) -> int:
    """Return the processes of a rank; raise ValueError if one would have too few, or, in training, no environment."""
    each: int = LaunchOptions(**named).ranks_per_env
    tasks = given.ntasks_per_node * (given.nodes if given.srun else 1)
    if tasks % each:
        raise ValueError(
            f"the tasks must be a multiple of --ranks-per-env: got {tasks}, and --ranks-per-env {each}; "
            f"change --nodes or --ntasks-per-node"
        )
    train_py = algos.CONFIGS.with_name("train.py").resolve()
    is_training = any(Path(word).resolve() == train_py for word in command)
    if is_training or command[1:4] == ["-m", "rank0rl", "train"]:
        Words.read([*command, "--nprocs", str(tasks // each)]).launch_options(algos.CONFIGS)
    return each


def _seeds(text: str | None) -> str:
    """Return the line of the script for an array; "" for a single job."""
    if text is None:
        return ""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ValueError(f"--array-seeds must be FIRST:END, such as 0:5 for 0 to 4: got {text!r}")
    return f"#SBATCH --array={first}-{int(end) - 1}\n"
