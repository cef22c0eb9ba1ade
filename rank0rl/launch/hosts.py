"""The hosts of a job: their names and slots, ssh to them, and free space.

The first host is this one: rank 0 and the job's files are here. The others are reached by ssh, with
the user's own ssh settings.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# BatchMode asks no questions. A host that is silent for 3 intervals of 5 s is gone.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
SSH = ["ssh", *(word for option in _OPTIONS for word in ("-o", option)), "--"]
# A name or an IPv4 address, as in RFC 1123, section 2.1, with underscores. The launchers' own ssh would
# take a word with a hyphen before it for an option, such as one that runs a command.
_LABEL = r"\w([\w-]*\w)?"
_HOST = re.compile(
    rf"(?P<name>{_LABEL}(\.{_LABEL})*)(:(?P<after>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?", re.ASCII
)


@dataclass(frozen=True)
class Host:
    """A host, and the number of ranks that it may have."""

    name: str
    slots: int


def read_hosts(hosts: str | None, hostfile: str | Path | None) -> tuple[Host, ...]:
    """Return the hosts of a list or a file, each once; () without either.

    Args:
        hosts: list such as "a:8,b:8". A host without a number has one slot.
        hostfile: file with a host per line, as "a:8" or as "a slots=8". # begins a comment.

    Raises:
        ValueError: if both are given, a host is written in another way, or the first host is not
            this one.
    """
    if hosts and hostfile:
        raise ValueError("give the hosts once: got --hosts and --hostfile; leave one of them out")
    if hostfile:
        try:
            lines = Path(hostfile).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the host file {hostfile}: {error}") from None
    else:
        lines = (hosts or "").split(",") if hosts is not None else []
    words = [word for line in lines if (word := line.partition("#")[0].strip())]
    slots: dict[str, int] = {}
    for word in words:
        found = _HOST.fullmatch(word)
        number = int(found["after"] or found["slots"] or 1) if found else 0
        if not found or not number:
            raise ValueError(
                f"a host must be 'name:slots', in a file also 'name slots=8', with a host name or an "
                f"IPv4 address, and 1 slot or more: got {word!r}"
            )
        slots[found["name"]] = slots.get(found["name"], 0) + number
    if not slots and (hosts is not None or hostfile):
        raise ValueError(f"expected at least one host: got none in {hostfile or '--hosts'}")
    first = next(iter(slots), None)
    if first and not _is_here(first):
        raise ValueError(
            f"the first host must be this one, {platform.node()!r}, because rank 0 and the job's "
            f"files are here: got {first!r}; name this host first"
        )
    return tuple(Host(name, n) for name, n in slots.items())


def count_ranks(n: int | None, hosts: Sequence[Host], each: int = 1) -> int:
    """Return the number of ranks: n; if n is None, as many as fit into the slots, or 1 without hosts.

    Args:
        n: number of ranks, if it is given.
        hosts: hosts with their slots, one for a process.
        each: processes of each rank.

    Raises:
        ValueError: if the hosts have too few slots.
    """
    slots = sum(host.slots for host in hosts)
    if n is None and slots >= each:
        return slots // each
    n = n or 1
    if hosts and n * each > slots:
        of = f", ranks_per_env={each}" * (each > 1)
        raise ValueError(
            f"the hosts must have a slot for every rank: got nprocs={n}{of} and {slots} slots; lower "
            f"--nprocs, or give the hosts more slots"
        )
    return n


def _is_here(name: str) -> bool:
    """Return True if this host has that name. It is found by binding to its address, which only works here."""
    if name == platform.node():
        return True
    try:
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as end:
                end.bind(address)
                return True
    except OSError:  # no such name, or the name of another host
        pass
    return False


def listed(hosts: Sequence[Host]) -> str:
    """Return the hosts as --hosts takes them."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


