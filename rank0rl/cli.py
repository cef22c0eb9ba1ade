"""The command line: `python train.py Walker2d --nprocs 8`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rank0rl import launch


def main(configs: Path | None = None) -> None:
    """Train, as the command line says; end with exit code 0, 2 for a wrong use, or the job's.

    In the process that the user started, with more than one rank, this only supervises: neither
    mpi4py nor torch is imported there.

    Args:
        configs: folder of TOML files, one of which may be loaded by itself.
    """
    try:
        if launch.mpi_fork(_asked_nprocs(sys.argv[1:])) == "parent":
            return
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from rank0rl import session

    sys.exit(session.run(sys.argv[1:], configs))


def _asked_nprocs(argv: list[str]) -> int:
    """The number of ranks to start: what --nprocs says, 1 without it, and for --help."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("-h", "--help", action="store_true")
    asked, _ = parser.parse_known_args(argv)
    return 1 if asked.help else int(asked.nprocs)
