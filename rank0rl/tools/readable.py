"""Names and numbers of a run's files as text for readers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def label(name: str) -> str:
    """Return a column's name: "steps_per_s" -> "steps / s", "update_s" -> "update"."""
    return name.replace("_per_", " / ").removesuffix("_s").replace("_", " ")


def number(value: str | float) -> str:
    """Shorten a number; return other text unchanged."""
    try:
        x = float(value)
    except ValueError:
        return str(value)
    return f"{x:,.0f}" if abs(x) >= 1000 or x.is_integer() else f"{x:.4g}"


def known(value: str | float) -> str:
    """Shorten a number; return "" for nan."""
    return "" if isinstance(value, float) and math.isnan(value) else number(value)


def percent(share: float) -> str:
    """Return a share of 1 as a percentage."""
    return f"{share:.0%}"


def duration(seconds: float) -> str:
    """Return a time in hours, minutes or seconds."""
    return next(f"{seconds / n:.3g} {name}" for n, name in _TIMES if seconds >= n or n == 1)


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text: strings unchanged, everything else as JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in values.items()}
