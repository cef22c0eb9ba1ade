"""Elements of a self-contained HTML page. This module escapes all text that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rank0rl.tools.series import Series

COLORS = """\
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --muted: #59636e; --line: #d8dee4;
  --tile: #f6f8fa; --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #dc2626; --c4: #7c3aed;
  --c5: #0891b2; --c6: #db2777; --c7: #6b7280; --c8: #84910b; --c9: #8b5e34; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --muted: #9198a1;
  --line: #30363d; --tile: #161b22; --c0: #60a5fa; --c1: #fbbf24; --c2: #34d399; --c3: #f87171;
  --c4: #a78bfa; --c5: #22d3ee; --c6: #f472b6; --c7: #9ca3af; --c8: #cddc39; --c9: #d6a77a; } }
"""
"""The colors of pages and pictures as CSS variables, light or dark as the browser is."""
_STYLE = (
    COLORS
    + """* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 68rem; margin: 0 auto; padding: 1.75rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; padding-bottom: .3rem; overflow-wrap: anywhere;
  border-bottom: 1px solid var(--line); }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.muted, figcaption, dt, th, td:first-child { color: var(--muted); }
figcaption { font-size: .87rem; margin-top: .3rem; }
figure { margin: 0; min-width: 0; }
figure + .scroll, .scroll + ul { margin-top: 1rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-family: system-ui, sans-serif !important; fill: currentColor; }
.narrow { display: none; }
.at > * { visibility: hidden; pointer-events: none; }
.at > rect:first-child { fill: none; pointer-events: all; }
.at:hover > * { visibility: visible; }
.at path { stroke: var(--muted); stroke-width: .6; }
.at circle { fill: currentColor; stroke: var(--back); }
.at text { font-size: 8.5px; }
.at tspan tspan:first-child { fill: currentColor; } .at tspan tspan:last-child { font-weight: 600; }
.box { fill: var(--back); stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; list-style: none; padding: 0;
  margin: 0 0 .6rem; font-size: .87rem; }
.legend li { display: flex; align-items: center; gap: .45rem; overflow-wrap: anywhere; }
.legend span { flex: none; width: 1.3rem; border-top: 2.5px solid; }
.legend .dashed { border-top-style: dashed; } .legend .dotted { border-top-style: dotted; }
.legend :is(.band, .wide, .layer, .bar) { width: .85rem; height: .85rem; border: 0;
  border-radius: .15rem; background: currentColor; }
.legend :is(.layer, .bar) { opacity: .85; }
.legend .band { opacity: .35; } .legend .wide { opacity: .17; display: block; }
.legend :is(.dots, .sparse) { height: .55rem; width: .55rem; border: 0; border-radius: 50%;
  background: currentColor; }
dl { margin: 0; } dt { font-size: .85rem; } dd { margin: 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem;
  margin-top: 1.2rem; }
.tiles > div { background: var(--tile); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem .8rem; }
.tiles dd { font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.pairs { columns: 19rem 3; column-gap: 2rem; }
.pairs > div { display: flex; gap: 1rem; justify-content: space-between; break-inside: avoid;
  border-bottom: 1px solid var(--line); padding: .2rem 0; }
.pairs dd, code, pre { font: .85rem/1.5 ui-monospace, monospace; }
.pairs dd { text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
ul { margin: .3rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr));
  gap: 1.2rem 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .3rem 0 .3rem 1rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-size: .85rem; font-weight: normal; vertical-align: bottom; }
.numbers { min-width: min(100%, 34rem); }
th:first-child, td:first-child { padding-left: 0; }
th:first-child, td:first-child, .text td, .text th { text-align: left; vertical-align: top; }
:is(th, td):first-child { position: sticky; left: 0; background: var(--back); }
.numbers td:first-child { min-width: 7rem; white-space: normal; overflow-wrap: anywhere; }
.words :is(th, td):nth-last-child(-n+3) { text-align: left; }
.words td { vertical-align: top; }
.words td:last-child { white-space: normal; min-width: 15rem; }
.text td { max-width: 44rem; min-width: 7rem; white-space: normal; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  body { padding: 1rem 1rem 2rem; } h1 { font-size: 1.4rem; }
  .wide { display: none; } .narrow { display: block; }
  .tiles { grid-template-columns: 1fr 1fr; } .tiles dd { font-size: 1.1rem; }
  .words td:last-child { white-space: nowrap; }
}
@media print { :root { --back: #fff; } body { max-width: none; } }
"""
    + " ".join(f".c{i} {{ color: var(--c{i}); }}" for i in range(10))
    + "\n"
)


def document(title: str, subtitle: str, *sections: str) -> str:
    """Return the whole page.

    Args:
        title: heading of the page.
        subtitle: line below the heading.
        sections: contents of the page, in HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="muted">{escape(subtitle)}</p>\n'
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def section(heading: str, *contents: str) -> str:
    """Return a heading with its contents in HTML, or "" if all contents are empty."""
    body = "".join(contents)
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>" * bool(body)


def pairs(values: Mapping[str, str], kind: str = "pairs") -> str:
    """Return names and values: as "pairs" in columns, or as "tiles" with large values."""
    each = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in values.items())
    return f'<dl class="{kind}">{"".join(each)}</dl>' * bool(values)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """Return a table of "numbers", of "text", or of numbers with three columns of "words", which scrolls if it is too wide."""
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{_cells("th", head)}</tr>'
        f"</thead><tbody>{lines}</tbody></table></div>"
    )


def figure(picture: str, caption: str = "") -> str:
    """Return an SVG with a caption."""
    below = f"<figcaption>{escape(caption)}</figcaption>" * bool(caption)
    return f"<figure>{picture}{below}</figure>"


def only(kind: str, picture: str) -> str:
    """Return a picture that is shown on "wide" or on "narrow" screens only."""
    return f'<div class="{kind}">{picture}</div>'


def legend(series: Iterable[Series]) -> str:
    """Return the marks and labels of what figures show."""
    each = "".join(
        f'<li><span class="{one.style} c{one.color}"></span>{escape(one.label)} '
        f"{escape(one.whole)}</li>"
        for one in series
    )
    return f'<ul class="legend">{each}</ul>'


def small(figures: Iterable[str]) -> str:
    """Return small figures side by side, as many as fit."""
    inside = "".join(figures)
    return f'<div class="small">{inside}</div>' * bool(inside)


def code(text: str) -> str:
    """Return a block of code, such as a command line."""
    return f"<pre>{escape(text)}</pre>"


def items(texts: Iterable[str]) -> str:
    """Return a bulleted list."""
    inside = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{inside}</ul>" * bool(inside)


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
