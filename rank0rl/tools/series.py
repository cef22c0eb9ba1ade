"""Lines, bands, layers of a stack and bars, which charts show. Each draws itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rank0rl.run.folder import Array
from rank0rl.tools.readable import number

Style = Literal["line", "dashed", "dotted", "dots", "sparse", "band", "wide", "layer", "bar"]

_LINES = {"line": "-", "dashed": "--", "dotted": ":", "dots": "o-", "sparse": "o--"}
_ALPHA = {"band": 0.25, "wide": 0.12}


@dataclass(frozen=True)
class Series:
    """Numbers by place on an axis."""

    label: str
    x: Array
    """Places, shape (points,), in increasing order."""
    y: Array
    """Numbers at these places; NaN where there is none."""
    color: int = 0
    """Number of its color on the page, 0 to 9."""
    style: Style = "line"
    """A line; or an area from low to y: a band, a wide and paler one, a layer or a bar."""
    low: Array = field(default_factory=lambda: np.zeros(1))
    """Lower ends of an area. A layer and a bar show the difference as their value."""
    form: Callable[[float], str] = number
    """Function that writes a value."""
    whole: str = ""
    """Its value of the whole run, which the legend gives."""

    @property
    def is_line(self) -> bool:
        """True if it is a line, False if it is an area."""
        return self.style in _LINES

    def text(self, i: int) -> str:
        """Return the value at a place."""
        if self.is_line:
            return self.form(self.y[i])
        if self.style in _ALPHA:
            return f"{self.form(self.low[i])} to {self.form(self.y[i])}"
        return self.form(self.y[i] - self.low[i])

    def draw(self, axis: Any) -> None:
        """Draw it on an axis of matplotlib."""
        color, known = f"C{self.color}", np.isfinite(self.y)
        if self.style == "bar":
            axis.bar(self.x, self.y - self.low, bottom=self.low, color=color, alpha=0.85, width=0.6)
        elif self.style == "layer":  # reaches from the place before to its own
            x, low, y = (
                np.concatenate([first, values])
                for first, values in (
                    ([0.0], self.x),
                    (self.low[:1], self.low),
                    (self.y[:1], self.y),
                )
            )
            axis.fill_between(x, low, y, step="pre", color=color, alpha=0.85, linewidth=0)
        elif self.style in _ALPHA:
            alpha = _ALPHA[self.style]
            axis.fill_between(self.x, self.low, self.y, color=color, alpha=alpha, linewidth=0)
        else:
            line = _LINES[self.style]
            if known.sum() == 1:
                line = "o"  # a line of one point is invisible
            axis.plot(
                self.x[known], self.y[known], line, color=color, markersize=3.5, clip_on=False
            )
