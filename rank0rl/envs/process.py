"""Environments in processes of their own, and the fork server of a rank that starts these.

A rank starts one fork server, which forks a process for each environment. On Linux all of them end with
the rank, however it ends. Elsewhere an environment that hangs outlives a rank that was killed.

The server is a new program: it has none of MPI's memory, and imports Gymnasium but not torch.
`multiprocessing` has such a server too, but imports the rank's script in every process, ends by signals that
are meant for ranks, and outlives a killed rank while an environment hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from typing import Any

from threadpoolctl import ThreadpoolController

from rank0rl.envs.info import EPISODE
from rank0rl.envs.spaces import name_of
from rank0rl.envs.state import State, Stateful, give_state, has_state, take_state
from rank0rl.launch import held, job, tree

_OWED_S = 3.0  # for an environment to come back from a step that a signal has cut short in the rank
_END_S = 10.0  # a fork server that takes longer to end a process, or itself, is killed


class EnvProcessError(RuntimeError):
    """An environment's process has ended, or was killed because it gave no answer in time."""


class EnvProcess(Stateful):
    """An environment in a process of its own. It is used as a `gymnasium.Env`, but cannot render.

    What the environment raises is raised here, with its traceback as a note. An info arrives with its
    action mask, the figures of `EpisodeInfo` and what `info` names only. After an `EnvProcessError` the process is gone: make
    another one.

    Args:
        make: makes the environment, in its process. It is pickled.
        timeout_s: seconds that a step, a reset or a close may take. None: no limit.
        start_timeout_s: seconds that making the environment may take, its imports included.
        preload: module that the fork server imports, once for all processes. It must begin nothing
            that they cannot share, such as a thread or a connection.
        info: further items of infos that arrive.

    Raises:
        EnvProcessError: if the process ends while it makes the environment, or takes longer.
        Exception: whatever `make` raises.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        preload: str = "gymnasium",
        info: Sequence[str] = (),
    ) -> None:
        self.spec = SimpleNamespace(id="a new environment")
        """Holds the environment's id, for messages."""
        self._timeout_s: float | None = start_timeout_s
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._begun = False  # a step
        self._owed = False  # an answer, since a step has begun, or a signal has cut short the wait
        self._connection, theirs = Pipe()
        self._poll = select.poll()  # faster than that of the connection
        self._poll.register(self._connection, select.POLLIN)
        with theirs:  # closed here, so that the end of the process is the end of the connection
            files = theirs.fileno(), self._stack.fileno()
            self._process_id = _server().fork(start_timeout_s, preload, *files)
        try:
            made = self._ask("make", sys.path, pickle.dumps(make), info)
        except BaseException:
            self._end()
            raise
        self.observation_space, self.action_space, *more = made
        self.rank0rl_parts, self.spec.id, self._has_state = more
        self._timeout_s = timeout_s

    @property
    def unwrapped(self) -> EnvProcess:
        """This object: what it wraps is in another process."""
        return self

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment."""
        return self._ask("reset", **kwargs)

    def rank0rl_begin_step(self, action: Any) -> None:
        """Begin a step, which the next call of `step` finishes, while other environments make theirs."""
        with contextlib.suppress(OSError):  # then `step` raises
            self._send("step", action)
            self._begun = True

    def step(self, action: Any) -> Any:
        """Step the environment, or finish the step that was begun with this action."""
        return self._ask("step", action)

    def has_state(self) -> bool:
        """Return True if the environment has a state."""
        return self._has_state

    def take_state(self) -> State:
        """Return the state of the environment."""
        taken: State = self._ask("take_state")
        return taken

    def give_state(self, taken: State) -> None:
        """Let the environment go on from a state."""
        self._ask("give_state", taken)

    def close(self) -> None:
        """Close the environment and end its process, unless it has ended."""
        if not self._connection.closed:
            try:
                if not self._owed or self._poll.poll(1000 * _OWED_S):
                    self._ask("close")
            finally:
                self._end()

    def _ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the process answers; raise what the environment raises."""
        if self._connection.closed:
            raise EnvProcessError(f"the process of {self.spec.id} has ended: make a new one")
        begun, self._begun = self._begun and what == "step", False
        try:
            if not begun:
                if self._owed:
                    self._answer()
                self._send(what, *args, **kwargs)
            reply = self._answer()
        except TimeoutError:
            self._end()
            raise EnvProcessError(
                f"the process of {self.spec.id} gave no answer to {what} within "
                f"{self._timeout_s:g} s and was killed; raise "
                f"--{'start' if what == 'make' else 'step'}-timeout if it needs longer"
            ) from None
        except (EOFError, OSError):
            error = EnvProcessError(f"the process of {self.spec.id} {self._end()} in {what}")
            self._stack.seek(0)
            if stack := self._stack.read().decode(errors="replace"):
                error.add_note(stack)
            raise error from None
        raised, answer = pickle.loads(reply)
        if raised:
            raise _as_exception(*raised)
        return answer

    def _send(self, what: str, *args: Any, **kwargs: Any) -> None:
        request = pickle.dumps((what, args, kwargs))
        with held:
            self._connection.send_bytes(request)
            self._owed = True

    def _answer(self) -> bytes:
        if not self._poll.poll(None if self._timeout_s is None else 1000 * self._timeout_s):
            raise TimeoutError
        with held:
            reply = self._connection.recv_bytes()
            self._owed = False
        return reply

    def _end(self) -> str:
        """Kill the process, if it lives; return how it has ended."""
        self._connection.close()
        code = _server().end(self._process_id)
        if code is None:
            return "ended with the fork server"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


