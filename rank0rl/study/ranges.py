"""The ranges of a search, as the command line gives them: lr=log:1e-5:1e-3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Suggest = Callable[[Any, str], Any]
"""Takes a trial and the name of a setting; returns its value."""


def ranges(search: Sequence[str]) -> list[tuple[str, str]]:
    """Return (setting, range) for each word of --search."""
    words = [word.partition("=") for word in search]
    return [(name.replace("-", "_"), text) for name, _, text in words]


def suggester(name: str, text: str) -> Suggest:
    """Return what suggests a value for a setting: of 0.9:0.99, log:1e-5:1e-3, 1:20 or tanh|relu."""
    log = text.startswith("log:")
    ends = text.removeprefix("log:").split(":")
    if "|" in text and all(text.split("|")):
        choices = text.split("|")
        return lambda trial, name: trial.suggest_categorical(name, choices)
    for kind, method in ((int, "suggest_int"), (float, "suggest_float")):
        try:
            low, high = map(kind, ends)
        except ValueError:
            continue
        if low < high and (low > 0 or not log):
            return lambda trial, name: getattr(trial, method)(name, low, high, log=log)
    raise ValueError(
        f"--search takes NAME=LOW:HIGH, NAME=log:LOW:HIGH or NAME=A|B: got {name or '?'}={text}"
    )


def as_word(value: Any) -> str:
    """Return a value as a word of the command line, a number with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
