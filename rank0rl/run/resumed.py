"""Check what a resumed run may change of the settings that it began with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank0rl.options import names, read_some
from rank0rl.run.agents import absolute
from rank0rl.run.options import RunOptions


def without_beginning(options: RunOptions, old: RunOptions) -> RunOptions:
    """Return the options of a command line that could begin this run, as of one that only resumes it.

    Args:
        options: those of the command line.
        old: those that the run began with.
    """
    begin = options.init_from
    if begin and old.init_from and Path(old.init_from).is_relative_to(Path(begin).resolve()):
        begin = old.init_from  # the checkpoint that was the other run's last one then
    return dataclasses.replace(options, run_dir=None, config=None, init_from=begin)


def check_unchanged(new: tuple[RunOptions, Any], old: tuple[RunOptions, Any]) -> None:
    """Refuse to resume a run with other settings than its own.

    Raises:
        ValueError: listing what has changed.
    """
    after, before = ({**vars(options), **vars(agent)} for options, agent in (new, old))
    may_change = names(RunOptions, resume=True)
    changed = [
        f"{name} {value} in place of {before.get(name)}"
        for name, value in after.items()
        if name not in may_change and value != before.get(name)
    ]
    if changed:
        raise ValueError(
            f"a resumed run keeps its own settings: got {', '.join(sorted(changed))}; keep to its "
            f"own, or start a new run"
        )


def with_moved_agent(settings: dict[str, Any], argv: Sequence[str] | None) -> dict[str, Any]:
    """Return a run's settings, with the file of its agent where the command line says that it is now.

    A file counts as moved if it is no longer where it was, and its name is the same. So is its class, if both name one.

    Args:
        settings: of the run.
        argv: the command line; None if there is none.
    """
    named = read_some(argv or (), RunOptions, ("algo",)).get("algo", "")
    (new, _, new_class), (old, _, old_class) = (
        str(algo).partition(":") for algo in (named, settings.get("algo"))
    )
    is_moved = old.endswith(".py") and Path(new).name == Path(old).name and not Path(old).exists()
    if is_moved and (new_class == old_class or "" in (new_class, old_class)):
        return {**settings, "algo": absolute(named)}
    return settings


def schedule_notes(new: RunOptions, old: RunOptions) -> list[str]:
    """Return what it means for the curve that a resumed run has another length or device."""
    moved = (
        f"updates now compute on {new.device} and no longer on {old.device}: the last bits differ"
    )
    return [moved] * (new.device != old.device) + [
        f"the schedule changes: {name} was {getattr(old, name)} and is now {getattr(new, name)}, so "
        f"from here on the curve may differ from that of a run that began with it"
        for name in ("total_steps", "num_episodes")
        if getattr(new, name) != getattr(old, name)
    ]
