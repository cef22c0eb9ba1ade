"""Values under the pointer, for an SVG in a page that runs no script: the page's style shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from rank0rl.run.folder import Array
from rank0rl.tools.series import Series

_WIDTH = 6.0  # points: least width of a place, because a finger or a hand is not steadier
_LETTER, _LINE = 4.8, 11.5  # points: width of a letter and height of a line of the box's font
_GAP = 7.0  # points between the line at the pointer and its box


def layer(axis: Any, series: Sequence[Series], heading: Callable[[float], str]) -> str:
    """Return an element for each place on the axis; it shows a box of values, and where they are.

    Args:
        axis: an axis of a figure that has been saved, because saving lays it out.
        series: what is drawn there.
        heading: first line of the box, from the place on the axis.
    """
    width, height = 72 * axis.figure.get_size_inches()
    to_figure = axis.transData - axis.figure.transFigure

    def points(x: Array, y: Array) -> Array:
        shares = to_figure.transform(np.column_stack([x, y]))
        return np.asarray(shares * [width, -height] + [0, height])

    inside = axis.get_position()
    left, right = inside.x0 * width, inside.x1 * width
    top, bottom = (1 - inside.y1) * height, (1 - inside.y0) * height
    at = _places(series, int((right - left) / _WIDTH))
    if not len(at):
        return ""
    places = points(at, np.full(len(at), axis.get_ylim()[0]))[:, 0]
    if series[0].style == "layer":  # a share of time belongs to the steps before it
        edges = np.concatenate([[left], places])
    else:
        edges = np.concatenate([[left], (places[1:] + places[:-1]) / 2, [right]])
    drawn = [points(one.x, one.y) for one in series]
    found = []
    for x, value, low, high in zip(places, at, edges[:-1], edges[1:], strict=True):
        near = [
            (one, i, where[i])
            for one, where in zip(series, drawn, strict=True)
            for i in _nearest(where[:, 0], one.y, x, low, high)
        ]
        circles = "".join(
            f'<circle class="c{one.color}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="2.6"/>'
            for one, _, (at_x, at_y) in near
            if one.is_line
        )
        lines = [(one, one.text(i)) for one, i, _ in near]
        if lines:
            found.append(
                f'<g class="at"><rect x="{low:.1f}" y="{top:.1f}" width="{high - low:.1f}" '
                f'height="{bottom - top:.1f}"/><path d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
                f"{circles}{_box(x, width, top, heading(value), lines)}</g>"
            )
    return "".join(found)


def _places(series: Sequence[Series], most: int) -> Array:
    """Return places on the axis, at most so many: those of the longest series, and of others beyond its ends."""
    known = [one.x[np.isfinite(one.y)] for one in series]
    at = max(known, key=len)
    if len(at):
        at = np.unique(np.concatenate([at, *(x[(x < at[0]) | (x > at[-1])] for x in known)]))
    every = -(-len(at) // most) or 1
    return at[::-1][::every][::-1]  # with the last one


def _nearest(x: Array, y: Array, at: float, low: float, high: float) -> Iterator[int]:
    """Yield the index of the known point that is nearest, if one is between low and high."""
    slack = 0.01  # points: a place at the axis' end may be beyond it by rounding
    known = np.flatnonzero(np.isfinite(y) & (x >= low - slack) & (x <= high + slack))
    if len(known):
        yield int(known[np.abs(x[known] - at).argmin()])


def _box(
    x: float,
    most: float,
    top: float,
    head: str,
    lines: Sequence[tuple[Series, str]],
) -> str:
    """Return a box beside x, on the side with more room, in a figure that is `most` wide."""
    longest = max(len(head), *(len(f"{one.label} {text}") + 3 for one, text in lines))
    width, height = _LETTER * longest + 10, _LINE * (len(lines) + 1) + 7
    start = x + _GAP if x < most / 2 else x - _GAP - width
    start = max(min(start, most - width - 1), 1)
    spans = "".join(
        f'<tspan x="{start + 5:.1f}" dy="{_LINE}"><tspan class="c{one.color}">\N{BLACK CIRCLE}</tspan>'
        f" {escape(one.label)} <tspan>{escape(text)}</tspan></tspan>"
        for one, text in lines
    )
    return (
        f'<rect class="box" x="{start:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="3"/><text x="{start + 5:.1f}" y="{top + _LINE:.1f}">'
        f"{escape(head)}{spans}</text>"
    )
