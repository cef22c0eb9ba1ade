"""Run a function of a test module on n ranks, in processes of their own, under a time limit."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT_S = 300  # catches hangs; an idle machine takes seconds, a busy one minutes


def mpiexec() -> str:
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpiexec"
    )
    assert found, "the tests need mpiexec: pip install mpi4py mpich"
    return found


def on_ranks(n: int, function: str, *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """Return the result of "module:function" on each rank, as JSON; an exception as {"raised", "message"}."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, function, json.dumps(args)]
        if n > 1:
            command = [mpiexec(), "-n", str(n), *command]
        done = run(command, limit_s)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(Path(folder, str(r)).read_text()) for r in range(n)]


def environment(more: dict[str, str]) -> dict[str, str]:
    """Return this process's environment and more, with what Open MPI needs to run as root on few cores."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **more,
    }


def run(
    command: list[str], limit_s: float = LIMIT_S, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command; return its exit code and output. After the limit its whole process group is ended."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(kwargs.pop("env", {})),
        cwd=kwargs.pop("cwd", HERE.parent),
        start_new_session=True,
        **kwargs,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"no end after {limit_s} s: {command}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _main(folder: str, function: str, args: str) -> None:
    folders = [folder for folder in HERE.iterdir() if folder.is_dir()]
    sys.path[:0] = [str(HERE), str(HERE.parent), *map(str, folders)]
    from rank0rl.mpi import comm

    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*json.loads(args))
    except Exception as error:
        result = {"raised": type(error).__name__, "message": str(error)}
    Path(folder, str(comm.get_rank())).write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
