"""The examples run, with the numbers of ranks and the output that they and the docs show."""

import ast
import os
import shlex
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from on_ranks import HERE, run

ROOT = HERE.parent
EXAMPLES = ROOT / "examples"
RANKS = {
    "01_hello": 5,
    "02_point_to_point": 9,
    "03_broadcast": 10,
    "04_scatter": 10,
    "05_gather": 5,
    "06_reduce": 3,
    "07_allreduce": 3,
    "08_fork": 4,
}


def typed(command, **kwargs):
    """Run a command as at a prompt, where `python`, `mpiexec` and rank0rl are found."""
    env = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "",  # else a line is written in parts, between those of other ranks
    }
    done = run(shlex.split(command), env=env, cwd=ROOT, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def shown(name):
    """The command and the output in an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / "mpi" / f"{name}.py").read_text()))
    command, output = [dedent(part) for part in text.split("\n\n") if part.startswith("    ")]
    return command, output


@pytest.mark.parametrize("name", RANKS)
def test_an_mpi_example_prints_what_it_says(name):
    command, output = shown(name)
    start = "" if name == "08_fork" else f"mpiexec -n {RANKS[name]} "
    assert command == f"{start}python examples/mpi/{name}.py"
    assert sorted(typed(command)) == sorted(output.splitlines())


def test_every_mpi_example_is_in_the_docs_as_it_is():
    assert sorted(RANKS) == sorted(path.stem for path in (EXAMPLES / "mpi").glob("*.py"))
    page = (ROOT / "docs" / "learn-mpi.md").read_text()
    for name in RANKS:
        for block in shown(name):
            assert f"\n```\n{block}\n```\n" in page, f"docs/learn-mpi.md, {name}: {block}"


def test_the_fork_example_imports_mpi_before_it_forks():
    text = (EXAMPLES / "mpi" / "08_fork.py").read_text()
    assert text.index("from mpi4py import MPI") < text.index("rank0rl.mpi_fork(4)")
