"""Free room in /dev/shm and in the temporary folders of a host, compared with what its ranks need.

MPI does not say when there is too little: ranks hang in its start, or end later by SIGSEGV or SIGBUS.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from rank0rl.mpi import launcher

_SHARED = "/dev/shm"  # noqa: S108
# MB per rank, with some room to spare. Measured as the most blocks in use of a /dev/shm and a /tmp (tmpfs) of their
# own, with 2 to 16 ranks that start, gather 6 MB each and get 4 MB of weights. In /dev/shm: 5.39 MB per rank
# for MPICH 5.0.2, 0.07 to 0.09 MB for Open MPI 5.0.11. In /tmp: at most 0.4 MB for 16 ranks of either.
_SHARED_MB = {"MPICH": 6.0, "Open MPI": 0.25}
_TEMPORARY_MB, _TEMPORARY_MB_PER_RANK = 1.0, 0.03
_MORE_SHARED = "lower --nprocs, or give a container more with docker run --shm-size"


def free() -> dict[str, float]:
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
        free_mb: result of `free` on that host.
        vendor: result of `launcher.vendor`. The need of others than MPICH and Open MPI in /dev/shm is not known.
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


def check(mpiexec: str, ranks: int) -> None:
    """Refuse to start ranks that this host has no room for.

    Raises:
        ValueError: if there is too little room in /dev/shm or in a temporary folder.
    """
    try:
        free_mb = free()
    except FileNotFoundError as error:  # nothing can be written to any of them
        raise ValueError(f"ranks need a temporary folder that can be written to: {error}") from None
    # Asking the launcher for its name takes time. With room enough for MPICH, which needs most, it is not asked.
    if shortages(free_mb, "MPICH", ranks):
        short = shortages(free_mb, launcher.vendor(mpiexec), ranks)
        if short:
            raise ValueError("; ".join(short))
