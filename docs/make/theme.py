"""SVG files for pages: text stays text, and each picture has a panel of its own, light or dark as the browser is.

A diagram is 560 wide with text of 15, so that a phone, which shows it about 360 wide, still shows text of 10.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rank0rl.tools import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1]
OUT = DOCS  # where pictures are written
WIDTH = 560
_STYLE = """\
svg { color: var(--text); }
text { font: 15px system-ui, sans-serif; fill: currentColor; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .bold { font-weight: 600; }
.mono { font: 13px ui-monospace, monospace; white-space: pre; }
.small { font-size: 13px; } .muted { fill: var(--muted); }
.panel { fill: var(--back); stroke: var(--line); }
.box { fill: var(--tile); stroke: var(--muted); }
.idle { fill: none; stroke: var(--muted); stroke-dasharray: 4 4; }
.arrow { fill: none; stroke: var(--muted); stroke-width: 1.6; marker-end: url(#head); }
#head path { fill: var(--muted); }
"""
_COLORED = "".join(
    f".c{i} {{ fill: var(--c{i}); fill-opacity: .25; stroke: var(--c{i}); }}\n" for i in range(8)
)
_COLORED += ".flat { fill-opacity: .6; stroke: none; rx: 0; }\n"
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>\n'
)


def box(x: float, y: float, width: float, height: float, text: str = "", kind: str = "box") -> str:
    """Return a box with text in its middle."""
    rect = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>\n'
    )
    return rect + write(x + width / 2, y + height / 2 + 5, text, "middle") * bool(text)


def write(x: float, y: float, text: str, kind: str = "") -> str:
    """Return a line of text, which begins at x unless its kind is "middle" or "end"."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>\n'


def arrow(*points: tuple[float, float]) -> str:
    """Return an arrow along these points."""
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="M{path}" class="arrow"/>\n'


def save_diagram(name: str, height: float, alt: str, *elements: str, width: float = WIDTH) -> None:
    """Write a diagram of these elements into docs/.

    Args:
        name: name of the file, without .svg.
        height: its height.
        alt: text that tells a screen reader what it shows.
        elements: results of the functions above.
        width: its width.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(alt)}">\n'
    )
    style = f"<style>\n{figures.COLORS}{_STYLE}{_COLORED}</style>\n"
    body = f"{_panel(width, height)}{_HEAD}{''.join(elements)}"
    _write(name, f"{head}{style}{body}</svg>\n")


def save_plot(name: str, figure: Figure, alt: str) -> None:
    """Write a figure into docs/, within `figures.style()`; `name` and `alt` are those of `save_diagram`."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.12, h_pad=0.12)  # inches to the border of the panel
    svg = figures.inline_svg(figure, name, alt)
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)  # hundredths of a point are enough
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)  # one rule for all, below
    start = svg.index(">") + 1
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None
    text = "text { font-family: system-ui, sans-serif; fill: currentColor; }"
    style = f"<style>\n{figures.COLORS}svg {{ color: var(--text); }}\n{text}\n"
    style += ".panel { fill: var(--back); stroke: var(--line); }</style>\n"
    panel = _panel(*map(float, size.groups()))
    _write(name, f"{svg[:start]}\n{style}{panel}{svg[start:]}\n")


def _panel(width: float, height: float) -> str:
    return f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8" class="panel"/>\n'


def _write(name: str, text: str) -> None:
    path = OUT / f"{name}.svg"
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
