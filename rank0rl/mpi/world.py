"""The ranks of the job: from the start of MPI to its end, and what errors do to them.

MPI is loaded only where there is more than one rank.

Before the first message of a collective, `attempt` catches whatever goes wrong on this rank. The rank
still takes part in the exchange of layouts, tells the others, and all of them raise the same error.
What goes wrong later, on one rank alone, leaves ranks that wait for different messages. `collective`
remembers such an error, and that rank refuses every later collective.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from rank0rl.launch import job

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.MPI import Intracomm

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Exception)

Comm: TypeAlias = "Intracomm"

_FLUSH_S = 0.2  # time for a launcher to pass on stderr: some launchers drop it when they end
_END_TAG, _STOP_TAG = 32_000, 32_001  # MPI guarantees tags up to 32,767
_STOP_S = 3.0  # for ranks to end when rank 0 says so; the launcher ends one that works longer
_PROGRAMS_S = 20.0  # for other programs to have begun, before a note says what they must do
_LATE = (
    "note: still waiting for the other programs of the job: each of them must split MPI_COMM_WORLD twice after "
    "MPI_Init, see docs/simulators.md"
)

_IN_STEP = "ranks_are_in_step"  # attribute of errors after which a collective may follow

_windows: list[MPI.Win] = []
_alone: list[str] = []  # errors of this rank alone, which the next exchange of layouts tells
_broken: list[str] = []  # the error that left this rank out of step, if there was one


@functools.cache
def world() -> Comm | None:
    """Load MPI and return all ranks of the job; None in a single process, where MPI is never loaded.

    Ranks that are groups of processes are known by the first process of each: see group.py.

    Raises:
        RuntimeError: in another process of a group.
        WrongLaunch: as `everyone`.
    """
    ranks = leaders()
    if ranks is None and everyone() is not None:
        raise RuntimeError(
            f"this process, {job.in_words(job.world_rank() or 0)}, is no rank of rank0rl: make collective calls "
            f"in the first process of a group, or on the group's own communicator"
        )
    return ranks


@functools.cache
def leaders() -> Comm | None:
    """Return the communicator of all ranks; None in a single process, and in one that follows a rank."""
    if everyone() is None or job.group_size() == 1:
        return everyone()
    return groups()[0]


@functools.cache
def groups() -> tuple[Comm | None, Comm]:
    """Return the communicator of all ranks, None in a process that follows one; and that of its group."""
    from mpi4py import MPI

    comm, size = everyone(), job.group_size()
    assert comm is not None
    leads = comm.rank % size == 0
    ranks = comm.Split(0 if leads else MPI.UNDEFINED, comm.rank)
    group = MPI.Intracomm(comm.Split(comm.rank // size, comm.rank))
    return (MPI.Intracomm(ranks) if leads else None), group


@functools.cache
def everyone() -> Comm | None:
    """Load MPI and return all processes of the job; None in a single process.

    Raises:
        WrongLaunch: if MPI sees another number of ranks than the launcher started. This happens
            when mpi4py and mpiexec belong to different MPIs: every rank would run alone. Or if
            there is no mpi4py.
    """
    size = job.world_size()
    if size is None or (size == 1 and not job.has_programs()):
        return None
    job.mark_loading_mpi()
    atexit.unregister(job.mark_ended)  # from now on ranks end together: see _leave
    try:
        import mpi4py
    except ModuleNotFoundError:
        why = f"more than one rank needs mpi4py, and {sys.executable} has none"
        raise job.WrongLaunch(f"{why}: pip install mpi4py mpich") from None

    ours = "mpi4py.MPI" not in sys.modules
    if ours:
        mpi4py.rc.finalize = False  # a rank that ends early would wait there: see _leave
    # This component of Open MPI would say on stderr that it found no network.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    with warnings.catch_warnings(), _files_in(job.my_folder()), _start_limit():
        warnings.simplefilter("ignore", RuntimeWarning)  # about another MPI's launcher: see below
        from mpi4py import MPI

    comm = programs()[0] if job.has_programs() else MPI.COMM_WORLD
    requested = job.requested_ranks() or size
    library = _library()
    if comm.size == 1 and job.in_step():
        raise job.WrongLaunch(
            f"srun started {size} ranks, and each of them sees itself alone, because it did not give "
            f"them the PMI of their MPI ({library}): start them with srun "
            f"--mpi={'pmix' if 'Open MPI' in library else 'pmi2'}"
        )
    first = (job.world_rank() or 0) - comm.rank
    if job.has_programs() and (first or comm.size != size):
        raise job.WrongLaunch(
            f"the first program of the job must be this one, with --nprocs ranks: got --nprocs {size}, and the launcher "
            f"started {comm.size} ranks of it after {first} others"
        )
    if not comm.size == size == requested:
        raise job.WrongLaunch(
            f"every rank must see the whole job: {requested} ranks were requested, the launcher "
            f"started {size}, and MPI sees {comm.size}; mpiexec and mpi4py must belong to the same "
            f"MPI (here {library}): pip install mpi4py mpich"
        )
    if not job.supervised():
        from rank0rl.launch import fork  # now: after an error, an import may fail

        sys.excepthook = functools.partial(_end_job, fork.report)
    atexit.register(_leave, comm, ours)
    return comm


@functools.cache
def programs() -> tuple[Comm, Comm]:
    """Return two communicators of a job of several programs: this one's, and that of its ranks and the first one of each other.

    Collective over all programs: each of them splits COMM_WORLD twice, see docs/simulators.md.
    """
    from mpi4py import MPI

    late = threading.Timer(_PROGRAMS_S, print, [_LATE], {"file": sys.stderr, "flush": True})
    late.daemon = True
    late.start()
    world = MPI.Intracomm(MPI.COMM_WORLD)
    number: Any = world.Get_attr(MPI.APPNUM)
    ours = MPI.Intracomm(world.Split(number, 0))
    firsts = MPI.Intracomm(world.Split(0, 0))
    late.cancel()
    return ours, firsts


@contextlib.contextmanager
def _start_limit() -> Iterator[None]:
    """End this process if MPI does not begin in time, as where a PMI has lost a rank. A supervisor sees that for itself."""
    if job.supervised():
        yield
        return
    limit_s = float(os.environ.get(job.START_TIMEOUT, "300"))
    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _files_in(folder: Path | None) -> Iterator[None]:
    """Let MPI make its files in the job's folder. Open MPI leaves some where a rank does not reach its launcher."""
    before = os.environ.get("TMPDIR")
    if folder:
        os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TMPDIR", None)
        if before is not None:
            os.environ["TMPDIR"] = before


