"""Charts of a page: series drawn for a wide and for a narrow screen, with values under the pointer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rank0rl.tools import figures, hover, page
from rank0rl.tools.readable import number
from rank0rl.tools.series import Series

# Sizes in inches. A page scales a figure to the width of its text, so that a font of 9 points is
# about as large as the text on the screen that the size is for.
_WIDE, _NARROW, _SMALL = (9.6, 3.5), (3.9, 2.7), (3.4, 1.9)


def steps(value: float) -> str:
    """Return a place on an axis of steps."""
    return f"{number(value)} steps"


def chart(
    name: str,
    alt: str,
    series: Sequence[Series],
    finish: Callable[[Any], None],
    heading: Callable[[float], str] = steps,
    caption: str = "",
) -> str:
    """Return a chart as wide as the page, with its legend.

    Args:
        name: name that no other chart on the page has.
        alt: text that tells a screen reader what it shows.
        series: what it shows.
        finish: function that sets the labels and limits of the axis.
        heading: function that writes a place on the horizontal axis.
        caption: text below it.
    """
    both = "".join(
        page.only(kind, _svg(f"{name}-{kind}", alt, size, series, finish, heading))
        for kind, size in (("wide", _WIDE), ("narrow", _NARROW))
    )
    return page.legend(series) * (len(series) > 1) + page.figure(both, caption)


def small(title: str, alt: str, series: Sequence[Series], finish: Callable[[Any], None]) -> str:
    """Return a small chart with a title, for a grid of them."""

    def titled(axis: Any) -> None:
        axis.set_title(title, loc="left")
        axis.locator_params(nbins=4)
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        finish(axis)

    name = re.sub(r"\W", "-", title)
    return page.figure(_svg(name, alt, _SMALL, series, titled, steps))


def _svg(
    name: str,
    alt: str,
    size: tuple[float, float],
    series: Sequence[Series],
    finish: Callable[[Any], None],
    heading: Callable[[float], str],
) -> str:
    with figures.style() as figure_class:
        figure = figure_class(figsize=size, layout="constrained")
        axis = figure.add_subplot()
        for one in series:
            one.draw(axis)
        finish(axis)
        return figures.inline_svg(figure, name, alt, lambda: hover.layer(axis, series, heading))
