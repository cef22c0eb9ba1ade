"""The look of results: numbers as text, figures in one style, and the parts of a report page.

A page consists of macros of the Jinja2 template page.html, and of charts with values under the pointer.
Figures need matplotlib.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import numpy as np
from markupsafe import Markup

from rank0rl.run import files
from rank0rl.run.folder import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = """\
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --muted: #59636e; --line: #d8dee4;
  --tile: #f6f8fa; --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #dc2626; --c4: #7c3aed;
  --c5: #0891b2; --c6: #db2777; --c7: #6b7280; --c8: #84910b; --c9: #8b5e34; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --muted: #9198a1;
  --line: #30363d; --tile: #161b22; --c0: #60a5fa; --c1: #fbbf24; --c2: #34d399; --c3: #f87171;
  --c4: #a78bfa; --c5: #22d3ee; --c6: #f472b6; --c7: #9ca3af; --c8: #cddc39; --c9: #d6a77a; } }
"""
"""The colors of pages and of inline SVG as CSS variables, light or dark as the browser is."""
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "grid.color": "#000000",
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "text.parse_math": False,  # a setting may contain two $ and is not a formula
    "svg.fonttype": "none",  # text stays text, shown in the page's font
    "svg.hashsalt": "rank0rl",  # fixed, so that the same figure gives the same file
}
# matplotlib's colors C0 to C9 and its black become the page's colors, light or dark.
_CYCLE = (
    *("1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd"),
    *("8c564b", "e377c2", "7f7f7f", "bcbd22", "17becf"),
)
_COLORS = {f"#{color}": f"var(--c{i})" for i, color in enumerate(_CYCLE)}
_COLORS["#000000"] = "currentColor"
_LETTERS = 100  # of a name in a figure
_FORMULA = re.compile(r"[=+\-@\t\r]")  # with which a spreadsheet takes text for a formula
_MARKUP = re.compile(r"[\\|<]|(?<=\])\(")
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals["colors"] = COLORS


html: Any = _templates.get_template("page.html").module
"""The macros of page.html, such as `html.table(head, rows)`. They escape all text that they are given."""

# Sizes in inches. A page scales a figure to the width of its text, so that a font of 9 points is
# about as large as the text on the screen that the size is for.
_SIZES = {"wide": (9.6, 3.5), "narrow": (3.9, 2.7)}
_SMALL = (3.4, 1.9)
_STRIP = 6.0  # points: least width of a place under the pointer; a finger or a hand is not steadier

_LINES = {"line": "-", "dashed": "--", "dotted": ":", "dots": "o-", "sparse": "o--"}
_BANDS = {"band": 0.25, "wide": 0.12}  # and their opacity


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


def duration(seconds: float) -> str:
    """Return a time in hours, minutes or seconds."""
    return next(f"{seconds / n:.3g} {name}" for n, name in _TIMES if seconds >= n or n == 1)


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text: strings unchanged, everything else as JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in values.items()}


def markdown(
    head: Sequence[str], rows: Iterable[Iterable[str]], words: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a table in Markdown, of plain text. Columns are aligned right, but for those of words."""
    rule = "|".join(":---" if name in words else "---:" for name in head)
    plain = (
        [_MARKUP.sub(r"\\\g<0>", " ".join(c.split())) for c in cells] for cells in (head, *rows)
    )
    first, *lines = (f"| {' | '.join(cells)} |" for cells in plain)
    return [first, f"|{rule}|", *lines]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table with six digits of its numbers. All rows have the names of the first one.

    Text that a spreadsheet would take for a formula has a quote before it.
    """
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _csv_cell(v) for k, v in row.items()} for row in rows)
    files.write(path, file.getvalue().encode())


def _csv_cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str) or not _FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


@contextlib.contextmanager
def style() -> Iterator[type[Figure]]:
    """Give matplotlib's Figure class; figures drawn and saved in this context share one style.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        # Away from the working folder: matplotlib reads a file of settings there, which may be anybody's.
        with contextlib.chdir(Path(__file__).parent):
            import matplotlib as mpl
            from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "figures need matplotlib, which is in the extra \"plot\": run pip install -e '.[plot]'"
        ) from None
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of letters without a picture, or no room for them
        yield Figure


def image(figure: Figure, kind: str = "png") -> bytes:
    """Return a figure as the bytes of a file of this kind: png, svg or pdf."""
    file = io.BytesIO()
    with style():
        _cut_names(figure)
        figure.savefig(file, format=kind, dpi=120)
    return file.getvalue()


def _cut_names(figure: Figure) -> None:
    """Cut the long names in a figure: to lay out 100,000 letters takes a minute."""
    from matplotlib.text import Text

    for one in figure.findobj(Text):
        assert isinstance(one, Text)
        one.set_text(_cut(one.get_text()))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        names = [one.get_text() for one in axis.get_ticklabels()]
        if any(len(name) > _LETTERS for name in names):
            axis.set_ticks(axis.get_ticklocs(), [*map(_cut, names)])


def _cut(name: str) -> str:
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 3]}..."


