"""The parts of a report page: macros of the Jinja2 template page.html, and charts with values under the pointer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import jinja2
import numpy as np
from markupsafe import Markup

from rank0rl.run.folder import Array
from rank0rl.tools import figures
from rank0rl.tools.readable import number

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals["colors"] = figures.COLORS


class _Macros(Protocol):
    def __getattr__(self, name: str) -> Callable[..., Markup]: ...


html = cast(_Macros, _templates.get_template("page.html").module)
"""The macros of page.html, such as `html.table(head, rows)`. They escape all text that they are given."""

# Sizes in inches. A page scales a figure to the width of its text, so that a font of 9 points is
# about as large as the text on the screen that the size is for.
_SIZES = {"wide": (9.6, 3.5), "narrow": (3.9, 2.7)}
_SMALL = (3.4, 1.9)
_STRIP = 6.0  # points: least width of a place under the pointer; a finger or a hand is not steadier

_LINES = {"line": "-", "dashed": "--", "dotted": ":", "dots": "o-", "sparse": "o--"}
_BANDS = {"band": 0.25, "wide": 0.12}  # and their opacity


@dataclass(frozen=True)
class Series:
    """A line, a band, a layer of a stack, or bars, in a chart."""

    label: str
    x: Array
    """Places on the horizontal axis, shape (points,), in increasing order."""
    y: Array
    """Numbers at these places; NaN where there is none."""
    color: int = 0
    """Number of its color on the page, 0 to 9."""
    style: Literal["line", "dashed", "dotted", "dots", "sparse", "band", "wide", "layer", "bar"] = (
        "line"
    )
    """A line; or an area from low to y: a band, a wide and paler one, a layer or a bar."""
    low: Array = field(default_factory=lambda: np.zeros(1))
    """Lower ends of an area. The value of a layer or a bar is y - low."""
    form: Callable[[float], str] = number
    """Function that writes a value."""
    whole: str = ""
    """Its value over the whole run, which the legend shows."""

    def text(self, i: int) -> str:
        """Return the value at point i."""
        if self.style in _LINES:
            return self.form(self.y[i])
        if self.style in _BANDS:
            return f"{self.form(self.low[i])} to {self.form(self.y[i])}"
        return self.form(self.y[i] - self.low[i])

    def draw(self, axis: Any) -> None:
        """Draw it on an axis of matplotlib."""
        color, x, low, y = f"C{self.color}", self.x, self.low, self.y
        if self.style == "bar":
            axis.bar(x, y - low, bottom=low, color=color, alpha=0.85, width=0.6)
        elif self.style == "layer":  # each value belongs to the steps before its place
            x, low, y = np.append(0.0, x), np.append(low[:1], low), np.append(y[:1], y)
            axis.fill_between(x, low, y, step="pre", color=color, alpha=0.85, linewidth=0)
        elif self.style in _BANDS:
            axis.fill_between(x, low, y, color=color, alpha=_BANDS[self.style], linewidth=0)
        else:
            known = np.isfinite(y)
            line = _LINES[self.style] if known.sum() > 1 else "o"  # one point would be invisible
            axis.plot(x[known], y[known], line, color=color, markersize=3.5, clip_on=False)


def _steps(place: float) -> str:
    """Return a place on an axis of steps as text."""
    return f"{number(place)} steps"


def chart(
    name: str,
    alt: str,
    series: Sequence[Series],
    finish: Callable[[Any], None],
    heading: Callable[[float], str] = _steps,
    caption: str = "",
) -> Markup:
    """Return a chart as wide as the page, with its legend.

    Args:
        name: a name that no other chart on the page has.
        alt: text that tells a screen reader what the chart shows.
        series: what to draw.
        finish: function that sets the labels and limits of the axis.
        heading: function that turns a place on the horizontal axis into text.
        caption: text below the chart.
    """
    pictures = {
        kind: _picture(f"{name}-{kind}", alt, size, series, finish, heading)
        for kind, size in _SIZES.items()
    }
    return html.legend(series) + html.figure(pictures, caption)


def small_chart(
    title: str, alt: str, series: Sequence[Series], finish: Callable[[Any], None]
) -> Markup:
    """Return a small chart with a title, for `html.small`."""

    def titled(axis: Any) -> None:
        axis.set_title(title, loc="left")
        axis.locator_params(nbins=4)
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        finish(axis)

    name = re.sub(r"\W", "-", title)
    return html.figure({"every": _picture(name, alt, _SMALL, series, titled, _steps)})


def _picture(
    name: str,
    alt: str,
    size: tuple[float, float],
    series: Sequence[Series],
    finish: Callable[[Any], None],
    heading: Callable[[float], str],
) -> tuple[str, str, list[dict[str, Any]]]:
    """Draw a figure; return its SVG, where its axis lies, and the values under the pointer."""
    with figures.style() as figure_class:
        figure = figure_class(figsize=size, layout="constrained")
        axis = figure.add_subplot()
        for one in series:
            one.draw(axis)
        finish(axis)
        svg = figures.inline_svg(figure, name, alt)
    box = axis.get_position()  # saving has laid the figure out
    area = f"left:{box.x0:.2%};top:{1 - box.y1:.2%};width:{box.width:.2%};height:{box.height:.2%}"
    most = int(72 * size[0] * box.width / _STRIP)
    return svg, area, [*_values(axis, series, heading, most)]


def _values(
    axis: Any, series: Sequence[Series], heading: Callable[[float], str], most: int
) -> Iterator[dict[str, Any]]:
    """Yield what to show for each place on an axis, from left to right, for at most so many places.

    A place has a strip of the axis. While the pointer is there, the page shows the known value of each
    series that is nearest to the place within the strip.
    """
    to_axis = axis.transData - axis.transAxes
    drawn = [to_axis.transform(np.column_stack([one.x, one.y])) for one in series]
    at = _places(series, most)
    middles = to_axis.transform(np.column_stack([at, np.full(len(at), axis.get_ylim()[0])]))[:, 0]
    if not len(at):
        return
    if series[0].style == "layer":  # a share of time belongs to the steps before it
        edges = np.concatenate([[0.0], middles])
    else:
        edges = np.concatenate([[0.0], (middles[1:] + middles[:-1]) / 2, [1.0]])
    for x, middle, low, high in zip(at, middles, edges[:-1], edges[1:], strict=True):
        near = [
            (one, points[i], one.text(i))
            for one, points in zip(series, drawn, strict=True)
            if (i := _nearest(points[:, 0], one.y, middle, low, high)) is not None
        ]
        if near:
            yield {
                "strip": f"left:{low:.2%};width:{high - low:.2%}",
                "side": f"left:{middle:.2%}" if middle < 0.5 else f"right:{1 - middle:.2%}",
                "heading": heading(x),
                "lines": [(one, text) for one, _, text in near],
                "dots": [
                    (one.color, f"left:{x:.2%};top:{1 - y:.2%}")
                    for one, (x, y), _ in near
                    if one.style in _LINES
                ],
            }


def _places(series: Sequence[Series], most: int) -> Array:
    """Return at most so many places: those of the longest series, and of others beyond its ends."""
    known = [one.x[np.isfinite(one.y)] for one in series]
    at = max(known, key=len)
    if len(at):
        at = np.unique(np.concatenate([at, *(x[(x < at[0]) | (x > at[-1])] for x in known)]))
    every = -(-len(at) // most) or 1
    return at[::-1][::every][::-1]  # with the last one


def _nearest(x: Array, y: Array, middle: float, low: float, high: float) -> int | None:
    """Return the index of the known point nearest to the middle, None if none lies from low to high."""
    slack = 1e-5  # a point at the end of the axis may lie beyond it by rounding
    known = np.flatnonzero(np.isfinite(y) & (x >= low - slack) & (x <= high + slack))
    return int(known[np.abs(x[known] - middle).argmin()]) if len(known) else None
