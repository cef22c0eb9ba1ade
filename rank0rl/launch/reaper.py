"""Run a command for a rank, and end all that it has started once it has ended, or the rank.

This is a process between the two. What leaves its group and its session, or has other variables, is still below it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rank0rl.launch import FAILURE, exit_code_after, job, processes, tree

NOT_FOUND = 127
"""Exit code where the command cannot be run."""
_ORDERLY_S = 2.0  # for a command to end after SIGTERM: mpiexec ends its ranks, and srun its step


def start(
    command: Sequence[str], files: Path, **kwargs: Any
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command with a reaper around it, in a process group of its own.

    Args:
        command: the command.
        files: a new folder for temporary files, which the reaper removes at the end.
        kwargs: more arguments of `subprocess.Popen`.

    Returns:
        The reaper, whose exit code is that of the command, 128 + s after signal s; and the file that is to be
        closed to end the command.
    """
    theirs, ours = os.pipe()
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from rank0rl.launch import reaper; reaper.main()"
    words = [sys.executable, "-P", "-c", code, str(os.getpid()), str(theirs), str(files), *command]
    try:
        return subprocess.Popen(words, pass_fds=[theirs], process_group=0, **kwargs), ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def main() -> None:
    """Run the command of this command line.

    These are two processes: the second one does the work. Each of them ends all if the other one is killed.
    """
    parent, control, files, *command = sys.argv[1:]
    os.set_inheritable(int(control), False)
    # A batch system may send some of these to all processes of a job: the rank decides.
    for signum in (signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD, *job.END_SIGNALS):
        signal.signal(signum, lambda *_: None)  # programs would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    folder, first = Path(files), os.getpid()
    signal.signal(signal.SIGUSR2, lambda *_: os.getppid() != int(parent) and os._exit(FAILURE))
    tree.become_reaper()
    tree.end_with_parent(int(parent), signal.SIGUSR2)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no locks here
            stack.enter_context(processes.locked(folder))
        job.create(folder, 1)  # if it is left, the next job removes it
        second = os.fork()
        if not second:
            signal.signal(signal.SIGUSR2, lambda *_: None)
            tree.become_reaper()
            tree.end_with_parent(first, signal.SIGUSR2)
            _leave(folder, _run(command, int(control), first))
        _leave(folder, _code(os.waitpid(second, 0)[1]))
    os._exit(FAILURE)


def _leave(folder: Path, code: int) -> NoReturn:
    """End this process, with all below it, and remove what it leaves."""
    tree.kill_below()
    if folder.exists():
        if code:
            processes.remove_mpi_files(folder)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _run(command: Sequence[str], control: int, parent: int) -> int:
    """Run a command, until the other end of the pipe `control` is closed or the parent is gone; return its exit code."""
    wakeup, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    child = _start(command)
    while os.getppid() == parent:
        ready = select.select([control, wakeup], [], [])[0]
        if wakeup not in ready:
            break
        os.read(wakeup, 1)
        if (code := _ended(child)) is not None:
            return code
    return _end(child)


def _start(command: Sequence[str]) -> int:
    """Return the process id of the command. It is not bound to one core, as its rank may be."""
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    tree.end_with_parent(me, signal.SIGKILL)
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
    os._exit(NOT_FOUND)


def _ended(child: int) -> int | None:
    """Return the exit code of a child; None while it lives. Others that have ended are forgotten."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                code = _code(found[1])
    return code


def _code(status: int) -> int:
    """Return the exit code of a process, as a shell gives it."""
    code = os.waitstatus_to_exitcode(status)
    return exit_code_after(-code) if code < 0 else code


def _end(child: int) -> int:
    """Ask a child to end, and give it some time; return its exit code."""
    os.kill(child, signal.SIGTERM)  # it is there, at least as a zombie
    end = time.monotonic() + _ORDERLY_S
    while time.monotonic() < end:
        if (code := _ended(child)) is not None:
            return code
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    return exit_code_after(signal.SIGKILL)