def short_numbers() -> Any:
    """Return a formatter of an axis that writes 20k and 1.5M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def label_decades(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every decade; at more places if it has less than one."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(short_numbers())
    axis.set_minor_formatter(NullFormatter())


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an SVG element for an HTML page, in the colors of `COLORS`.

    Args:
        figure: the drawn figure.
        name: name that no other figure on the page has; it begins every id in the SVG.
        alt: text that tells a screen reader what the figure shows.
    """
    _cut_names(figure)
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub("|".join(_COLORS), lambda found: _COLORS[found[0]], svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)


_Style = Literal["line", "dashed", "dotted", "dots", "sparse", "band", "wide", "layer", "bar"]
Finish = Callable[[Any], None]
"""A function that sets the labels and limits of an axis."""


@dataclass(frozen=True)
class Series:
    """A line, a band, a layer of a stack, or bars, in a chart."""

    label: str
    x: Array  # places on the horizontal axis, shape (points,), in increasing order
    y: Array  # numbers at these places; NaN where there is none
    color: int = 0  # number of its color on the page, 0 to 9
    # A line; or an area from low to y: a band, a wide and paler one, a layer or a bar.
    style: _Style = "line"
    low: Array = field(default_factory=lambda: np.zeros(1))  # a layer or a bar stands for y - low
    form: Callable[[float], str] = number  # writes a value
    whole: str = ""  # its value over the whole run, which the legend shows

    def text(self, i: int) -> str:
        """Return the value at point i."""
        if self.style in _LINES:
            return self.form(self.y[i])
        if self.style in _BANDS:
            return f"{self.form(self.low[i])} to {self.form(self.y[i])}"
        return self.form(self.y[i] - self.low[i])

    def draw(self, axis: Any) -> None:
        """Draw it on an axis of matplotlib."""
        x, low, y = self.x, self.low, self.y
        looks = {"color": f"C{self.color}", "label": self.label}
        if self.style == "bar":
            axis.bar(x, y - low, bottom=low, alpha=0.85, width=0.6, **looks)
        elif self.style == "layer":  # each value belongs to the steps before its place
            x, low, y = np.append(0.0, x), np.append(low[:1], low), np.append(y[:1], y)
            axis.fill_between(x, low, y, step="pre", alpha=0.85, linewidth=0, **looks)
        elif self.style in _BANDS:
            axis.fill_between(x, low, y, alpha=_BANDS[self.style], linewidth=0, **looks)
        else:
            known = np.isfinite(y)
            line = _LINES[self.style] if known.sum() > 1 else "o"  # one point would be invisible
            axis.plot(x[known], y[known], line, markersize=3.5, clip_on=False, **looks)


def by_steps(last: float, y: str = "") -> Finish:
    """Return a function that gives an axis the steps from 0 to the last one, and labels if y has one."""

    def finish(axis: Any) -> None:
        axis.xaxis.set_major_formatter(short_numbers())
        axis.set_xlim(0, last)
        if y:
            axis.set_xlabel("steps")
            axis.set_title(y, loc="left")

    return finish


def _steps(place: float) -> str:
    return f"{number(place)} steps"


def chart(
    name: str,
    alt: str,
    series: Sequence[Series],
    finish: Finish,
    heading: Callable[[float], str] = _steps,
    caption: str = "",
) -> Markup:
    """Return a chart as wide as the page, with its legend.

    Args:
        name: a name that no other chart on the page has.
        alt: text that tells a screen reader what the chart shows.
        series: what to draw.
        finish: sets the labels and limits of the axis.
        heading: turns a place on the horizontal axis into text.
        caption: text below the chart.
    """
    pictures = {
        kind: _picture(f"{name}-{kind}", alt, size, series, finish, heading)
        for kind, size in _SIZES.items()
    }
    return html.legend(series) + html.figure(pictures, caption)


def small_chart(title: str, alt: str, series: Sequence[Series], finish: Finish) -> Markup:
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
    finish: Finish,
    heading: Callable[[float], str],
) -> tuple[str, str, list[dict[str, Any]]]:
    """Return a figure's SVG, where its axis lies, and the values under the pointer."""
    with style() as figure_class:
        figure = figure_class(figsize=size, layout="constrained")
        axis = figure.add_subplot()
        for one in series:
            one.draw(axis)
        finish(axis)
        svg = inline_svg(figure, name, alt)
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
    at = max(known, key=len, default=np.zeros(0))
    if len(at):
        at = np.unique(np.concatenate([at, *(x[(x < at[0]) | (x > at[-1])] for x in known)]))
    every = -(-len(at) // most) or 1
    return at[::-1][::every][::-1]  # with the last one


def _nearest(x: Array, y: Array, middle: float, low: float, high: float) -> int | None:
    """Return the index of the known point nearest to the middle, None if none lies from low to high."""
    slack = 1e-5  # a point at the end of the axis may lie beyond it by rounding
    known = np.flatnonzero(np.isfinite(y) & (x >= low - slack) & (x <= high + slack))
    return int(known[np.abs(x[known] - middle).argmin()]) if len(known) else None
