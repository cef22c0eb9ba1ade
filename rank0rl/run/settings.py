"""Settings of a run in TOML files and checkpoints: found, read, applied, compared and written."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from rank0rl.options import names
from rank0rl.run import files
from rank0rl.run.agents import absolute
from rank0rl.run.launch_options import Words
from rank0rl.run.options import RunOptions


def find(folder: Path | None, agent: str, env: str) -> Path | None:
    """Return the file that names agent and environment, else the agent's, else None.

    Args:
        folder: configs/, with <agent>-<environment>.toml and <agent>.toml.
        agent: the agent's name, as `agents.short_name` gives it.
        env: the environment's name without module and version.
    """
    if folder is None:
        return None
    name = env.replace("/", "-")
    candidates = [folder / f"{agent}-{name}.toml", folder / f"{agent}.toml"]
    return next((path for path in candidates if path.is_file()), None)


def load(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file, without the tables [[record]] of a run's config.toml.

    Raises:
        ValueError: if the file cannot be read, or is not TOML.
    """
    return {name: value for name, value in _load(path).items() if name != "record"}


def starts(path: Path) -> list[dict[str, Any]]:
    """Return the record of each start of a run; [] if the run has no config.toml yet.

    Raises:
        ValueError: if the file cannot be read, or is not one that a run has written.
    """
    found = _load(path).get("record") if path.exists() else []
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get("versions", {}), dict) for one in found
    ):
        raise ValueError(
            f"config {path} must have a table [[record]] for each start of the run: put the run's "
            f"own file back, or remove it"
        )
    return found


def _load(path: Path) -> dict[str, Any]:
    text = files.read_text(path, "config")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config {path} is not TOML: {error}") from None


def apply(settings: Mapping[str, Any], *options: Any, source: str) -> tuple[Any, ...]:
    """Return dataclasses of options with the settings of a file in place of their values.

    Args:
        settings: option -> value.
        options: dataclasses of options.
        source: the file, for messages.

    Raises:
        ValueError: for an option that a file may not set, or that does not exist (naming the nearest
            one), and for a value of another type.
    """
    known = _names(*options, in_file=True)
    for key in settings:
        if key not in known:
            _refuse(key, known, _names(*options, in_file=False), source)
    changed = []
    for one in options:
        kinds = get_type_hints(type(one))
        values = {
            name: _converted(name, settings[name], kinds[name], source)
            for name in kinds
            if name in settings
        }
        changed.append(dataclasses.replace(one, **values))
    return tuple(changed)


def _refuse(key: str, known: set[str], not_in_file: set[str], source: str) -> None:
    why = "is given on the command line only" if key in not_in_file else "does not exist"
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{source}: setting {key!r} {why}{hint}")


def _names(*options: Any, in_file: bool) -> set[str]:
    """Return the options of some dataclasses that a file may set, or those that it may not."""
    return set().union(*(names(type(one), in_file=in_file) for one in options))


def settings(*options: Any) -> dict[str, Any]:
    """Return the options that belong to a run, and not to one start of it, with their values."""
    kept = _names(*options, in_file=True)
    values: dict[str, Any] = {}
    for one in options:
        values |= dataclasses.asdict(one)
    return {name: value for name, value in values.items() if name in kept}


def _converted(name: str, value: Any, kind: Any, source: str) -> Any:
    """Return a value of a TOML file as its option has it: 1e6 is a whole number, too."""
    kinds = get_args(kind) or (kind,)
    if type(value) is float and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    if not _fits(value, kind):
        raise ValueError(f"{source}: {name} must be {_type_name(kind)}: got {value!r}")
    if isinstance(value, list):
        return tuple(value)
    return float(value) if type(value) is int and float in kinds and int not in kinds else value


def _fits(value: Any, kind: Any) -> bool:
    """Return True if a value of a TOML file is of a type: a list is a tuple, and 1 is 1.0."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, k) for k in arguments)
    if get_origin(kind) is Literal:
        return value in arguments
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return type(value) is kind or (kind is float and type(value) is int)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def write(
    path: Path, settings: Mapping[str, Any], record: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Write the settings that are not None, as a file that `--config` takes, and a record.

    The record is a table [[record]]. There is one for every start of the run, the first one first.

    Args:
        path: the run's config.toml.
        settings: option -> value.
        record: what else is to be known of this start.

    Returns:
        The records of all starts. The last one is this start's.
    """
    kept = {k: v for k, v in settings.items() if v is not None}  # TOML has no None
    records = [*starts(path), record]
    files.write(path, tomli_w.dumps({**kept, "record": records}).encode())
    return records


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


def with_moved_agent(settings: dict[str, Any], words: Words | None) -> dict[str, Any]:
    """Return a run's settings, with the file of its agent where the command line says that it is now.

    A file counts as moved if it is no longer where it was, and its name is the same. So is its class, if both name one.

    Args:
        settings: of the run.
        words: the command line; None if there is none.
    """
    named = words.given.get("algo", "") if words else ""
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