class SshSessions:
    """An ssh session with each host but the first while entered; it ends when the host dies or is silent for 15 s.

    The output of ssh and the hosts that are left are files in the job's folder.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._sessions: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SshSessions:
        for name in [host.name for host in self._hosts[1:]]:
            with (self._folder / f"ssh.{name}").open("wb") as output:
                self._sessions[name] = subprocess.Popen(
                    [*SSH, name, "cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C must not reach ssh
                )
        return self

    def lost(
        self, patience_s: float = 0, wait: Callable[[float], object] = time.sleep
    ) -> dict[str, str]:
        """Return host -> last words of ssh, of the hosts that are gone or go within that time.

        Meanwhile `wait` is called again and again, with seconds to pass.
        """
        end = time.monotonic() + patience_s
        while not (gone := [name for name, s in self._sessions.items() if s.poll() is not None]):
            if not self._sessions or time.monotonic() >= end:
                return {}
            wait(0.05)
        left = listed([host for host in self._hosts if host.name not in gone])
        (self._folder / "hosts").write_text(left)
        return {name: self._last_line(name) for name in gone}

    def __exit__(self, *_: object) -> None:
        for session in self._sessions.values():
            session.kill()
            session.communicate()

    def _last_line(self, name: str) -> str:
        lines = (self._folder / f"ssh.{name}").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "ssh has ended")


# MPI does not say when there is too little space: ranks hang in its start, or end later by SIGSEGV or SIGBUS.
_SHARED = "/dev/shm"  # noqa: S108
# MB per rank, with some room to spare. Measured as the most blocks in use of a /dev/shm and a /tmp (tmpfs) of their
# own, with 2 to 16 ranks that start, gather 6 MB each and get 4 MB of weights. In /dev/shm: 5.39 MB per rank
# for MPICH 5.0.2, 0.07 to 0.09 MB for Open MPI 5.0.11. In /tmp: at most 0.4 MB for 16 ranks of either.
_SHARED_MB = {"MPICH": 6.0, "Open MPI": 0.25}
_TEMPORARY_MB, _TEMPORARY_MB_PER_RANK = 1.0, 0.03
_MORE_SHARED = "lower --nprocs, or give a container more with docker run --shm-size"


def free_space() -> dict[str, float]:
    """Return folder -> MB that are free there, of the folders of this host that MPI and jobs write to.

    MPICH's launcher writes to /tmp, whatever TMPDIR says. A tmpfs without a limit has no size, and is left
    out.
    """
    folders = {_SHARED, "/tmp", tempfile.gettempdir()}  # noqa: S108
    about = {folder: os.statvfs(folder) for folder in sorted(folders) if os.path.isdir(folder)}
    return {f: each.f_bavail * each.f_frsize / 1e6 for f, each in about.items() if each.f_blocks}


def shortages(free_mb: Mapping[str, float], vendor: str, ranks: int) -> list[str]:
    """Return a sentence for each folder that has too little room for ranks on its host, with what to do.

    Args:
        free_mb: result of `free_space` on that host.
        vendor: result of `mpiexec.vendor`. The need of others than MPICH and Open MPI in /dev/shm is not known.
        ranks: number of ranks on that host.
    """
    temporary_mb = _TEMPORARY_MB + _TEMPORARY_MB_PER_RANK * ranks
    found = []
    for folder, there_mb in free_mb.items():
        need_mb = ranks * _SHARED_MB.get(vendor, 0.0) if folder == _SHARED else temporary_mb
        if there_mb < need_mb:
            remedy = _MORE_SHARED if folder == _SHARED else "make room there"
            needs = f"{ranks} ranks of {vendor or 'this MPI'} need {need_mb:.1f} MB in {folder}"
            found.append(f"{needs}, and {there_mb:.1f} MB are free: {remedy}")
    return found


def check_free_space(ranks: int, vendor: Callable[[], str]) -> None:
    """Raise ValueError if this host has too little free space for ranks, in /dev/shm or a temporary folder.

    Args:
        ranks: number of ranks on this host.
        vendor: returns the launcher's `mpiexec.vendor`. It takes time, so it is called only if space is short.
    """
    try:
        free_mb = free_space()
    except FileNotFoundError as error:  # nothing can be written to any of them
        raise ValueError(f"ranks need a temporary folder that can be written to: {error}") from None
    if shortages(free_mb, "MPICH", ranks):  # which needs most
        short = shortages(free_mb, vendor(), ranks)
        if short:
            raise ValueError("; ".join(short))
