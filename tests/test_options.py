"""What a field says of its option is what checks, files and command lines go by."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from rank0rl import options
from rank0rl.options import CheckedOptions, Scheduled, option, setting


@dataclass(frozen=True)
class Some(CheckedOptions):
    share: float = option(0.5, "(0, 1]")
    sizes: tuple[int, ...] = option((8, 8), "[1, inf)")
    limit: float | None = option(None, "[0, inf)")
    any_number: float = option(-3.0)
    plain: int = -1
    table: dict[str, int] = option({})
    on: bool = setting(False, changes_curve=False, resume=True, in_file=False)
    step: Scheduled = option(0.1, "(0, 1)")
    word: str | None = setting(None, changes_curve=True, resume=False, launch=True)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"share": 1},
        {"sizes": ()},
        {"limit": 0},
        {"limit": float("1e300")},
        {"step": "linear:0.5:0"},
        {"step": "cosine:0.5:1"},
    ],
)
def test_numbers_in_their_range_are_taken(kwargs):
    assert all(getattr(Some(**kwargs), name) == value for name, value in kwargs.items())


@pytest.mark.parametrize(
    ("name", "value", "interval"),
    [
        ("share", 0, "(0, 1]"),
        ("share", 1.01, "(0, 1]"),
        ("share", float("nan"), "(0, 1]"),
        ("sizes", (8, 0), "[1, inf)"),
        ("limit", -1e-9, "[0, inf)"),
        ("limit", float("inf"), "[0, inf)"),
        ("step", 1, "(0, 1)"),
    ],
)
def test_a_number_out_of_its_range_is_refused(name, value, interval):
    with pytest.raises(ValueError, match="must be in") as error:
        Some(**{name: value})
    assert all(fact in str(error.value) for fact in (name, interval, str(value), f"--{name}"))


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("linear:0:0.5", r"step must be in \(0, 1\): got 0.0; set --step"),
        ("linear:0.5:1.1", r"step must be in \[0, 1\]: got 1.1; set --step"),
        ("linear:0.5:nan", r"step must be in .*: got nan"),
        ("linear:0.5", "step: expected a number, linear:START:END or .* got 'linear:0.5'"),
        ("linear:0.5:0:0", "step: expected a number"),
        ("step:0.5:0", "step: expected a number"),
        ("linear:a:0", "step: expected a number"),
    ],
)
def test_a_schedule_that_is_none_or_leaves_the_range_is_refused(schedule, said):
    with pytest.raises(ValueError, match=said):
        Some(step=schedule)


def test_a_dict_is_copied():
    Some().table["a"] = 1
    assert Some().table == {}


def test_names_by_what_is_known_of_them():
    every = {f.name for f in fields(Some)}
    assert options.names(Some) == every
    assert options.names(Some, changes_curve=False) == {"on"}
    assert options.names(Some, resume=True, in_file=False) == {"on"}
    assert options.names(Some, launch=True) == {"word"}
    assert options.names(Some, in_file=True) == every - {"on"}


def test_a_setting_says_what_it_changes():
    with pytest.raises(TypeError, match="changes_curve"):
        setting(1, resume=True)
    with pytest.raises(TypeError, match="resume"):
        setting(1, changes_curve=True)


READ = ["share", "limit", "any_number", "plain", "on", "word"]


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ("Walker2d --hidden 64 -1 -n 5", {}),
        ("--share .25 --plain=-2", {"share": 0.25, "plain": -2}),
        ("--plain 2.5e3", {"plain": 2500}),
        ("--plain 1_000", {"plain": 1000}),
        ("--any-number 1 --any_number 2", {"any_number": 2.0}),
        ("--any_number=3", {"any_number": 3.0}),
        ("--limit None --word None", {"limit": None, "word": None}),
        ("--on --word a_b", {"on": True, "word": "a_b"}),
        ("--word=--a_b c --no-on", {"on": False, "word": "--a_b"}),
        ("--wor x --shar 1", {}),
    ],
)
def test_some_options_are_read_from_a_command_line(argv, values):
    assert options.read_some(argv.split(), Some, READ) == values


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ("--plain 1.5", ["--plain", "a whole number, such as", "'1.5'"]),
        ("--plain inf", ["--plain", "a whole number, such as", "'inf'"]),
        ("--limit x", ["--limit", "float", "'x'"]),
        ("--plain None", ["--plain", "a whole number, such as", "'None'"]),
        ("--word", ["--word"]),
    ],
)
def test_a_value_of_another_type_is_refused(argv, facts):
    with pytest.raises(ValueError, match="--") as error:
        options.read_some(argv.split(), Some, READ)
    assert all(fact in str(error.value) for fact in facts)


def test_nothing_but_the_standard_library_is_loaded():
    code = "import sys, rank0rl.options; print({'numpy', 'tyro', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
