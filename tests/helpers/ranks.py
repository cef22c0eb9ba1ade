"""Run a function of a test module on n ranks, in processes of their own, under a time limit."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
LIMIT_S = 300  # catches hangs; an idle machine takes seconds, a busy one minutes


def mpiexec() -> str:
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpiexec"
    )
    assert found, "the tests need mpiexec: pip install mpi4py mpich"
    return found


def on_ranks(n: int, function: str, *args: Any, fresh: bool = False) -> list[Any]:
    """Return the result of "module:function" on each rank, as JSON; an exception as {"raised", "message"}.

    The ranks live on for the next call, because to start one takes seconds of a core. So the function
    must undo what it patches.

    Args:
        n: number of ranks.
        function: module of the tests, and a function of it.
        args: its arguments, as JSON.
        fresh: True for ranks that have done nothing before, and end afterwards.
    """
    ranks = Ranks(n) if fresh or n not in _ranks else _ranks.pop(n)
    results = ranks.call(function, args)
    if fresh or len({"raised" in result for result in results if isinstance(result, dict)}) > 1:
        ranks.end()  # after an error of one rank alone they are at different places
    else:
        _ranks[n] = ranks
    return results


class Ranks:
    """A job of n ranks that call functions, one after the other, until it is ended."""

    def __init__(self, n: int) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/socket")
            server.listen(n)
            server.settimeout(LIMIT_S)
            command = [sys.executable, __file__, f"{folder}/socket"]
            self._job = subprocess.Popen(
                [mpiexec(), "-n", str(n), *command] if n > 1 else command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment({}),
                cwd=HERE.parent,
                start_new_session=True,
            )
            atexit.register(self.end)
            ranks = [server.accept()[0].makefile("rw") for _ in range(n)]
        self._ranks = dict(sorted((int(rank.readline()), rank) for rank in ranks))

    def call(self, function: str, args: tuple[Any, ...]) -> list[Any]:
        late = threading.Timer(LIMIT_S, self.end)  # then its rank's line is empty
        late.start()
        for rank in self._ranks.values():
            rank.write(json.dumps([function, args]) + "\n")
            rank.flush()
        lines = [rank.readline() for rank in self._ranks.values()]
        late.cancel()
        if not all(lines):
            self.end()
            self._output.seek(0)
            raise AssertionError(f"no end within {LIMIT_S} s: {function}\n{self._output.read()}")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._job.pid, signal.SIGKILL)
        self._job.wait()


_ranks: dict[int, Ranks] = {}


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


def typed(
    command: str, cwd: Path = HERE.parent, env: dict[str, str] | None = None, **kwargs: Any
) -> list[str]:
    """Run a command as at a prompt, where `python` (see helpers.forks), `mpiexec` and rank0rl are found; return its lines."""
    from helpers import forks

    folders = [forks.folder(), str(Path(sys.executable).parent), os.environ["PATH"]]
    found = {
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(HERE.parent),
    }
    done = run(shlex.split(command), env={**found, **(env or {})}, cwd=cwd, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def _main(address: str) -> None:
    """Call, on one rank, the functions that are asked for."""
    folders = [folder for folder in HERE.iterdir() if folder.is_dir()]
    sys.path[:0] = [str(HERE), str(HERE.parent), *map(str, folders)]
    from rank0rl.mpi import comm

    with socket.socket(socket.AF_UNIX) as test:
        test.connect(address)
        with test.makefile("rw") as asked:
            print(comm.get_rank(), file=asked, flush=True)
            for line in asked:
                function, args = json.loads(line)
                module, _, name = function.partition(":")
                try:
                    result = getattr(importlib.import_module(module), name)(*args)
                except Exception as error:
                    result = {"raised": type(error).__name__, "message": str(error)}
                print(json.dumps(result), file=asked, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
