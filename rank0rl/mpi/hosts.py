"""The hosts of a job: read from the command line or a file, passed to the launcher, and watched.

The first host is this one: rank 0 and the job's files are here. The others are reached by ssh, with
the user's own ssh settings.
"""

from __future__ import annotations

import platform
import re
import socket
import subprocess
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
    if first and not is_here(first):
        raise ValueError(
            f"the first host must be this one, {platform.node()!r}, because rank 0 and the job's "
            f"files are here: got {first!r}; name this host first"
        )
    return tuple(Host(name, n) for name, n in slots.items())


def count_ranks(n: int | None, hosts: Sequence[Host]) -> int:
    """Return the number of ranks: n; if n is None, one per slot of the hosts, or 1 without hosts.

    Raises:
        ValueError: if the hosts have fewer than n slots.
    """
    slots = sum(host.slots for host in hosts)
    if n is None:
        return slots or 1
    if hosts and n > slots:
        raise ValueError(
            f"the hosts must have a slot for every rank: got nprocs={n} and {slots} slots; lower "
            f"--nprocs, or give the hosts more slots"
        )
    return n


def is_here(name: str) -> bool:
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


def switches(vendor: str, hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """Return a launcher's switches to start ranks on these hosts, in order, with its environment.

    MPICH's launcher passes its whole environment to the ranks on every host. Open MPI's passes only
    its own variables and those that it is told to.

    Args:
        vendor: result of `launcher.vendor`.
        hosts: hosts of the ranks.
        env: environment of the launcher.

    Raises:
        ValueError: if the switches of this vendor are not known.
    """
    if vendor == "MPICH":
        return ["-hosts", listed(hosts)]
    if vendor == "Open MPI":
        own = ("OMPI_", "PRTE_", "PMIX_")
        names = [name for name in env if name.isidentifier() and not name.startswith(own)]
        passed = [word for name in names for word in ("-x", name)]
        return ["--host", listed(hosts), "--map-by", "slot:oversubscribe", *passed]
    raise ValueError(
        f"--hosts needs the launcher of MPICH or Open MPI: got "
        f"{vendor or 'a launcher that does not tell which MPI it belongs to'}; give the hosts by its "
        f"own switches, in --mpiexec"
    )


class Contact:
    """An ssh session with each host but the first while entered; it ends when the host dies or is silent for 15 s.

    Args:
        hosts: hosts of the job.
        folder: folder of the job, for the output of ssh, and for the hosts that are left.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        """Start nothing yet."""
        self._hosts, self._folder = hosts, folder
        self._sessions: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Contact:
        """Start the sessions in the background. They end with this process."""
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

        Args:
            patience_s: seconds to wait for a host to go.
            wait: called again and again in that time, with seconds to pass.
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
        """End the sessions."""
        for session in self._sessions.values():
            session.kill()
            session.communicate()

    def _last_line(self, name: str) -> str:
        lines = (self._folder / f"ssh.{name}").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "ssh has ended")
