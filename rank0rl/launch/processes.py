"""The processes of a job on this host: found, signaled, ended, and cleaned up after.

A supervisor locks the folder of its job for as long as it lives. So if the folder of a job of this user and this
host can be locked, its supervisor is dead.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rank0rl.launch import job, tree

try:
    import fcntl
except ImportError:  # Windows, where no ranks are started
    fcntl = None  # type: ignore[assignment]

# MPICH's process on each host, and the beginning of the name of a file that it leaves to its ranks. They
# read it when they start; before that no process has it open.
_PROXY, _PROXY_FILE = "hydra_pmi_proxy", "/tmp/hydra_hwloc_xmlfile_"  # noqa: S108
_START_S = 60.0  # a proxy's file that is older than this has been read
# Beginnings of the names of MPI's files.
_MPI_FILES = (
    *("/dev/shm/mpich_shm_", "/dev/shm/Intel_MPI_"),  # noqa: S108
    *("/dev/shm/sm_segment.", "/dev/shm/vader_segment.", "/dev/shm/ucx_shm_posix_"),  # noqa: S108
    _PROXY_FILE,
)
_PREFIX = "rank0rl-"  # of the name of a job's folder
_BEGUN_BYTES = 1000  # more than two numbers and the longest name of a host
_KILL_S = 2.0  # time for killed processes to disappear


class _Shell(NamedTuple):
    """The shell around a rank. Process ids are None on another host."""

    host: str
    parent_id: int | None = None
    """Process id of its parent, such as the launcher."""
    shell_id: int | None = None
    rank_id: int | None = None
    """Process id of the rank; None also if it has not begun."""


class Ranks:
    """The ranks of a job, as the files in its folder and the processes of this host show them."""

    def __init__(self, folder: Path, nprocs: int) -> None:
        self._folder, self.all = folder, range(nprocs)
        self.leaders = self.all[:: job.group_size()]
        """All but those that follow another one, and wait for nobody else."""

    def has(self, name: str, rank: int) -> bool:
        """Return True if a rank, or the shell around it, has written the file of this name."""
        return (self._folder / f"{name}.{rank}").exists()

    def ends(self) -> dict[int, int]:
        """Return rank -> exit status, of the ranks that have ended."""
        ends = {}
        for file in self._folder.glob("status.[0-9]*"):
            with contextlib.suppress(ValueError):  # it is being written
                ends[int(file.suffix[1:])] = int(file.read_text())
        return ends

    def shell(self, rank: int) -> _Shell | None:
        """Return the shell around a rank; None before its first instruction."""
        try:
            host, *ids = (self._folder / f"shell.{rank}").read_text().split()
        except (OSError, ValueError):
            return None
        return _Shell(host, *map(int, ids))

    def is_over(self, rank: int) -> bool:
        """Return True if a rank has ended, and its process too if it is on this host."""
        shell = self.shell(rank)
        return self.has("ended", rank) and tree.state(shell and shell.rank_id) in ("", "Z")

    def named(self) -> Iterator[tuple[str, int]]:
        """Yield name and id of each process on this host that the job needs: launcher, shells and ranks."""
        shells = {rank: shell for rank in self.all if (shell := self.shell(rank))}
        known = {shell.shell_id for shell in shells.values()}
        with contextlib.suppress(OSError, ValueError):
            launcher = int((self._folder / "launcher").read_text())
            yield f"the launcher, process {launcher},", launcher
            for process_id in tree.below(launcher, known):
                yield (
                    f"process {process_id} of the launcher, {tree.program(process_id)},",
                    process_id,
                )
        for rank, shell in shells.items():
            if shell.shell_id:
                yield f"the shell around {job.in_words(rank)}", shell.shell_id
            if shell.rank_id:
                yield job.in_words(rank), shell.rank_id

    def orphans(self) -> dict[int, str]:
        """Return rank -> reason, of the ranks on this host whose end nobody waits for."""
        found = {}
        for rank in self.all if _has_proc() else ():
            shell = self.shell(rank)
            if shell is None or shell.shell_id is None:
                continue
            if tree.state(shell.shell_id) in ("", "Z"):
                found[rank] = f"the shell around {job.in_words(rank)} was ended"
            elif tree.stat(shell.shell_id)[1:2] != [str(shell.parent_id)]:
                found[rank] = f"the launcher's process that started {job.in_words(rank)} was ended"
        return found

    def send(self, rank: int, signum: int) -> bool:
        """Send a signal to a rank on this host; return False if it is not there."""
        if self.has("status", rank):
            return False  # it has ended, and another process may have its id
        try:
            os.kill(int((self._folder / f"rank.{rank}").read_text()), signum)
        except (OSError, ValueError):
            return False
        return True

    def can_end(self, rank: int) -> bool:
        """Return True if a rank is there on this host, and is neither stopped nor a zombie."""
        shell = self.shell(rank)
        stays = shell is not None and tree.state(shell.rank_id) in ("T", "Z")
        return self.send(rank, 0) and not stays

    def words_under_way(self) -> bool:
        """Return True if the last words of a failed rank on this host have not come through the launcher."""
        for rank in self.all:
            shell = self.shell(rank)
            if shell is None or tree.state(shell.shell_id) in ("", "Z"):
                continue  # nothing says when they are there
            try:
                status = (self._folder / f"status.{rank}").read_text()
                failed = status != "0\n" or not self.has("ended", rank)
            except OSError:
                gone = shell.rank_id and tree.state(shell.rank_id) in ("", "Z")
                failed = bool(gone)  # its shell is about to write its status
            if failed and not (self.has("out", rank) and self.has("err", rank)):
                return True
        return False


def survivors(folder: Path) -> list[int]:
    """Return the ids of the job's processes: by its folder in their environment, else its ranks."""
    token = f"{job.FOLDER}={folder}".encode()
    found = []
    for file in tree.PROC.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    if not _has_proc():
        for file in folder.glob("rank.*"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(rank := int(file.read_text()), 0)  # raises if it has ended
                found.append(rank)
    return found


def kill_all(folder: Path) -> None:
    """Kill every process of the job, with what it has started. Some launchers give each rank a session."""
    end = time.monotonic() + _KILL_S
    while ids := survivors(folder):
        for process_id in ids:
            with contextlib.suppress(OSError):
                # Without /proc an id may be another process's by now, with a group of its own.
                if _has_proc() and os.getpgid(process_id) != os.getpgrp():
                    os.killpg(os.getpgid(process_id), signal.SIGKILL)
                os.kill(process_id, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.01)


def remove_mpi_files(folder: Path) -> None:
    """Remove the files of MPI that a job without any process has left on this host.

    These are files of this user, written since the job began, that no process of this host has open or
    in its memory. Without /proc nothing tells, and they stay.
    """
    if not _has_proc():
        return
    begun = (folder / "begun").stat().st_mtime
    left, may_be_read = set(), set()
    for beginning in _MPI_FILES:
        for file in Path(beginning).parent.glob(f"{Path(beginning).name}*"):
            with contextlib.suppress(OSError):
                about = file.lstat()
                if about.st_uid == os.getuid() and about.st_mtime >= begun:
                    left.add(str(file))
                    if beginning == _PROXY_FILE and time.time() - about.st_mtime < _START_S:
                        may_be_read.add(str(file))
    for process in tree.PROC.glob("[0-9]*") if left else ():
        left -= _files(process)
        process_id = int(process.name)
        # In a container without an init process, the proxies of all jobs before stay as zombies.
        if tree.program(process_id) == _PROXY and tree.state(process_id) != "Z":
            left -= may_be_read
    for name in left:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _has_proc() -> bool:
    return (tree.PROC / "self" / "environ").exists()


def _files(process: Path) -> set[str]:
    """Return the names of the files that a process has in its memory or open; none if it is ending."""
    names = set()
    with contextlib.suppress(OSError):
        names |= {"/" + m.partition("/")[2] for m in (process / "maps").read_text().splitlines()}
        if not names:  # it has given its memory back, and its open files are next
            return names
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                names.add(os.readlink(link))
    return names


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a job's folder. It ends with this process at the latest.

    Raises:
        OSError: if another process holds it, or the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)  # children do not inherit it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_job_folder() -> Iterator[Path]:
    """Make a folder for a job; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no locks here: it will not be found if it is left
                stack.enter_context(locked(folder))
            yield folder


def remove_leftovers() -> None:
    """Remove what dead jobs of this user left on this host: their folders, and MPI's files."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # It lives, another start removes it, or it is no folder of a job.
        with contextlib.suppress(OSError, LookupError, ValueError):
            if _is_ours(folder):
                with locked(folder):
                    if not survivors(folder):
                        remove_mpi_files(folder)
                        shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Return True if this user's supervisor on this host made the folder."""
    about = folder.lstat()  # first: nothing that another user put there is opened
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return False
    descriptor = os.open(folder / "begun", os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        return file.read(_BEGUN_BYTES).decode().split()[-1] == platform.node()
