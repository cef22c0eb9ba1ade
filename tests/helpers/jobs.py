"""Start a job, find its processes, and read what it reports."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from helpers.ranks import HERE, LIMIT_S

from rank0rl.launch import job


def start(*command):
    """Start Python in a session of its own; return the process, and a token in the environment of all its processes."""
    token = f"RANK0RL_TEST={uuid.uuid4()}"
    name, _, value = token.partition("=")
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", name: value},
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process, token


def start_script(tmp_path, text):
    """Start a script on two ranks."""
    (tmp_path / "script.py").write_text(
        "import sys, time, os, rank0rl, rank0rl.mpi.comm, rank0rl.launch.job\n"
        f"if 'parent' == rank0rl.mpi_fork(2): sys.exit()\n{text}\n"
    )
    return start(str(tmp_path / "script.py"))


def end(process, token, patience_s=0.0):
    """Wait for the end of a job; return its output and its errors. It must leave no process behind.

    Ranks that only their launcher can end, as on another host, may take a while to go.
    """
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for process_id in processes(token):
            os.kill(process_id, signal.SIGKILL)
        raise
    until = time.monotonic() + patience_s
    while processes(token) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes(token) == []
    return out, err


def processes(token):
    """Return the ids of the processes whose environment holds the token."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def folder_of(token):
    """Return the folder of the job whose processes have the token; None before there is one."""
    for process_id in processes(token):
        with contextlib.suppress(OSError):
            for pair in Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0"):
                name, _, value = pair.decode().partition("=")
                if name == job.FOLDER:
                    return Path(value)
    return None


def kill_one_rank(token, rank, signum):
    """Send a signal to a rank; return False if it is not there."""
    folder = folder_of(token)
    with contextlib.suppress(OSError, ValueError):
        if folder:
            os.kill(int((folder / f"rank.{rank}").read_text()), signum)
            return True
    return False


def wait_until(condition):
    """Wait until a condition holds."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.1)


def wait_for_ranks(token, n):
    """Wait until n ranks have entered the job."""

    def entered():
        folder = folder_of(token)
        return folder is not None and len([*folder.glob("rank.*")]) == n

    wait_until(entered)


def reports(err):
    """Return how many reports stderr has. Each begins with a rank, or with the places of all ranks."""
    return sum(
        line.startswith("the ranks cannot go on:")
        or (line.startswith("rank ") and "waits" not in line)
        for line in err.splitlines()
    )


def mpi_files():
    """Return MPI's files in shared memory."""
    return {file.name for file in Path("/dev/shm").glob("*mpi*")}


def unused_mpi_files():
    """Return those of them that no process uses."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {name for name in mpi_files() if f"/dev/shm/{name}" not in mapped}


@contextlib.contextmanager
def mpi_files_of_others(before, ours):
    """Collect MPI's files, but those of `before`, that processes besides those of `ours()` are seen to use in the block."""
    found, known, is_over = set(), set(before), threading.Event()

    def look():
        while not is_over.wait(0.05):
            new = mpi_files() - known
            own = ours() if new else ()
            for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
                with contextlib.suppress(OSError):
                    text = maps.read_text()
                    used = {name for name in new if f"/dev/shm/{name}" in text}
                    known.update(used)
                    found.update(used if int(maps.parent.name) not in own else ())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield found
    finally:
        is_over.set()
        watch.join()
