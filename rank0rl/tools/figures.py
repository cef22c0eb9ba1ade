"""The style of all figures, and figures as SVG in an HTML page. Needs matplotlib."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


def check() -> None:
    """Check that figures can be drawn.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise ValueError(
            "figures need matplotlib, which is in the extra \"plot\": run pip install -e '.[plot]'"
        ) from None


@contextlib.contextmanager
def style() -> Iterator[type[Figure]]:
    """Give matplotlib's Figure class; figures drawn and saved in this context share one style.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    check()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        yield Figure


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    file = io.BytesIO()
    with style():
        figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


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
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub("|".join(_COLORS), lambda found: _COLORS[found[0]], svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)
