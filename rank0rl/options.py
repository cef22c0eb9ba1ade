"""Options with all that is known of them in one place, and numbers that change in the course of a run.

A field gives the option's name, type, default and range, and the docstring under it is the help
text. An option of a run also says whether it changes the learning curve, whether a resumed run may
change it, and whether a file may set it. Checks, files and command lines read it from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeAlias, Union, get_args, get_origin, get_type_hints

Scheduled: TypeAlias = float | str
"""A constant; or a schedule, "linear:START:END" or "cosine:START:END", over the whole run."""


def value_at(number: Scheduled, progress: float) -> float:
    """Return a number as it is now.

    Args:
        number: a constant or a schedule.
        progress: share of the run that is over, in [0, 1).

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5 (cosine).
    """
    if not isinstance(number, str):
        return number
    shape, start, end = _parse_schedule(number)
    done = progress if shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return start * (1 - done) + end * done


def changing(progress: float, **numbers: Scheduled) -> dict[str, float]:
    """Return those of these numbers that change, as they are now, for an agent's record."""
    return {name: value_at(x, progress) for name, x in numbers.items() if isinstance(x, str)}


def _parse_schedule(schedule: str) -> tuple[str, float, float]:
    """Return the shape of a schedule, its first and its last number; raise ValueError if it is none."""
    shape, *ends = schedule.split(":")
    try:
        start, end = map(float, ends)
        if shape in ("linear", "cosine"):
            return shape, start, end
    except ValueError:  # not two numbers
        pass
    raise ValueError(
        f"expected a number, linear:START:END or cosine:START:END, such as linear:3e-4:0: got "
        f"{schedule!r}"
    )


@dataclass(frozen=True)
class _Facts:
    """All that is known of an option besides its name, type, default and help text."""

    interval: str = ""
    """Range of its numbers, such as "[0, 1]" or "(0, inf)". "": any."""
    changes_curve: bool = True
    """True if another value can give another learning curve."""
    resume: bool = False
    """True if a resumed run may have another value than it began with."""
    in_file: bool = True
    """True if a TOML file may set it. Else it belongs to one start of a run, not to the run."""
    launch: bool = False
    """True if it says how the ranks are started: an argument of `mpi_fork`."""
    prefix: str = ""
    """Text that may stand before its number, such as "spread:". "": none, and a text is a schedule."""


def option(default: Any, interval: str = "") -> Any:
    """Return the field of an option of an agent or a tool.

    Args:
        default: its value if the user gives none. A dict is copied.
        interval: range of its numbers, such as "[0, 1]" or "(0, inf)". Every number of a tuple must
            lie in it. None is always allowed.
    """
    return setting(default, interval, changes_curve=True, resume=False)


def setting(
    default: Any,
    interval: str = "",
    *,
    changes_curve: bool,
    resume: bool,
    in_file: bool = True,
    launch: bool = False,
    prefix: str = "",
) -> Any:
    """Return the field of an option of a run. Its author must say more than for an `option`: see `_Facts`."""
    known = _Facts(interval, changes_curve, resume, in_file, launch, prefix)
    metadata = {"facts": known}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: {**default}, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class OptionError(ValueError):
    """An option does not fit the environment or another option. The text is all that a user needs."""


class CheckedOptions:
    """Base of a dataclass of options, which refuses a number out of its range."""

    def __post_init__(self) -> None:
        """Check the numbers. A subclass with more to check calls this first."""
        check(self)


def check(options: Any) -> None:
    """Check that the numbers of a dataclass of options lie in their ranges.

    Raises:
        ValueError: naming the option, its range and its value.
    """
    for name, known in facts(type(options)).items():
        if known.interval:
            value = getattr(options, name)
            if known.prefix and isinstance(value, str):
                value = _after(known.prefix, name, value)
            _check_number(name, value, known.interval)


def _after(prefix: str, name: str, text: str) -> int:
    start, _, number = text.partition(prefix)
    if start or not number.isdecimal():
        raise ValueError(
            f"{name} must be a number, or {prefix} and a number: got {text!r}; set {flag(name)}"
        )
    return int(number)


def _check_number(name: str, value: Any, interval: str) -> None:
    low, high = (float(x) for x in interval[1:-1].split(","))
    for number in value if isinstance(value, tuple) else [value]:
        if number is None:
            continue
        if isinstance(number, str):
            _check_schedule(name, number, interval)
            continue
        above = number >= low if interval[0] == "[" else number > low
        below = number <= high if interval[-1] == "]" else number < high
        if not (above and below):
            raise ValueError(f"{name} must be in {interval}: got {value}; set {flag(name)}")


