"""The command line of training: `python -m rank0rl train Walker2d --nprocs 8`, or train.py."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rank0rl import algos
from rank0rl.launch import WRONG_USE, fork, job, usage_error
from rank0rl.launch.streams import outlast_readers
from rank0rl.launch.tree import other_programs
from rank0rl.run.launch_options import Words, limit_cpu

MISSING = "Python at {} has no {!r}: activate the virtual environment, or install rank0rl there"


def main(argv: Sequence[str] | None = None) -> None:
    """Train, as the command line says; end with exit code 0, 2 for a wrong use, or the job's.

    In the process that the user started, with more than one rank, this only supervises: neither
    mpi4py nor torch is imported there.

    Args:
        argv: the options; by default those of this process.
    """
    argv = sys.argv[1:] if argv is None else [*argv]
    outlast_readers()
    try:
        words = Words.read(argv)
        given = words.launch_options(algos.CONFIGS)
        if not words.is_help:
            limit_cpu(given.cpu)
        if fork.mpi_fork(given.nprocs, **given.how()) == "parent":
            return
    except ValueError as error:
        _refuse(error, argv)
    gc.disable()  # importing torch makes only objects that stay: collecting takes a sixth longer
    try:
        from rank0rl.run import shares, signals
    except ModuleNotFoundError as error:
        sys.exit(_refuse_missing(error))
    try:
        code = 0 if shares.follows() else _start(words)
    except job.WrongLaunch as error:
        fork.report(type(error), error, None)
        _end(WRONG_USE)
    except (KeyboardInterrupt, SystemExit) as error:
        signals.end(error)
        raise
    _end(code)


def _refuse(error: ValueError, argv: Sequence[str]) -> NoReturn:
    """Say what is wrong with the command line, and end this process, and the programs that were started with it."""
    if not job.world_rank():  # of several ranks, one says it
        usage_error(str(error))
    if job.world_size() is not None and ("--mpmd" in argv or other_programs()):
        os.environ.setdefault(job.MPMD, "1")
    _end(WRONG_USE)


def _end(code: int) -> NoReturn:
    """End this process, and after a failure the programs that were started with it, which wait for requests."""
    if code and job.has_programs():
        from rank0rl.mpi import comm

        comm.abort(code)
    sys.exit(code)


def _refuse_missing(error: ModuleNotFoundError) -> int:
    """Say which package is not there; return the exit code."""
    if not job.world_rank():
        usage_error(MISSING.format(sys.executable, error.name))
    return WRONG_USE


def _start(words: Words) -> int:
    """Train on this rank; return the exit code."""
    try:
        from rank0rl import start
        from rank0rl.tools import video
    except ModuleNotFoundError as error:
        return _refuse_missing(error)
    return start.start(words, algos.CONFIGS, video.check, video.hooks)
