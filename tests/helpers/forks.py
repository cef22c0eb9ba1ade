"""Run Python commands in forks of a process that has imported torch and the like, which takes seconds of a core.

A fork has imported nothing of rank0rl, and ends as any Python does. The ranks that it starts are forks too: for them
`sys.executable` is a small program, beside a launcher of the same name, that asks for a fork, lends it its files, passes
signals on, and ends as the fork does. Tests of failures and of what is imported need new processes: see helpers.ranks.run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

LIMIT_S = 300
HERE = Path(__file__).parent.parent
HAS_FORKS = sys.platform == "linux"  # elsewhere, all are new processes
FORKED = "RANK0RL_TESTS_FORKED"  # id of the process that is a fork

# Asks for a fork that becomes this process. What is no script or module is left to Python, and a fork that begins anew.
_PROGRAM = """#!{python} -IS
import os, sys
args, me = sys.argv[1:], str(os.getpid())
words = [word for word in args if word != "-P"][:1]
if not words or (words[0].startswith("-") and words[0] != "-m") or os.environ.get("{forked}") == me:
    os.execv({python!r}, [{python!r}, *args])
import json, signal, socket
here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
numbers = [int(n) for n in os.listdir("/proc/self/fd")]
numbers = [n for n in numbers if n != here.fileno() and os.path.exists(f"/proc/self/fd/{{n}}")]
here.connect({address!r})
ignored = [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN]
asked = dict(args=args, env=dict(os.environ), cwd=os.getcwd(), numbers=numbers, ignored=ignored,
             cores=[*os.sched_getaffinity(0)])
data = json.dumps(asked).encode()
here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(data))
socket.send_fds(here, [data], numbers)
for number in (1, 2, 10, 12, 15):
    if number not in ignored:
        signal.signal(number, lambda number, _: here.send(b"%d" % number))