def _check_schedule(name: str, schedule: str, interval: str) -> None:
    try:
        _, start, end = _parse_schedule(schedule)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; set {flag(name)}") from None
    _check_number(name, start, interval)
    # a run never quite gets to the last number, which may be the end of an open range
    _check_number(name, end, f"[{interval[1:-1]}]" if math.isfinite(end) else interval)


def facts(kind: type) -> Mapping[str, _Facts]:
    """Return what is known of each option of a dataclass, in the order of its fields."""
    return {f.name: f.metadata.get("facts", _Facts()) for f in dataclasses.fields(kind)}


def names(kind: type, **wanted: bool) -> set[str]:
    """Return the names of the options whose `_Facts` have these values, such as in_file=False."""
    return {
        name
        for name, known in facts(kind).items()
        if all(getattr(known, fact) is value for fact, value in wanted.items())
    }


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
    known = _names_of(options, in_file=True)
    for key in settings:
        if key in known:
            continue
        on_line = key in _names_of(options, in_file=False)
        owners = " or ".join(type(one).__name__ for one in options)
        why = "is given on the command line only" if on_line else f"is not an option of {owners}"
        close = difflib.get_close_matches(str(key), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{source}: setting {key!r} {why}{hint}")
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


def _names_of(options: Iterable[Any], in_file: bool) -> set[str]:
    return set().union(*(names(type(one), in_file=in_file) for one in options))


def as_settings(*options: Any) -> dict[str, Any]:
    """Return the options that a file may set, with their values: those of a run, not of one start of it."""
    kept = _names_of(options, in_file=True)
    return {
        name: value
        for one in options
        for name, value in dataclasses.asdict(one).items()
        if name in kept
    }


def _converted(name: str, value: Any, kind: Any, source: str) -> Any:
    """Return a value of a TOML file with the type of its option: 1e6 may be an int, a list is a tuple."""
    kinds = get_args(kind) or (kind,)
    if type(value) is float and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    if not _fits(value, kind):
        raise ValueError(f"{source}: {name} must be {_type_name(kind)}: got {value!r}")
    if isinstance(value, list):
        return tuple(value)
    if type(value) is not int or float not in kinds or int in kinds:
        return value
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{source}: {name} must be at most {sys.float_info.max}: got more"
        ) from None


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
    """Return the name of a type as a user of TOML knows it."""
    name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return re.sub(r"tuple\[(\w+), \.\.\.\]", r"a list of \1", name)


def flag(name: str) -> str:
    """Return an option's name on the command line: "num_envs" -> "--num-envs"."""
    return f"--{name.replace('_', '-')}"


def read_some(argv: Sequence[str], kind: type, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of a few options, as far as a command line gives them.

    tyro reads the whole command line. This is for options that must be known before tyro is loaded.
    All other words are skipped.

    Args:
        argv: the command line, without the program's name.
        kind: the dataclass that has the options, each a bool, a str or a number, or None.
        names: names of the options to read.

    Raises:
        ValueError: if a value is missing, or is not of the option's type.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    types = get_type_hints(kind)
    for name in names:
        spellings = dict.fromkeys((flag(name), f"--{name}"))  # tyro takes both
        if types[name] is bool:
            parser.add_argument(*spellings, dest=name, action=argparse.BooleanOptionalAction)
        else:
            read = partial(_of_word, get_args(types[name]) or (types[name],))
            parser.add_argument(*spellings, dest=name, type=read)
    return vars(parser.parse_known_args(argv)[0])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the options")


def _of_word(kinds: Sequence[type], word: str) -> Any:
    """Return the value of a word of the command line, which is of a type, or None if that is another."""
    if word == "None" and NoneType in kinds:
        return None
    (kind,) = {*kinds} - {NoneType}
    try:
        return whole_number(word) if kind is int else kind(word)
    except ValueError as error:
        why = error if kind is int else f"expected {kind.__name__}; got {word!r}"
        raise argparse.ArgumentTypeError(str(why)) from None


def whole_number(word: str) -> int:
    """Return the number that a word such as 1000000, 1_000_000 or 1e6 means.

    Raises:
        ValueError: if it is no number, or not a whole one.
    """
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"expected a whole number, such as 1000000 or 1e6; got {word!r}")
    return int(number)
