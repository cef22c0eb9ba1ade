"""Groups of processes that make the same calls: the first one is a rank and leads, the others follow it.

A job has groups if RANK0RL_GROUP is above 1. A leader sends a function to its followers, all call it, and each
follower answers whether it has returned or raised. Followers wait asleep.
"""

from __future__ import annotations

import atexit
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rank0rl.launch import FAILURE, job
from rank0rl.mpi import wait
from rank0rl.mpi.world import Comm, abort, everyone, groups

_CALL, _ANSWER, _WHY = 1, 2, 3  # tags
_SPIN_S = 2e-3  # the next call comes soon, most of the time
_RAISED_S = 10.0  # for all to come back from a call that one of them has ended by an exception
_CLOSE_S = 5.0  # for followers to come back, once a signal has ended a call of the leader's


class FollowerError(RuntimeError):
    """Failure of a call on a process that follows this rank. The message has its traceback."""


class Group:
    """The group that this rank leads.

    Args:
        control: communicator of the group, for nothing else.
    """

    def __init__(self, control: Comm) -> None:
        self._control = control
        self._others = range(1, control.size)
        self._owed = False  # answers to the last call
        self._stuck = ""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in every process of the group; return what it returns here.

        Args:
            function: it can be pickled, as its arguments can.
            args: its arguments.
            kwargs: its arguments by name.

        Raises:
            Exception: what the function raises here.
            FollowerError: if it raises in another process, or if one has not come back from an earlier call.
            ValueError: if the function or an argument cannot be pickled.
        """
        try:
            message = np.frombuffer(pickle.dumps((function, args, kwargs)), np.uint8)
        except Exception as error:  # an object's own pickling may raise anything
            raise ValueError(f"cannot be sent to the other processes: {error}") from None
        self._collect(_CLOSE_S)  # a signal has ended the call before
        if self._stuck:
            raise FollowerError(self._stuck)
        self._owed = True  # before a signal that ends the next line
        self._send(message)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            for note in [*self._collect(_RAISED_S), self._stuck]:
                error.add_note(note) if note else None
            raise
        if failures := self._collect():
            raise FollowerError("\n".join(failures))
        return result

    def release(self) -> None:
        """Let the followers go on to the end of their script. This is the last call."""
        if not job.failed():
            self._collect(_CLOSE_S)
            if not self._stuck:
                self._send(np.empty(0, np.uint8))

    def _send(self, message: Any) -> None:
        size = np.array([message.size])
        parts = [size, message] if message.size else [size]
        requests = [self._control.Isend(x, rank, _CALL) for rank in self._others for x in parts]
        wait.wait(self._control, "call", *requests, spin_s=_SPIN_S)

    def _collect(self, limit_s: float = float("inf")) -> list[str]:
        """Return why the last call has failed in followers; remember which of them have not come back in time."""
        if not self._owed or self._stuck:
            return []
        sizes = np.zeros((len(self._others), 1), np.int64)
        requests = [self._control.Irecv(sizes[i], i + 1, _ANSWER) for i in range(len(sizes))]
        try:
            wait.wait(self._control, "answer", *requests, spin_s=_SPIN_S, limit_s=limit_s)
        except TimeoutError:
            late = [i + 1 for i, request in enumerate(requests) if not request.Test()]
            self._stuck = (
                f"process {late[0]} of the group has not come back from a call within {limit_s:g} s after this one "
                f"had ended it"
            )
            for request in requests:
                request.Cancel()
            return []
        self._owed = False
        failures = []
        for i in np.flatnonzero(sizes):
            why = np.empty(int(sizes[i, 0]), np.uint8)
            request = self._control.Irecv(why, int(i) + 1, _WHY)
            wait.wait(self._control, "answer", request, spin_s=_SPIN_S)
            failures.append(why.tobytes().decode())
        return failures


@cache
def _comms() -> tuple[Comm, Comm]:
    """Return the communicators of this process's group: for calls, and for the functions that are called."""
    control = groups()[1]
    return control, control.Dup()


@cache
def my_group() -> Group | None:
    """Return the group that this rank leads; None where every rank is a single process."""
    if job.group_size() == 1 or everyone() is None:
        return None
    group = Group(_comms()[0])
    atexit.register(group.release)
    return group


