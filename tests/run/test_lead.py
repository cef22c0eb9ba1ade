"""What rank 0 says before the loop."""

import shlex
import sys
from pathlib import Path

from rank0rl import start
from rank0rl.mpi import threads
from rank0rl.run import machine
from rank0rl.run.options import RunOptions
from rank0rl.run.plan import Plan


def test_the_line_to_go_on_with_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my train.py"])
    plan = Plan(RunOptions(), None, Path("runs") / "a $x", "defaults", (), "", {}, lambda: None)
    words = shlex.split(start._resume_command(plan, 2, ""))
    assert words == ["python", "my train.py", "--resume", str(plan.folder), "--nprocs", "2"]
    assert "'" in start._resume_command(plan, 2, "").partition("--resume")[2]


def test_a_blas_with_other_code_is_a_difference():
    before = {"cpu": "A", "blas": "openblas 0.3 Haswell", "versions": {"numpy": "2"}}
    assert threads.blas().startswith(("openblas ", "mkl ", "blis ", "flexiblas "))
    found = machine.differences(before, {**before, "blas": "openblas 0.3 SkylakeX"})
    assert found == ["blas openblas 0.3 Haswell is now openblas 0.3 SkylakeX"]
