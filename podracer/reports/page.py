"""Parts of the HTML pages: titled sections, tables, tiles, and their style."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole HTML page; the title is plain text, the parts are HTML."""
    title = html.escape(title)
    head = f"<small>podracer</small><h1>{title}</h1>"
    return TEMPLATE.format(title=title, style=STYLE, body="\n".join([head, *body]))


def section(title: str, content: str) -> str:
    """Return a titled section of HTML, or nothing if it has no content."""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def tiles(facts: Mapping[str, str]) -> str:
    """Return names and values, all plain text, as tiles side by side; the first four are large."""
    cells = [f"<div><dt>{k}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()]
    cells += ["<div></div>"] * (-len(cells) % 4)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of plain text as a table with named columns."""
    body = "".join(row(first, cells) for first, *cells in rows)
    top = row(head[0], head[1:], tag="th")
    return f'<div class="wide"><table><thead>{top}</thead>{body}</table></div>'


def row(head: str, values: Iterable[str], attributes: str = "", tag: str = "td") -> str:
    """Return a row of a table, all plain text; `attributes` are those of each cell but the head."""
    cells = "".join(f"<{tag}{attributes}>{html.escape(value)}</{tag}>" for value in values)
    return f"<tr><th>{html.escape(head)}</th>{cells}</tr>"


TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head>
<body>{body}</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --soft: #6b7280;
  --line: #e3e6ea; --fill: #f5f6f8; --mark: #fff4d6; --error: #c62828 }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e8eb; --soft: #9aa3ad;
  --line: #2d333b; --fill: #1c2127; --mark: #3d3417; --error: #ff7b72 } }
body { background: var(--page); color: var(--text); max-width: 1080px; margin: 3rem auto 5rem;
  padding: 0 1.5rem; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 2rem }
h2 { font-size: 1.15rem; margin: 0 0 .5rem }
h3 { font-size: .95rem; margin: 1.5rem 0 .3rem; color: var(--soft) }
section { margin-top: 3rem }
small { color: var(--soft); font-size: .85rem }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px;
  background: var(--line); border: 1px solid var(--line); border-radius: 8px; overflow: hidden }
.tiles div { background: var(--page); padding: .8rem 1rem }
.tiles div:nth-child(-n+4) dd { font-size: 1.5rem; line-height: 1.3 }
dt { color: var(--soft); font-size: .8rem }
dd { margin: 0; font-weight: 600 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; width: 100%; overflow-wrap: normal }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .8rem .4rem 0; text-align: left;
  vertical-align: baseline }
thead th { color: var(--soft); font-weight: 400; vertical-align: bottom }
.settings tr > th:first-child { color: var(--soft); font: .8rem ui-monospace, Menlo, monospace }
tr > th:first-child { white-space: nowrap }
td.differs { background: var(--mark); padding-left: .5rem }
.bar { width: 100% }
.bar div { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden }
.legend { list-style: none; font-size: .85rem; display: flex; flex-wrap: wrap; gap: .3rem 1rem;
  padding: 0; margin: .5rem 0 }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em }
.panels { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--least)), 1fr)) }
picture img { width: 100%; display: block }
aside { border: 1px solid var(--error); border-radius: 8px; padding: 1rem 1.2rem; margin: 1.5rem 0 }
aside h2 { color: var(--error) }
summary { cursor: pointer; color: var(--soft) }
pre { background: var(--fill); padding: 1rem; border-radius: 6px; overflow-x: auto }
@media (max-width: 700px) { .tiles { grid-template-columns: repeat(2, 1fr) } }
"""
