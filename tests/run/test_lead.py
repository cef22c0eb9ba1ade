"""What rank 0 says before the loop."""

import shlex
import sys
from pathlib import Path

from rank0rl import start
from rank0rl.run.options import RunOptions
from rank0rl.run.plan import Plan


def test_the_line_to_go_on_with_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my train.py"])
    plan = Plan(
        RunOptions(), None, Path("runs") / "a $x", "defaults", (), "", {}, lambda: None, 0, {}
    )
    words = shlex.split(start._resume_command(plan, 2, ""))
    assert words == ["python", "my train.py", "--resume", str(plan.folder), "--nprocs", "2"]
    assert "'" in start._resume_command(plan, 2, "").partition("--resume")[2]
