"""The hosts of a job: read from the command line or a file, told to the launcher, and kept in touch with.

The first one is this one: rank 0 and the files of a run are there. The others are reached by ssh, with
the user's own settings for it.
"""

from __future__ import annotations

import platform
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# No questions that nobody is there to answer. A host that is silent for 3 of these intervals is gone.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
SSH = ["ssh", *(word for option in _OPTIONS for word in ("-o", option))]
_HOST = re.compile(r"(?P<name>[\w.-]+)(:(?P<after>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may have."""

    name: str
    slots: int


def read_hosts(hosts: str | None, hostfile: str | Path | None) -> tuple[Host, ...]:
    """The hosts that are named, each once; none if none are.

    Args:
        hosts: such as "a:8,b:8"; a host without a number has one slot.
        hostfile: a host a line, as "a:8" or as "a slots=8"; # begins a comment.

    Raises:
        ValueError: if both are given, a line is none of these, or the first host is not this one.
    """
    if hosts and hostfile:
        raise ValueError("hosts are named once: got --hosts and --hostfile; leave one of them out")
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
                f"a host is 'name:slots', in a file also 'name slots=8', with 1 slot or more: got {word!r}"
            )
        slots[found["name"]] = slots.get(found["name"], 0) + number
    if not slots and (hosts is not None or hostfile):
        raise ValueError(f"expected one host or more: got none in {hostfile or '--hosts'}")
    first = next(iter(slots), None)
    if first and not is_here(first):
        raise ValueError(
            f"the first host must be the one where the command is typed, because rank 0 and the "
            f"run's files are there: got {first!r}, and this is {platform.node()!r}; name it first"
        )
    return tuple(Host(name, n) for name, n in slots.items())


def count_ranks(n: int | None, hosts: Sequence[Host]) -> int:
    """The number of ranks: n; as many as the hosts have slots, if it is None; 1 without hosts.

    Raises:
        ValueError: if there are not so many slots.
    """
    slots = sum(host.slots for host in hosts)
    if n is None:
        return slots or 1
    if hosts and n > slots:
        raise ValueError(
            f"the hosts must have a slot for every rank: got nprocs={n}, and {slots} slots; lower "
            f"--nprocs, or give the hosts more slots"
        )
    return n


def is_here(name: str) -> bool:
    """Whether this is the host of that name: only one's own address can be bound to."""
    if name == platform.node():
        return True
    try:
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as end:
                end.bind(address)
                return True
    except OSError:  # no such name, or another host's
        pass
    return False


def switches(vendor: str, hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """A launcher's switches for ranks on these hosts, the first host's first, with this environment.

    MPICH's gives the ranks the environment of the launcher, on every host; Open MPI's what it is told
    to, besides its own variables.

    Raises:
        ValueError: if the vendor's switches are not known here.
    """
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if vendor == "MPICH":
        return ["-hosts", listed]
    if vendor == "Open MPI":
        own = ("OMPI_", "PRTE_", "PMIX_")
        names = [name for name in env if name.isidentifier() and not name.startswith(own)]
        passed = [word for name in names for word in ("-x", name)]
        return ["--host", listed, "--map-by", "slot:oversubscribe", *passed]
    raise ValueError(
        f"--hosts needs the launcher of MPICH or Open MPI: got {vendor or 'one that does not say whose it is'}; "
        f"name the hosts in its own words with --mpiexec"
    )


class Contact:
    """While entered, a session of ssh with each host, that ends when the host does, or is silent for 15 s.

    Args:
        names: of the hosts.
        folder: for what ssh says.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """Nothing is started yet."""
        self._names, self._folder = names, folder
        self._sessions: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Contact:
        """Begin the sessions, in the background; what runs there ends with this process."""
        for name in self._names:
            with (self._folder / f"ssh.{name}").open("wb") as said:
                self._sessions[name] = subprocess.Popen(
                    [*SSH, name, "cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    start_new_session=True,  # Ctrl-C is for the job
                )
        return self

    def lost(self, patience_s: float = 0) -> dict[str, str]:
        """Hosts that are gone, or become so within that time -> what ssh says."""
        end = time.monotonic() + patience_s
        while not (gone := [name for name, s in self._sessions.items() if s.poll() is not None]):
            if not self._sessions or time.monotonic() >= end:
                return {}
            time.sleep(0.05)
        return {name: self._said(name) for name in gone}

    def __exit__(self, *_: object) -> None:
        """End the sessions."""
        for session in self._sessions.values():
            session.kill()
            session.communicate()

    def _said(self, name: str) -> str:
        lines = (self._folder / f"ssh.{name}").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "ssh has ended")