def self_comm() -> Comm:
    """Return the communicator of this process alone. MPI is loaded, if it was not."""
    everyone()
    from mpi4py import MPI

    return MPI.COMM_SELF


def among(comm: Comm | None) -> Comm | None:
    """Return this communicator, or that of all ranks for None; None in a single process.

    Raises:
        ValueError: if it has been freed.
    """
    if comm is None:
        return world()
    if not comm:
        raise ValueError("the communicator has been freed: pass one that is in use")
    return comm


def get_rank(comm: Comm | None = None) -> int:
    """Return this process's number among the ranks, from 0."""
    comm = among(comm)
    return comm.rank if comm else 0


def get_nworkers(comm: Comm | None = None) -> int:
    """Return the number of ranks."""
    comm = among(comm)
    return comm.size if comm else 1


def print0(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0; do nothing on the other ranks."""
    if get_rank() == 0:
        print(*args, **kwargs)


def mpi_version() -> str:
    """Return the name and version of the MPI library; "none" in a single process."""
    return _library() if everyone() else "none"


def _library() -> str:
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\0").split())  # of Open MPI


def has_threads() -> bool:
    """Return True if several threads of a rank may send and receive."""
    if everyone() is None:
        return True
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def split(color: int, comm: Comm | None = None) -> Comm | None:
    """Return a communicator of the ranks that pass the same color; None in a single process.

    Collective: every rank calls this, in the same order.
    """
    comm = among(comm)
    if comm is None:
        return None
    from mpi4py import MPI

    return MPI.Intracomm(comm.Split(color, comm.rank))


class OutOfStep(BaseException):
    """Refusal of a collective, because an earlier one failed on this rank, and perhaps on this one alone.

    It is not an `Exception`, so that the script that has swallowed the first error ends now.
    """


def attempt(prepare: Callable[[], T], nothing: Any) -> tuple[T, str]:
    """Return what this rank prepares for a collective, and ""; or `nothing`, and what is wrong."""
    try:
        return prepare(), ""
    except (TypeError, ValueError) as error:
        return nothing, str(error) or repr(error)
    except Exception as error:  # objects of users may raise anything
        return nothing, f"{type(error).__name__}: {error}"


def agreed(error: E) -> E:
    """Mark an error that every rank raises, so that collectives may follow it."""
    setattr(error, _IN_STEP, True)
    return error


def alone(error: E) -> E:
    """Mark an error that other ranks may not have, raised where no message is on its way.

    The next exchange of layouts fails on every rank, unless each has raised equally many.
    """
    _alone.append(f"{type(error).__name__}: {error}")
    return agreed(error)


def raised_alone() -> list[str]:
    """Return the errors of this rank that other ranks may not have, oldest first."""
    return _alone


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse to run after an error in it, or in another one, on this rank alone."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _broken:
            raise OutOfStep(
                f"an earlier collective failed on rank {get_rank()}, and the others may not know of it, so "
                f"that the ranks are no longer in step: {_broken[0]}; let such an error end the job"
            )
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if world() and not hasattr(error, _IN_STEP):
                _broken.append(f"{type(error).__name__}: {error}")
            raise

    return call


def abort(code: int) -> None:
    """End the whole job at once with this exit code. Any single rank may call it."""
    sys.stdout.flush()
    sys.stderr.flush()
    comm = None if job.has_programs() else everyone()
    if not job.has_programs() and (comm is None or job.supervised()):
        os._exit(code)
    from mpi4py import MPI

    time.sleep(_FLUSH_S)
    with contextlib.suppress(OSError):  # MPI's own message about an abort says nothing new
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    (comm or MPI.COMM_WORLD).Abort(code)


def stop(code: int) -> None:
    """End the whole job with this exit code, which is no failure. Rank 0 only.

    In a step of Slurm, rank 0 tells the others: Slurm makes an exit code of its own of an abort, and
    does not act on one while it cancels a job.
    """
    comm = everyone()
    if comm and job.in_step():
        from mpi4py import MPI

        end = time.monotonic() + _STOP_S
        others = range(1, comm.size)
        told = [comm.Issend(bytearray([code]), rank, _STOP_TAG) for rank in others]
        while not (all_told := MPI.Request.Testall(told)) and time.monotonic() < end:
            time.sleep(1e-3)
        if all_told:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    abort(code)


def free_at_end(window: MPI.Win) -> None:
    """Unlock and free a window when all ranks have reached the end of the script."""
    _windows.append(window)


def leave_if_told() -> None:
    """End this rank if rank 0 has said so by `stop`. Any thread that waits for other ranks calls it."""
    if not job.in_step():
        return
    comm = everyone()
    if comm and comm.rank and comm.Iprobe(0, _STOP_TAG):
        code = bytearray(1)
        comm.Recv(code, 0, _STOP_TAG)
        end = time.monotonic() + _FLUSH_S
        while time.monotonic() < end:  # the receipt is on its way
            comm.Iprobe(0, _STOP_TAG)
            time.sleep(1e-3)
        os._exit(code[0])


def _leave(comm: Comm, finalize: bool) -> None:
    """Wait, at the end of the script, until the other ranks end too, or until one has failed.

    `MPI.Finalize` also waits, but forever if a rank never calls it.
    """
    from mpi4py import MPI

    if job.failed():
        return
    # Tagged messages: a barrier could be matched with another collective of a rank that is not here.
    job.collective_recorder().begin(job.SCRIPT_END)
    job.collective_recorder().wait()
    others = range(1, comm.size) if comm.rank == 0 else range(1)
    for way in (comm.Irecv, comm.Isend) if comm.rank == 0 else (comm.Isend, comm.Irecv):
        requests = [way(bytearray(1), rank, _END_TAG) for rank in others]
        while not MPI.Request.Testall(requests):
            time.sleep(1e-3)
            if job.failed():
                return
    for window in _windows:
        window.Unlock_all()
        window.Free()
    if finalize:
        MPI.Finalize()
    job.mark_ended()


def _end_job(
    report: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """End the job after an uncaught exception on one rank, where there is no supervisor."""
    try:
        report(kind, error, trace)
    finally:  # whatever else fails
        abort(1)
