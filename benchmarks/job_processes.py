"""A job whose processes are known by a token in their environment. Linux only."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path
from signal import SIGKILL

ROOT = Path(__file__).parent.parent
TOKEN = "RANK0RL_CHAOS"  # in the environment of all processes of a job
RANKS = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")  # in the environment of ranks and their shells
BETWEEN = {b"hydra_pmi_proxy": "proxy", b"prted": "proxy", b"mpi": "launcher", b"prte": "launcher"}


class Job:
    """A job with a token in its environment, which tells its processes from all others."""

    def __init__(self, folder: Path, words: list[str], **variables: str) -> None:
        """Start it. Its output goes to `folder/log`, its temporary files to `folder/tmp`."""
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        value = str(uuid.uuid4())
        self._token = f"{TOKEN}={value}".encode()
        self._process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **variables, "TMPDIR": str(folder / "tmp"), TOKEN: value},
            stdout=(folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
        )

    def processes(self) -> dict[int, str]:
        """Return id -> kind of the job's processes; "" for one that is about to become something else."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environ = file.read_bytes().split(b"\0")
                if self._token in environ:
                    command = (file.parent / "cmdline").read_bytes()
                    found[int(file.parent.name)] = _kind(command, environ)
        return found | ({self._process.pid: "supervisor"} if self._process.pid in found else {})

    def draw(self, rng: random.Random) -> tuple[int, str]:
        """Return a living process and its kind, uniform over kinds; (0, "") if the job is over."""
        kinds: dict[str, list[int]] = {}
        for process_id, kind in sorted(self.processes().items()):
            kinds.setdefault(kind, []).append(process_id)
        kinds.pop("", None)
        kind = rng.choice(sorted(kinds)) if kinds else ""
        return (rng.choice(kinds[kind]), kind) if kind else (0, "")

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code as a shell gives it; None if there is none after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(limit_s)
            return 128 - code if code < 0 else code
        return None

    def kill_survivors(self, patience_s: float = 0) -> str:
        """Kill the processes that do not end by themselves in time; return their kinds and states."""
        end = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        names = sorted(f"{kind} {_state(process_id)}" for process_id, kind in left.items())
        while left:
            for process_id in left:
                send(process_id, SIGKILL)
            self._process.poll()
            left = self.processes()
        return ", ".join(names)


def unused_mpi_files() -> set[str]:
    """Return the files of MPI that no living process has open or in its memory."""
    used = ""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used += (process / "maps").read_text()
            used += "\n".join(os.readlink(file) for file in (process / "fd").iterdir())
    files = [*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hydra_hwloc_xmlfile_*")]
    return {str(file) for file in files if str(file) not in used}


def _kind(command: bytes, environ: list[bytes]) -> str:
    program = os.path.basename(command.partition(b"\0")[0])
    if b"envs import process" in command:
        return "environment"
    if any(variable.startswith(RANKS) for variable in environ):
        return "rank" if program.startswith(b"python") else "shell" if program == b"sh" else ""
    return next((kind for name, kind in BETWEEN.items() if program.startswith(name)), "")


def send(process_id: int, signum: int) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signum)


def _state(process_id: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return "gone"