class _Server:
    """The fork server of this rank, started when it is first needed."""

    _process: subprocess.Popen[bytes] | None = None

    def fork(self, limit_s: float, preload: str, *files: int) -> int:
        """Return the id of a new process that has these files: its connection and a file for its stack."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return int(self._ask(limit_s, preload, *files))

    def end(self, process_id: int) -> int | None:
        """Kill a process, if it lives; return its exit code, -s after signal s, None if unknown."""
        with contextlib.suppress(EnvProcessError):
            return self._ask(_END_S, process_id)
        return None

    def _ask(self, limit_s: float, what: str | int, *files: int) -> Any:
        """Return the server's answer. Kill a server that gives none."""
        assert self._process
        why = "has ended"
        with contextlib.suppress(EOFError, OSError):
            self._control.send(what)
            if files:  # multiprocessing would wait for a confirmation, without a limit
                with _as_socket(self._control) as control:
                    socket.send_fds(control, [b"f"], files)
            if self._control.poll(limit_s):
                return self._control.recv()
            why = f"gave no answer within {limit_s:g} s"
        self._process.kill()
        self._process.wait()
        raise EnvProcessError(f"cannot start an environment's process: the fork server {why}")

    def _start(self) -> None:
        """Start the server, as a new program: a fork of this one would share MPI's memory."""
        self._control, theirs = Pipe()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from rank0rl.envs import process; "
                f"process._serve({theirs.fileno()}, {os.getpid()})"
            )
            # The server inherits that signals are blocked, until it handles them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=subprocess.DEVNULL,
                    env=job.without_rank(os.environ),  # it may use MPI itself
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # a terminal's Ctrl-C is for the rank
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.register(_stop, self._control, self._process)


