"""A few dozen runs of benchmarks/chaos.py, whose docstring says what is right."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import HERE

# What other tests leave counts as left, and what MPI leaves stays while a launcher of another job lives:
# so /dev/shm, /tmp and the processes are this test's own where that is possible.
OWN = [
    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"),
    'mount -t tmpfs t /tmp && mount -t tmpfs t /dev/shm && exec "$@"',
    "sh",
]


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_signals_at_random_times_to_random_processes():
    folder = HERE.parent / "runs"  # not in /tmp
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "benchmarks/chaos.py", "--runs", "36", "--folder", str(folder)]
    is_hidden = Path(sys.executable).is_relative_to("/tmp") or HERE.is_relative_to("/tmp")
    can = not subprocess.run([*OWN, "true"], check=False, capture_output=True).returncode
    own = OWN if can and not is_hidden else []
    done = subprocess.run(
        [*own, *command], check=False, capture_output=True, text=True, cwd=HERE.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
