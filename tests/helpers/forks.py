"""Run a Python command in a fork of a process that has imported torch and the like, which takes seconds.

The fork has imported nothing of rank0rl, and ends as any Python does. Commands that start ranks, and
tests of what is imported, need a new process: see helpers.ranks.run.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import IO, Any

LIMIT_S = 300
HERE = Path(__file__).parent.parent


def run(
    *args: str, env: dict[str, str] | None = None, cwd: Path = HERE.parent
) -> subprocess.CompletedProcess[str]:
    """Run "python script args" or "python -m module args"; return its exit code and output."""
    server = _server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        asked = json.dumps({"args": args, "env": {**os.environ, **(env or {})}, "cwd": str(cwd)})
        try:
            code = _asked(server, asked, out, err)
        except BaseException:  # what it says next would be of this command
            _server.cache_clear()
            server.close()
            raise
        for file in (out, err):
            file.seek(0)
        said = out.read(), err.read()
    assert code != -signal.SIGKILL, f"no end after {LIMIT_S} s: {args}\n{said}"
    return subprocess.CompletedProcess(args, code, *said)


def _asked(server: socket.socket, command: str, out: IO[str], err: IO[str]) -> int:
    """Let the server fork for a command; return its exit code."""
    socket.send_fds(server, [command.encode()], [out.fileno(), err.fileno()])
    process_id = int(server.recv(100))
    late = threading.Timer(LIMIT_S, os.killpg, [process_id, signal.SIGKILL])
    late.start()
    try:
        return int(server.recv(100))
    finally:
        late.cancel()


@cache
def _server() -> socket.socket:
    """Start the process that is forked; it ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(there.fileno())]
    env = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # a test's own
    fds, where = [there.fileno()], HERE.parent
    subprocess.Popen(command, pass_fds=fds, cwd=where, env=env, start_new_session=True)
    there.close()
    atexit.register(here.close)
    return here


def _serve(server: socket.socket) -> dict[str, Any]:
    """Fork for every command that is asked for; return it in the fork."""
    while True:
        asked, files, *_ = socket.recv_fds(server, 1 << 20, 2)
        if not asked:
            os._exit(0)
        process_id = os.fork()
        if not process_id:
            os.setsid()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
            return json.loads(asked)
        for file in files:
            os.close(file)
        server.send(b"%d" % process_id)
        server.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]))


def _become(args: list[str], env: dict[str, str], cwd: str) -> None:
    """Be as a Python that was started with these arguments and this environment in this folder."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *args]
    first = "" if args[0] == "-m" else str(Path(args[0]).resolve().parent)
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [first or os.getcwd(), *more]
    sys.argv = args[1:] if args[0] == "-m" else args
    if args[0] == "-m":
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    for slow in ("torch", "numba", "tyro", "mujoco", "gymnasium.envs.classic_control.cartpole"):
        importlib.import_module(slow)
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as listening:
        command = _serve(listening)
    _become(**command)