code = int(here.recv(100) or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code not in (-9, -19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def run(
    *args: str, env: dict[str, str] | None = None, cwd: Path = HERE.parent
) -> subprocess.CompletedProcess[str]:
    """Run "python script args" or "python -m module args"; return its exit code and output."""
    from helpers import ranks

    if not HAS_FORKS:
        return ranks.run([sys.executable, *args], LIMIT_S, env=env or {}, cwd=cwd)
    with (
        tempfile.TemporaryFile() as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        asked = {
            "args": args,
            "env": ranks.environment(env or {}),
            "cwd": str(cwd),
            "numbers": [0, 1, 2],
            "ignored": [],
            "cores": [*os.sched_getaffinity(0)],
        }
        code = _asked(json.dumps(asked).encode(), [nothing, out, err])
        for file in (out, err):
            file.seek(0)
        said = out.read(), err.read()
    assert code != -signal.SIGKILL, f"no end after {LIMIT_S} s: {args}\n{said}"
    return subprocess.CompletedProcess(args, code, *said)


def _asked(command: bytes, files: list[Any]) -> int:
    """Let the server fork for a command; return its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(command))
        here.connect(f"{folder()}/socket")
        socket.send_fds(here, [command], [file.fileno() for file in files])
        late = threading.Timer(LIMIT_S, lambda: here.send(b"%d" % signal.SIGKILL))
        late.start()
        try:
            return int(here.recv(100) or -signal.SIGKILL)
        finally:
            late.cancel()


@cache
def folder() -> str:
    """Start the process that is forked, which ends with this one. Return the folder of its programs, for PATH."""
    from helpers.ranks import mpiexec

    if not HAS_FORKS:
        return str(Path(sys.executable).parent)
    made = tempfile.TemporaryDirectory()
    address = f"{made.name}/socket"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address)
    server.listen(64)
    python = _PROGRAM.format(python=sys.executable, address=address, forked=FORKED)
    launcher = f'#!/bin/sh\nexec "{mpiexec()}" "$@"\n'
    for name, text in {"python": python, "mpiexec": launcher}.items():
        (Path(made.name) / name).write_text(text)
        (Path(made.name) / name).chmod(0o755)
    command = [sys.executable, __file__, str(server.fileno()), f"{made.name}/python"]
    env = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # a test's own
    process = subprocess.Popen(
        command, pass_fds=[server.fileno()], cwd=HERE.parent, env=env, start_new_session=True
    )
    server.close()
    atexit.register(made.cleanup)
    atexit.register(process.kill)
    return made.name


def _serve(server: socket.socket) -> dict[str, Any]:
    """Fork for every command that is asked for; return it in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getppid()
    server.settimeout(5)
    while True:
        try:
            asks, _ = server.accept()
        except TimeoutError:
            if os.getppid() != parent:  # which was killed
                os._exit(0)
            continue
        if not os.fork():
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _watch(asks)
        asks.close()


def _watch(asks: socket.socket) -> dict[str, Any]:
    """Fork for the command that is asked for, and return it there. Here, pass signals on until the fork ends."""
    asks.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    data, files, *_ = socket.recv_fds(asks, 1 << 22, 250)
    command = json.loads(data)
    process_id = os.fork()
    if process_id:
        for file in files:
            os.close(file)
        _wait(asks, process_id)
    asks.close()
    os.setsid()
    _take(files, command.pop("numbers"))
    os.sched_setaffinity(0, command.pop("cores"))
    for number in command.pop("ignored"):
        if number not in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores by itself
            signal.signal(number, signal.SIG_IGN)
    return command


def _wait(asks: socket.socket, process_id: int) -> NoReturn:
    ended = os.pidfd_open(process_id)
    while True:
        ready, _, _ = select.select([asks, ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
            asks.send(b"%d" % code)
            os._exit(0)
        number = int(asks.recv(100) or signal.SIGKILL)  # who has asked is gone
        (os.killpg if number == signal.SIGKILL else os.kill)(process_id, number)


def _take(files: list[int], numbers: list[int]) -> None:
    """Let these files have these numbers, and no others be open."""
    high = max(*files, *numbers) + 1
    for at, file in enumerate(files):
        os.dup2(file, high + at)
    os.closerange(0, high)
    for at, number in enumerate(numbers):
        os.dup2(high + at, number)
    os.closerange(high, high + len(files))


def _become(program: str, args: list[str], env: dict[str, str], cwd: str) -> None:
    """Be as a Python that was started with these arguments and this environment in this folder."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env, **{FORKED: str(os.getpid())})
    for number, mode in enumerate("rww"):
        name = ("stdin", "stdout", "stderr")[number]
        was = getattr(sys, name)
        stream = open(  # noqa: SIM115
            number,
            mode,
            buffering=1 if number == 2 else -1,
            encoding=was.encoding,
            errors=was.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable = program
    sys.orig_argv = [program, *args]
    is_safe, args = args[0] == "-P", [*args[args[0] == "-P" :]]
    first = "" if args[0] == "-m" else str(Path(args[0]).resolve().parent)
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [*([] if is_safe else [first or os.getcwd()]), *more]
    sys.argv = args[1:] if args[0] == "-m" else args
    if args[0] == "-m":
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = os.path.abspath(args[0])
        exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec"), vars(main))


def _end(call: Callable[[], None]) -> None:
    """End as Python does after a call, without its last step: to free all that the libraries have made takes a second."""
    code = 0
    try:
        call()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = end.code or 0 if isinstance(end.code, int | None) else 1
    except KeyboardInterrupt:
        raise  # ends by the signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        sys.exit(code)  # mpi4py takes leave in the last step
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).exit(code & 0xFF)  # MPICH takes leave of its launcher there


if __name__ == "__main__":
    for slow in ("torch", "numba", "tyro", "mujoco", "gymnasium.envs.classic_control.cartpole"):
        importlib.import_module(slow)
    command = _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(lambda: _become(sys.argv[2], **command))