def group_comm() -> Comm:
    """Return the communicator of this process's group, for the functions that it calls."""
    return _comms()[1]


def follow() -> bool:
    """Make the calls of this process's leader until it has reached the end of its script.

    Returns:
        False at once in a process that follows none.
    """
    if job.group_size() == 1 or everyone() is None:
        return False
    control, _ = _comms()  # collective in the group
    if groups()[0] is not None:
        my_group()  # which lets its followers go at the end, whatever comes before
        return False
    # Those that end a job are for rank 0, which saves first.
    for signum in (signal.SIGINT, *job.END_SIGNALS):
        signal.signal(signum, lambda *_: None)
    while (message := _received(control)).size:
        why = b""
        try:
            function, args, kwargs = pickle.loads(message.data)
            function(*args, **kwargs)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) and end.code else FAILURE
            job.fail(code, f"{_name()} called sys.exit({end.code!r})")
            abort(code)
        except Exception as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            why = f"In {_name()}:\n{text}".encode()
        _answer(control, why)
    return True


# Attributes of a communicator that send nothing.
_LOCAL = {
    *[
        "rank",
        "size",
        "name",
        "group",
        "handle",
        "info",
        "topology",
        "errhandler",
        "is_inter",
        "is_intra",
        "is_topo",
        "py2f",
        "Abort",
    ],
    *[
        "Get_rank",
        "Get_size",
        "Get_name",
        "Set_name",
        "Get_group",
        "Get_info",
        "Get_attr",
        "Get_topology",
        "Compare",
    ],
    *["Get_errhandler", "Set_errhandler", "Is_inter", "Is_intra"],
}


def guard_world(folder: Path, remedy: str) -> None:
    """Let calls of MPI.COMM_WORLD raise RuntimeError if code below a folder has led to them.

    Only Python's are seen. One rank, with all its processes, needs no guard.

    Args:
        folder: the folder, whose functions call somebody's code.
        remedy: end of the message.
    """
    ranks = everyone()
    if ranks is None or ranks.size == job.group_size():
        return
    from mpi4py import MPI

    class World(MPI.Intracomm):
        def __getattribute__(self, name: str) -> Any:
            if name not in _LOCAL and not name.startswith("__") and _is_below(folder):
                raise RuntimeError(
                    f"MPI.COMM_WORLD.{name} was called, but all {self.size} processes of the job are in it; "
                    f"{remedy}"
                )
            return super().__getattribute__(name)

    MPI.COMM_WORLD = World(MPI.COMM_WORLD)  # type: ignore[misc]


def _is_below(folder: Path) -> bool:
    """Return True if a function of a file below this folder is under way in this thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(folder):
            return True
        frame = frame.f_back
    return False


def _name() -> str:
    return job.in_words(job.world_rank() or 0)


def _received(control: Comm) -> Any:
    size = np.zeros(1, np.int64)
    wait.wait(control, "call", control.Irecv(size, 0, _CALL), spin_s=_SPIN_S, limit_s=float("inf"))
    message = np.empty(int(size[0]), np.uint8)
    if message.size:
        wait.wait(control, "call", control.Irecv(message, 0, _CALL), spin_s=_SPIN_S)
    return message


def _answer(control: Comm, why: bytes) -> None:
    """Tell the leader how a call has ended. End the job if it does not come back to hear of a failure."""
    size = np.array([len(why)])
    if not why:
        wait.wait(control, "answer", control.Isend(size, 0, _ANSWER), spin_s=_SPIN_S)
        return
    told = control.Issend(size, 0, _ANSWER)  # complete when it has been received
    try:
        wait.wait(control, "answer", told, spin_s=_SPIN_S, limit_s=_RAISED_S)
    except TimeoutError:
        late = f"its leader did not come back from the same call within {_RAISED_S:g} s"
        job.fail(FAILURE, f"{why.decode()}\n{late}")
        abort(FAILURE)
    wait.wait(
        control, "answer", control.Isend(np.frombuffer(why, np.uint8), 0, _WHY), spin_s=_SPIN_S
    )
