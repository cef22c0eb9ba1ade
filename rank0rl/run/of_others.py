"""The options of runs that other processes train, as those of a study."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rank0rl.envs import make as envs
from rank0rl.options import read_some
from rank0rl.run import config, plan, resumed
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import trusted


def options_of(argv: list[str], configs: Path | None) -> tuple[RunOptions, Any]:
    """Return the options of a new run and of its agent, as a command line and its TOML file give them, checked.

    Raises:
        ValueError: for what a run would refuse.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    given = read_some(argv, RunOptions, ("config", "trust"))
    source = plan.file_of(argv, configs, given.get("config"))
    settings = config.load(source) if source else {}
    if "config" in given:  # those in configs/ belong to the program
        settings = trusted(settings, str(source), argv, given.get("trust", False))
    options, agent = plan.read(argv, settings, str(source))
    options = dataclasses.replace(options, env_id=envs.resolve(options.env_id))
    return plan.check_all(options, agent, 1, 0, ()), agent


def check_same(options: RunOptions, agent: Any, run: Path, argv: list[str]) -> None:
    """Check that the run in a folder has these options, but for those that change no curve.

    Args:
        options: options of a run.
        agent: options of its agent.
        run: the folder.
        argv: the command line that they come from.

    Raises:
        ValueError: listing what differs, or if code that the run names is not trusted.
    """
    file = run / "config.toml"
    old, old_agent = plan.read([], trusted(config.load(file), str(file), argv, False), str(file))
    resumed.check_unchanged((resumed.without_beginning(options, old), agent), (old, old_agent))
    for name in (
        "total_steps",
        "num_episodes",
    ):  # a resume may change these: schedules then end elsewhere
        before, now = getattr(old, name), getattr(options, name)
        if before != now:
            raise ValueError(f"{name} was {before}, and is now {now}")
