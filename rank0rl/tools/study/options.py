"""Options of python -m rank0rl study, and what its file may name without a question."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rank0rl.envs import make as envs
from rank0rl.options import flag, names, option
from rank0rl.run.agents import is_reference
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import FUNCTIONS


@dataclass(frozen=True)
class Options:
    """Train many runs on all cores, and compare them: study ENVIRONMENT ... or study FILE.toml.

    All other options go to every run.
    """

    envs: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Environments."""
    algo: tuple[str, ...] = ("ppo",)
    """Agents, as train takes them."""
    seeds: str = "0:5"
    """Seeds of every setting: 0:5 for 0 to 4, or 0,7,11."""
    grid: tuple[str, ...] = ()
    """Settings of which every combination is trained, such as lr=1e-4,3e-4 hidden="64 64,128 128"."""
    cores: int | None = option(None, "[1, inf)")
    """Number of cores. None: all that this process may use."""
    hosts: str | None = None
    """Machines that train the study, with their numbers of cores, such as a:8,b:8: this one first, the others by ssh. The folder must be on storage that they share."""
    minutes_to: tuple[float, ...] = ()
    """Mean returns. The table says after how many minutes of training they were reached."""
    out: str | None = None
    """Folder of the study. None: one under runs/ with the names of its environments and agents."""
    search: tuple[str, ...] = ()
    """Settings to search for with Optuna: lr=log:1e-5:1e-3 gamma=0.95:0.999 epochs=3:20 "hidden=64 64|256 256". Then the default settings and the best settings found are trained with the seeds of the study."""
    trials: int = option(50, "[1, inf)")
    """Number of trials of the search."""
    search_seeds: str = "100:101"
    """Seeds of every trial. They are never those of the study's results."""
    objective: Literal["final", "mean"] = "final"
    """Value of a trial: its final mean return, or the mean of its whole learning curve, which counts speed too."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Sampler of Optuna, which chooses the settings of a trial."""
    prune: bool = True
    """Stop a trial early if its curve is below the median of the trials before it."""
    trust: bool = False
    """Import all code that a file of a study names. Without it, only Gymnasium's and rank0rl's own are imported."""
    train: str = ""
    """Options of every run in one string, for a file: "--total-steps 100000"."""


# The settings of a --config are checked by each run.
_ASKED = {"wrappers", "env_kwargs", *FUNCTIONS, *names(RunOptions, in_file=False)} - {"config"}


def check_file(given: Options, source: Path) -> None:
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