def _stop(control: Connection[Any, Any], server: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()


@cache
def _server() -> _Server:
    return _Server()


def _as_socket(connection: Connection[Any, Any]) -> socket.socket:
    its = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    its.settimeout(None)  # whatever the default is: both share whether they block
    return its


# What follows runs in the fork server and in the processes of environments.


def _serve(control: int, rank: int) -> None:
    """Fork and end processes as the rank with this process id asks, until it ends."""
    tree.become_subreaper()
    tree.end_with_parent(rank, signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: _end_with_rank(rank))
    # A batch system may send these to all processes of a job: they are for ranks, which save first.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)  # environments' programs would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _use_one_thread()
    server, processes, shared = os.getpid(), set[int](), set[int]()
    connection: Connection[Any, Any] = Connection(control)
    with contextlib.suppress(EOFError, ConnectionError), contextlib.ExitStack() as end:
        end.callback(signal.signal, signal.SIGUSR2, signal.SIG_IGN)  # what follows is not cut off
        while True:
            request = connection.recv()
            if isinstance(request, int):
                connection.send(_kill(request) if request in processes else None)
                processes.discard(request)
                # What it has started is a child of this process now.
                tree.kill_below(processes | shared)
                continue
            with contextlib.suppress(Exception):  # the environment's process says what is wrong
                importlib.import_module(request)
            shared = tree.children(server) - processes  # which the module has started, for all
            with _as_socket(connection) as from_rank:
                files = socket.recv_fds(from_rank, 1, 2)[1]
            if len(files) < 2:
                break  # the rank has ended, or no more files may be open
            channel, stack = files
            process_id = os.fork()
            if process_id == 0:
                connection.close()
                _run(channel, stack, server)
                sys.exit()
            os.close(channel)
            os.close(stack)
            processes.add(process_id)
            connection.send(process_id)
    for process_id in processes:
        with contextlib.suppress(ChildProcessError):  # the signal came when it had just ended
            _kill(process_id)
    tree.kill_below()


def _kill(process_id: int) -> int:
    """Kill a child, and what it has started; return its exit code, -s if signal s had ended it before."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS, if it has ended
            kill(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def _run(channel: int, stack: int, server: int) -> None:
    """Make an environment, then reset, step and close it as the rank asks, until the rank is gone.

    If the process crashes, the file `stack` gets its stack.
    """
    os.setpgid(0, 0)
    tree.become_subreaper()  # what the environment starts is killed with it
    tree.end_with_parent(server, signal.SIGKILL)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    faulthandler.enable(stack)
    connection: Connection[Any, Any] = Connection(channel)
    env: Any = None
    items: tuple[str, ...] = ()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            what, args, kwargs = pickle.loads(connection.recv_bytes())
            try:
                if what == "make":
                    env, items = _made(*args[:2]), ("action_mask", EPISODE, *args[2])
                    parts = getattr(env, "rank0rl_parts", {})
                    of = name_of(env), has_state(env)
                    answer = env.observation_space, env.action_space, parts, *of
                elif what in _OF_STATES:
                    answer = _OF_STATES[what](env, *args)
                else:
                    answer = _with_info(getattr(env, what)(*args, **kwargs), items)
                reply = pickle.dumps((None, answer))
            except SystemExit as end:  # at once: the rank asks how, when the connection ends
                os._exit(end.code if isinstance(end.code, int) else 1)
            except Exception as error:
                reply = pickle.dumps((_as_data(error), None))
            connection.send_bytes(reply)


_OF_STATES: dict[str, Callable[..., Any]] = {"take_state": take_state, "give_state": give_state}


def _made(path: list[str], make: bytes) -> Any:
    sys.path[:] = path
    env = pickle.loads(make)()
    _use_one_thread()  # again: its imports may have loaded another BLAS
    return env


def _with_info(answer: Any, items: Sequence[str]) -> Any:
    """Return an answer of the environment with these items of its info alone, which are read."""
    if isinstance(answer, tuple) and answer and isinstance(answer[-1], dict):
        *rest, info = answer
        return *rest, {name: info[name] for name in items if name in info}
    return answer  # if it is wrong, the rank says so


def _end_with_rank(rank: int) -> None:
    """Leave the server if its rank has ended, and not only the thread that has started it."""
    if os.getppid() != rank:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        raise EOFError


def _use_one_thread() -> None:
    """Let BLAS and torch use one thread, as in a rank: the number of threads changes the last bits."""
    ThreadpoolController().limit(limits=1)
    if "torch" in sys.modules:  # the environment's own
        sys.modules["torch"].set_num_threads(1)


def _as_data(error: Exception) -> tuple[str, str, bytes, str]:
    """Return an exception's name, text, pickled form, empty if it has none, and traceback."""
    text, pickled = "", b""
    with contextlib.suppress(Exception):  # not every exception can be printed, or pickled
        text = str(error)
        pickled = pickle.dumps(error)
    return type(error).__name__, text, pickled, "".join(traceback.format_exception(error))


def _as_exception(name: str, text: str, pickled: bytes, trace: str) -> Exception:
    """Return the exception that `_as_data` described, or one of its name and text."""
    error: Exception | None = None
    with contextlib.suppress(Exception):
        error = pickle.loads(pickled)
    if not isinstance(error, Exception) or str(error) != text:
        error = type(name, (RuntimeError,), {})(text)
    error.add_note(f"In the environment's process:\n{trace}")
    return error
