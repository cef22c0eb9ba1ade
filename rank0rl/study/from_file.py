"""Decide what a study's file may name without a question, for a study that comes from someone else is data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rank0rl.envs import make as envs
from rank0rl.options import flag, names
from rank0rl.run.agents import is_reference
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import FUNCTIONS
from rank0rl.study.options import Options

# The settings of a --config are checked by each run.
_ASKED = {"wrappers", "env_kwargs", *FUNCTIONS, *names(RunOptions, in_file=False)} - {"config"}


def check(given: Options, source: Path) -> None:
    """Check that a file of a study imports only Gymnasium's and rank0rl's own code, and starts no other program.

    Args:
        given: what the file says.
        source: the file.

    Raises:
        ValueError: naming what it would import, or the options that only a command line may give.
    """
    train = [word for word in shlex.split(given.train) if word.startswith("--")]
    settings = [*train, *given.grid, *given.search]
    asked = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in settings} & _ASKED
    foreign = [
        *(env for env in given.envs if not envs.is_gymnasiums(env)),
        *(algo for algo in given.algo if not is_reference(algo)),
        *(flag(name) for name in sorted(asked | {"hosts"} if given.hosts else asked)),
    ]
    if foreign:
        again = shlex.join(["python", *sys.orig_argv[1:], "--trust"])
        raise ValueError(
            f"{source} names code that is neither Gymnasium's nor rank0rl's, or options by which "
            f"code runs: {', '.join(foreign)}; if you trust it, go on with: {again}"
        )
