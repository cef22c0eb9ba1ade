"""The processes of a job on this host, as the supervisor finds, signals and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from rank0rl.mpi import job

_KILL_S = 2.0  # time for killed processes to disappear


def send(folder: Path, rank: int, signum: int) -> bool:
    """Send a signal to a rank on this host; return False if it is not there."""
    try:
        os.kill(int((folder / f"rank.{rank}").read_text()), signum)
    except (OSError, ValueError):
        return False
    return True


def state(folder: Path, rank: int) -> str:
    """Return the letter of a rank's state in Linux's /proc; "" if it is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        process_id = int((folder / f"rank.{rank}").read_text())
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def survivors(folder: Path) -> list[int]:
    """Return the ids of the job's processes: by its folder in their environment, else its ranks."""
    token = f"{job.FOLDER}={folder}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    if not Path("/proc/self/environ").exists():
        for file in folder.glob("rank.*"):
            with contextlib.suppress(OSError, ValueError):
                found.append(int(file.read_text()))
    return found


def kill_all(folder: Path) -> None:
    """Kill every process of the job, with what it has started. Some launchers give each rank a session."""
    end = time.monotonic() + _KILL_S
    while (ids := survivors(folder)) and time.monotonic() < end:
        for process_id in ids:
            with contextlib.suppress(OSError):
                if os.getpgid(process_id) != os.getpgrp():
                    os.killpg(os.getpgid(process_id), signal.SIGKILL)
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.01)


def shared_memory(folder: Path) -> set[Path]:
    """Return the files in shared memory that MPI has for the job's ranks, killed ones included."""
    files = {file for each in survivors(folder) for file in job.shared_memory(each)}
    for recorded in folder.glob("memory.*"):
        files |= {Path(line) for line in recorded.read_text().splitlines()}
    return files
