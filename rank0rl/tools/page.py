"""Elements of a self-contained HTML page. This module escapes all text that it is given."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --muted: #59636e; --line: #d8dee4;
  --tile: #f6f8fa; --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #dc2626; --c4: #7c3aed;
  --c5: #8b5e34; --c6: #db2777; --c7: #6b7280; --c8: #84910b; --c9: #0891b2; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --muted: #9198a1;
  --line: #30363d; --tile: #161b22; --c0: #60a5fa; --c1: #fbbf24; --c2: #34d399; --c3: #f87171;
  --c4: #a78bfa; --c5: #d6a77a; --c6: #f472b6; --c7: #9ca3af; --c8: #cddc39; --c9: #22d3ee; } }
* { box-sizing: border-box; }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 64rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
p { margin: .3rem 0; }
.muted, figcaption, dt, th { color: var(--muted); }
figcaption { font-size: .87rem; }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; fill: currentColor; }
img { display: block; max-width: 100%; background: #fff; padding: .5rem; border-radius: .4rem;
  border: 1px solid var(--line); }
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
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr));
  gap: 1rem 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-size: .85rem; font-weight: normal; vertical-align: bottom; }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
.text td { max-width: 44rem; white-space: normal; overflow-wrap: anywhere; }
@media print { :root { --back: #fff; } body { max-width: none; } }
"""


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
    """Return a table of "numbers" or "text", which scrolls if it is too wide."""
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{_cells("th", head)}</tr>'
        f"</thead><tbody>{lines}</tbody></table></div>"
    )


def figure(picture: str, caption: str = "") -> str:
    """Return an SVG with a caption."""
    below = f"<figcaption>{escape(caption)}</figcaption>" * bool(caption)
    return f"<figure>{picture}{below}</figure>"


def image(png: bytes, alt: str) -> str:
    """Return a PNG as an element of the page."""
    data = base64.b64encode(png).decode()
    return f'<figure><img src="data:image/png;base64,{data}" alt="{escape(alt)}"></figure>'


def small(figures: Iterable[str]) -> str:
    """Return small figures side by side, as many as fit."""
    inside = "".join(figures)
    return f'<div class="small">{inside}</div>' * bool(inside)


def code(text: str) -> str:
    """Return a block of code, such as a command line."""
    return f'<pre class="scroll" tabindex="0">{escape(text)}</pre>'


def items(texts: Iterable[str]) -> str:
    """Return a bulleted list."""
    inside = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{inside}</ul>" * bool(inside)


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
