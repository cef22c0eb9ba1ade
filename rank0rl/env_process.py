"""An environment in a process of its own: a crash or a hang of it does not end the rank.

A rank starts one fork server (see env_server.py), which forks a process for each environment. On Linux
all of them end with the rank, however it ends. Elsewhere an environment that hangs outlives a rank that
was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from typing import Any

from rank0rl.env_server import SIGNALS, STACK_BYTES, as_exception, memory_file, shared_obs

_END_S = 10.0  # a fork server that takes longer to end a process, or itself, is killed


class EnvProcessError(RuntimeError):
    """An environment's process has ended, or was killed because it gave no answer in time."""


class EnvProcess:
    """An environment in a process of its own. It is used as a `gymnasium.Env`, but cannot render.

    What the environment raises is raised here, with its traceback as a note. Infos lose all but the
    action mask and the figures of `EpisodeInfo` on the way. After an `EnvProcessError` the process is gone: make another one.

    Args:
        make: makes the environment, in its process. It is pickled.
        timeout_s: seconds that a step, a reset or a close may take. None: no limit.
        start_timeout_s: seconds that making the environment may take, its imports included.
        preload: module that the fork server imports, once for all processes. It must begin nothing
            that they cannot share, such as a thread or a connection.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        preload: str = "gymnasium",
    ) -> None:
        """Start the process, and make the environment in it.

        Raises:
            EnvProcessError: if the process ends meanwhile, or takes longer.
            Exception: whatever `make` raises.
        """
        self.spec = SimpleNamespace(id="a new environment")
        """Holds the environment's id, for messages."""
        self._timeout_s: float | None = start_timeout_s
        self._connection, theirs = Pipe()
        with theirs, memory_file() as file:
            self._stack = mmap.mmap(file.fileno(), STACK_BYTES)
            files = theirs.fileno(), file.fileno()
            self._process_id = _server().fork(start_timeout_s, preload, *files)
            theirs.close()  # so that the end of the process is the end of the connection
            try:
                made = self._ask("make", sys.path, pickle.dumps(make))
                self.observation_space, self.action_space, self.rank0rl_parts, self.spec.id = made
                self._obs = shared_obs(file.fileno(), self.observation_space)
            except BaseException:
                self._end()
                raise
        self._timeout_s = timeout_s

    @property
    def unwrapped(self) -> EnvProcess:
        """This object: what it wraps is in another process."""
        return self

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment."""
        return self._with_obs(self._ask("reset", **kwargs))

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._with_obs(self._ask("step", action))

    def close(self) -> None:
        """Close the environment and end its process, unless it has ended."""
        if not self._connection.closed:
            try:
                self._ask("close")
            finally:
                self._end()

    def _ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        """Return what a method of `_Worker` returns; raise what it raises."""
        if self._connection.closed:
            raise EnvProcessError(f"the process of {self.spec.id} has ended: make a new one")
        request = pickle.dumps((what, args, kwargs))
        try:
            self._connection.send_bytes(request)
            if self._timeout_s is not None and not self._connection.poll(self._timeout_s):
                raise TimeoutError
            reply = self._connection.recv_bytes()
        except TimeoutError:
            self._end()
            raise EnvProcessError(
                f"the process of {self.spec.id} gave no answer to {what} within "
                f"{self._timeout_s:g} s and was killed; raise "
                f"--{'start' if what == 'make' else 'step'}-timeout if it needs longer"
            ) from None
        except (EOFError, OSError):
            error = EnvProcessError(f"the process of {self.spec.id} {self._end()} in {what}")
            if stack := self._stack[:].rstrip(b"\0").decode(errors="replace"):
                error.add_note(stack)
            raise error from None
        except BaseException:  # of a signal; the answer would be taken for that to the next request
            self._end()
            raise
        raised, answer = pickle.loads(reply)
        if raised:
            raise as_exception(*raised)
        return answer

    def _with_obs(self, answer: Any) -> Any:
        """Return an answer with the observation, if that lies in shared memory."""
        if isinstance(answer, tuple) and answer and answer[0] is ...:
            return self._obs.copy(), *answer[1:]
        return answer

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
        """Return the id of a new process that has these files: its connection and its memory.

        Raises:
            EnvProcessError: if the server cannot start one.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        return int(self._request(limit_s, preload, *files))

    def end(self, process_id: int) -> int | None:
        """Kill a process, if it lives; return its exit code, -s after signal s, None if unknown."""
        with contextlib.suppress(EnvProcessError):
            return self._request(_END_S, process_id)  # type: ignore[no-any-return]
        return None

    def _request(self, limit_s: float, what: str | int, *files: int) -> Any:
        """Return the server's answer. Kill a server that gives none.

        Raises:
            EnvProcessError: if it has ended, or gives no answer in time.
        """
        assert self._process
        why = "has ended"
        with contextlib.suppress(EOFError, OSError):
            self._control.send(what)
            for file in files:
                reduction.send_handle(self._control, file, self._process.pid)
            if self._control.poll(limit_s):
                return self._control.recv()
            why = f"gave no answer within {limit_s:g} s"
        self._process.kill()
        self._process.wait()
        raise EnvProcessError(f"cannot start an environment's process: the fork server {why}")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the server, as a new program: a fork of this one would share MPI's memory."""
        self._control, theirs = Pipe()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from rank0rl import env_server; "
                f"env_server.serve({theirs.fileno()}, {os.getpid()})"
            )
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # a terminal's Ctrl-C is for the rank
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.register(_stop, self._control, process)
        return process


def _stop(control: Connection[Any, Any], server: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()


@cache
def _server() -> _Server:
    return _Server()
