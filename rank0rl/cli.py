"""The command line of training: `python -m rank0rl train Walker2d --nprocs 8`, or train.py."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank0rl import algos
from rank0rl.launch import fork, job
from rank0rl.launch.failures import WRONG_USE, exit_code_after
from rank0rl.launch.hosts import count_ranks, read_hosts
from rank0rl.launch.streams import outlast_readers
from rank0rl.run import cpu as instructions
from rank0rl.run import launch_options
from rank0rl.run.files import read_text
from rank0rl.run.launch_options import LaunchOptions, Words


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
        given = _launch_options(words)
        instructions.limit(given.cpu)
        if fork.mpi_fork(given.nprocs, **given.how()) == "parent":
            return
    except ValueError as error:
        if not job.world_rank():  # of several ranks, one says it
            print(f"error: {error}", file=sys.stderr)
        sys.exit(WRONG_USE)
    gc.disable()  # importing torch makes only objects that stay: collecting takes a sixth longer
    try:
        from rank0rl import start
        from rank0rl.mpi import comm
        from rank0rl.tools import video

        code = start.start(words, algos.CONFIGS, video.check, video.hooks)
    except ModuleNotFoundError as error:
        if not job.world_rank():
            print(
                f"error: Python at {sys.executable} has no {error.name!r}: activate the virtual "
                f"environment, or install rank0rl there",
                file=sys.stderr,
            )
        sys.exit(WRONG_USE)
    except job.WrongLaunch as error:
        fork.report(type(error), error, None)
        sys.exit(WRONG_USE)
    except KeyboardInterrupt:
        code = exit_code_after(signal.SIGINT)
        job.fail(code, "interrupted before the first iteration")
        os._exit(code)  # what other ranks wait for will not come
    except SystemExit as end:  # some code of the user's ended this rank: that ends the job
        code = end.code if isinstance(end.code, int) and end.code else 1
        job.fail(code, f"rank {comm.get_rank()} called sys.exit({end.code!r})")
        comm.abort(code)
    sys.exit(code)


def _launch_options(words: Words) -> LaunchOptions:
    """Return how the command line says that ranks are started; one rank for --help.

    Raises:
        ValueError: if so many ranks cannot be, before they are started.
    """
    if words.is_help:
        return LaunchOptions(nprocs=1)
    given, run = {**words.given}, words.run_to_resume()
    named = given.get("config") or (run / "config.toml" if run else None)
    if "cpu" not in given and named and isinstance(cpu := _setting(named, "cpu"), str):
        given["cpu"] = cpu
    options = LaunchOptions(**given)
    if job.world_size() is not None:  # the ranks are there, and a host file may not be
        return options
    nprocs = count_ranks(options.nprocs, read_hosts(options.hosts, options.hostfile))
    if nprocs == 1:
        return options
    most = options.num_envs
    if "num_envs" not in given:  # rank 0 finds out which file it is, of a few
        files = [named] if named else _files(options.algo, words.argv)
        numbers = [_setting(file, "num_envs") for file in files]
        most = max([most, *(n for n in numbers if isinstance(n, int))])
    if nprocs > most:
        raise ValueError(launch_options.too_many_ranks(nprocs, most))
    return options


def _files(algo: str, words: Sequence[str]) -> list[Path]:
    """Return the files in configs/ for the agent, with any of these words as the environment."""
    where = algo.partition(":")[0]
    agent = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    environments = {
        re.sub(r"-v\d+$", "", word.rpartition(":")[2]).replace("/", "-") for word in words
    }
    names = [agent, *(f"{agent}-{environment}" for environment in environments)]
    return [file for name in names if (file := algos.CONFIGS / f"{name}.toml").is_file()]


def _setting(file: str | Path, name: str) -> Any:
    """Return a setting of a TOML file; None if it has none, or rank 0 has to say what is wrong with it."""
    try:
        return tomllib.loads(read_text(Path(file), "config")).get(name)
    except (ValueError, RecursionError):
        return None
