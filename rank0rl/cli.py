"""The command line: `python train.py Walker2d --nprocs 8`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tomllib
from pathlib import Path

from rank0rl.mpi import job, launch
from rank0rl.mpi.hosts import count_ranks, read_hosts

# Options that say how ranks are started.
_HOW = ("hosts", "hostfile", "bind_to_core", "mpiexec", "collective_timeout", "max_restarts")


def main(configs: Path | None = None) -> None:
    """Train, as the command line says; end with exit code 0, 2 for a wrong use, or the job's.

    In the process that the user started, with more than one rank, this only supervises: neither
    mpi4py nor torch is imported there.

    Args:
        configs: folder of TOML files, one of which may be loaded by itself.
    """
    try:
        given = _given(sys.argv[1:], configs)
        how = {name: getattr(given, name) for name in _HOW}
        if launch.mpi_fork(given.nprocs, **how) == "parent":
            return
    except ValueError as error:
        if not job.world_rank():  # of several ranks, one says it
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    gc.disable()  # importing torch makes only objects that stay: collecting takes a sixth longer
    try:
        from rank0rl import session
        from rank0rl.mpi import comm

        code = session.run(sys.argv[1:], configs)
    except ModuleNotFoundError as error:
        if not job.world_rank():
            print(
                f"error: Python at {sys.executable} has no {error.name!r}: activate the virtual "
                f"environment, or install rank0rl there",
                file=sys.stderr,
            )
        sys.exit(2)
    except KeyboardInterrupt:
        job.fail(130, "interrupted before the first iteration")
        os._exit(130)  # what other ranks wait for will not come
    except SystemExit as end:  # some code of the user's ended this rank: that ends the job
        code = end.code if isinstance(end.code, int) and end.code else 1
        job.fail(code, f"rank {comm.get_rank()} called sys.exit({end.code!r})")
        comm.abort(code)
    sys.exit(code)


def _given(argv: list[str], configs: Path | None) -> argparse.Namespace:
    """How the command line says that ranks are started; one rank for --help.

    Raises:
        ValueError: if there cannot be so many, before they are started.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nprocs", type=int)
    parser.add_argument("--hosts")
    parser.add_argument("--hostfile")
    parser.add_argument("--num-envs", "--num_envs", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--mpiexec")
    parser.add_argument("--bind-to-core", "--bind_to_core", action="store_true")
    parser.add_argument("--collective-timeout", "--collective_timeout", type=float)
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    parser.add_argument("-h", "--help", action="store_true")
    given, _ = parser.parse_known_args(argv)
    if given.help:
        given.nprocs, given.hosts, given.hostfile = 1, None, None
    if given.nprocs is not None and given.nprocs < 1:
        raise ValueError(f"nprocs must be at least 1: got {given.nprocs}")
    if job.world_size() is not None:  # the ranks are there, and a host file may not be
        return given
    nprocs = count_ranks(given.nprocs, read_hosts(given.hosts, given.hostfile))
    if nprocs == 1:
        return given
    if given.num_envs is not None:
        most = given.num_envs
    else:  # which file it will be is for rank 0 to find out; here only what none of them allows
        named = given.config or (given.resume / "config.toml" if given.resume else None)
        files = [named] if named else (configs.glob("*.toml") if configs else [])
        most = max([32, *map(_num_envs, files)])
    if nprocs > most:
        raise ValueError(launch.too_many_ranks(nprocs, most))
    return given


def _num_envs(path: Path) -> int:
    """The number of environments that a file sets; 0 if it is for rank 0 to say what is wrong with it."""
    try:
        return int(tomllib.loads(path.read_text()).get("num_envs", 0))
    except (OSError, ValueError, TypeError):
        return 0
