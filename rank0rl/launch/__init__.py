"""Start and watch ranks. Only the standard library is imported in this folder.

A job has the same exit code under every MPI (docs/failures.md has the table for users):

0        success
1        an exception, or a failure that has no code of its own
2        wrong use, such as an unknown option
n        a rank has called sys.exit(n) or os._exit(n)
128 + s  signal s: 130 after Ctrl-C, 137 after SIGKILL, 143 after SIGTERM

The supervisor finds the failures of a job, and reports one for the whole job: see supervisor.py.
"""

from __future__ import annotations

import sys

SUCCESS, FAILURE, WRONG_USE = 0, 1, 2


def exit_code_after(signum: int) -> int:
    """Return the exit code of a process or job that a signal has ended, as shells give it."""
    return 128 + signum


def usage_error(message: str) -> int:
    """Print a message about wrong use; return the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return WRONG_USE
