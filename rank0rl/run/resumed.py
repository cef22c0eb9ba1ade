"""Check what a resumed run may change of the settings that it began with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rank0rl.options import names
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
