"""The fork server of a rank, and the processes of environments that it forks.

The server is a new program: it has none of MPI's memory, and imports Gymnasium but not torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import math
import mmap
import os
import pickle
import signal
import sys
import tempfile
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from rank0rl.env_spaces import name_of
from rank0rl.env_wrappers import EPISODE

Array = npt.NDArray[Any]

_NAMES = (
    "SIGINT",
    "SIGTERM",
    "SIGUSR1",
)  # Windows, where there are no such processes, has no SIGUSR1
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that environments outlast. They are blocked until the server handles them."""

STACK_BYTES = 1 << 16  # at the beginning of the memory, for the stack of a process that crashes


def serve(control: int, rank: int) -> None:
    """Fork and end processes as a rank asks, until the rank ends. The fork server does only this.

    Args:
        control: file of the connection to the rank.
        rank: the rank's process id.
    """
    _end_with_parent(rank)
    # A batch system may send these to all processes of a job: they are for ranks, which save first.
    for signum in SIGNALS:
        signal.signal(
            signum, lambda *_: None
        )  # not SIG_IGN, which an environment's programs inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _use_one_thread()
    server = os.getpid()
    connection: Connection[Any, Any] = Connection(control)
    processes: set[int] = set()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv()
            if isinstance(request, int):
                connection.send(_kill(request) if request in processes else None)
                processes.discard(request)
                continue
            with contextlib.suppress(Exception):  # the environment's process says what is wrong
                importlib.import_module(request)
            channel, memory = (reduction.recv_handle(connection) for _ in range(2))
            process_id = os.fork()
            if process_id == 0:
                connection.close()
                _Worker(channel, memory, server).serve()
                sys.exit()
            os.close(channel)
            os.close(memory)
            processes.add(process_id)
            connection.send(process_id)
    for process_id in processes:
        _kill(process_id)


def _kill(process_id: int) -> int:
    """Kill a child, and what it has started; return its exit code, -s if signal s had ended it before."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS, if it has ended
            kill(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


class _Worker:
    """An environment's process: it does what the rank asks for.

    Args:
        connection: file of the connection to the rank.
        file: file of the shared memory.
        server: the process id of the fork server.
    """

    def __init__(self, connection: int, file: int, server: int) -> None:
        """Make no environment yet."""
        os.setpgid(0, 0)  # what the environment starts is killed with it
        _end_with_parent(server)
        faulthandler.enable(file)  # writes where the memory begins
        self._file = file
        self._connection: Connection[Any, Any] = Connection(connection)

    def serve(self) -> None:
        """Answer requests until the rank is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                what, args, kwargs = pickle.loads(self._connection.recv_bytes())
                try:
                    answer = pickle.dumps((None, getattr(self, what)(*args, **kwargs)))
                except SystemExit as end:  # at once: the rank asks how, when the connection ends
                    os._exit(end.code if isinstance(end.code, int) else 1)
                except Exception as error:
                    answer = pickle.dumps((as_data(error), None))
                self._connection.send_bytes(answer)

    def make(self, path: list[str], make: bytes) -> tuple[Any, Any, dict[str, slice], str]:
        """Make the environment; return its spaces, the parts of observations, and its name."""
        sys.path[:] = path
        self._env = pickle.loads(make)()
        _use_one_thread()  # again: its imports may have loaded another BLAS
        self._obs = shared_obs(self._file, self._env.observation_space)
        env = self._env
        return (
            env.observation_space,
            env.action_space,
            getattr(env, "rank0rl_parts", {}),
            name_of(env),
        )

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment."""
        return self._without_obs(self._env.reset(**kwargs))

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._without_obs(self._env.step(action))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _without_obs(self, answer: Any) -> Any:
        """Move the observation to shared memory, where it fits exactly; drop what nobody reads of the info."""
        if not isinstance(answer, tuple) or len(answer) < 2:
            return answer  # it is wrong, and the rank says so
        obs, *rest, info = answer
        if type(obs) is np.ndarray and (obs.shape, obs.dtype) == (self._obs.shape, self._obs.dtype):
            self._obs[...] = obs
            obs = ...
        if isinstance(info, dict):
            info = {name: info[name] for name in ("action_mask", EPISODE) if name in info}
        return obs, *rest, info


def memory_file() -> Any:
    """Return a new file in memory, without a name: it goes with the processes that have it."""
    if sys.platform == "linux":
        file = os.fdopen(os.memfd_create("rank0rl"), "w+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.truncate(STACK_BYTES)
    return file


def shared_obs(file: int, space: Any) -> Array:
    """Return an array in a file's memory that has the shape and dtype of a space, if it has any."""
    shape = space.shape or ()
    dtype = space.dtype if isinstance(space.dtype, np.dtype) else np.dtype(float)
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    os.ftruncate(file, STACK_BYTES + nbytes)
    return np.ndarray(shape, dtype, mmap.mmap(file, nbytes, offset=STACK_BYTES))


def _end_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends. The end of the thread that started it counts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit()


def _use_one_thread() -> None:
    """Let BLAS and torch use one thread, as in a rank: the number of threads changes the last bits."""
    ThreadpoolController().limit(limits=1)
    if "torch" in sys.modules:  # the environment's own
        sys.modules["torch"].set_num_threads(1)


def as_data(error: Exception) -> tuple[str, str, bytes, str]:
    """Return an exception's name, text, pickled form, empty if it has none, and traceback."""
    trace = "".join(traceback.format_exception(error))
    text, pickled = "", b""
    with contextlib.suppress(Exception):  # not every exception can be pickled, or even printed
        text = str(error)
        again = pickle.dumps(error)
        if str(pickle.loads(again)) == text:
            pickled = again
    return type(error).__name__, text, pickled, trace


def as_exception(name: str, text: str, pickled: bytes, trace: str) -> Exception:
    """Return the exception of which `as_data` returned this, or one of that name and text."""
    error: Any = None
    with contextlib.suppress(Exception):
        error = pickle.loads(pickled)
    error = error if isinstance(error, Exception) else type(name, (RuntimeError,), {})(text)
    error.add_note(f"In the environment's process:\n{trace}")
    return error  # type: ignore[no-any-return]
