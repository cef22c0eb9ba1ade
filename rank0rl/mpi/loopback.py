"""No open ports on the network in a job whose ranks are all on one host: a step that each rank takes itself.

The ranks know from their launcher that nobody is elsewhere, whoever has started it. What cannot be
had is the port of Open MPI's launcher, see docs/several-machines.md.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

# The number of ranks on this host and of all ranks, as MPICH and Intel MPI, and as Open MPI say them.
_SIZES = (
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
)
# Without these, each rank listens on all networks, in case another one is elsewhere. Ranks on one host
# talk in shared memory. UCX serves MPICH and Open MPI, libfabric MPICH, and the others are their own.
_SETTINGS = {
    "UCX_TLS": "^tcp",
    "FI_PROVIDER": "^tcp,sockets,udp",
    "OMPI_MCA_btl": "^tcp",
    "I_MPI_FABRICS": "shm",
}


def stay_on_loopback(env: MutableMapping[str, str] = os.environ) -> None:
    """Keep MPI, which is not loaded yet, and its launcher off the network if all ranks are on this host.

    Args:
        env: variables of this rank. What the user has set stays.
    """
    alone = any(env.get(here, "") == env.get(of_all) for here, of_all in _SIZES)
    for name, value in _SETTINGS.items() if alone else ():
        env.setdefault(name, value)
    _close_launchers_ports(alone)


def _close_launchers_ports(alone: bool) -> None:
    """Close the ports that the launcher has left open in this rank; let them hear loopback only if alone.

    Each rank inherits the port of MPICH's launcher. What a rank sets on it counts in the launcher too,
    because they share one socket.
    """
    inherited = _sockets("self").items() & _sockets(str(os.getppid())).items()
    for descriptor, _ in inherited:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as port:
            if _listens(port):
                os.close(descriptor)
                if alone:  # not every system allows it
                    port.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def _sockets(process: str) -> dict[int, str]:
    """Return descriptor -> the socket's name in the kernel, of a process; nothing where there is no /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if (name := str(file.readlink())).startswith("socket:"):
                    found[int(file.name)] = name
    return found


def _listens(port: socket.socket) -> bool:
    is_ip = port.family in (socket.AF_INET, socket.AF_INET6)
    return is_ip and bool(port.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
