"""HTML pages of one file: titled sections, tables, tiles, their style and scripts."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def page(title: str, body: Iterable[str], refresh: float = 0) -> str:
    """Return a whole HTML page; the title is plain text, the parts are HTML.

    A page with charts holds the scripts that draw them, and runs no other. A browser loads the file
    again every `refresh` seconds, never by default.
    """
    title = html.escape(title)
    content = "\n".join([f"<small>podracer</small><h1>{title}</h1>", *body])
    scripts = [plotly_script(), charts_script()] if 'class="charts"' in content else []
    return TEMPLATE.format(
        title=title,
        refresh=f'<meta http-equiv="refresh" content="{refresh:g}">' if refresh else "",
        style=STYLE,
        hashes=" ".join(map(hash_of, scripts)) or "'none'",
        body=content + "".join(f"<script>{script}</script>" for script in scripts),
    )


def plotly_script() -> str:
    """Return plotly's own script, which draws charts without any other file."""
    from plotly.offline import get_plotlyjs  # takes long, and few commands draw

    return get_plotlyjs()


def charts_script() -> str:
    """Return the script that hands the charts of a page to plotly."""
    return Path(__file__).with_name("charts.js").read_text(encoding="utf-8")


def hash_of(script: str) -> str:
    """Return the source in a content security policy that allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


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
<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}">
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
.wide { overflow: auto; max-height: 36rem }
table { border-collapse: collapse; font-size: .85rem; width: 100%; overflow-wrap: normal }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .8rem .4rem 0; text-align: left;
  vertical-align: baseline }
thead th { color: var(--soft); font-weight: 400; vertical-align: bottom }
.settings tr > th:first-child { color: var(--soft); font: .8rem ui-monospace, Menlo, monospace }
tr > th:first-child { white-space: nowrap }
td.differs { background: var(--mark); padding-left: .5rem }
.charts { margin: .5rem 0 1.5rem }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--least)), 1fr)) }
.chart { min-width: 0 }
@media (hover: hover) { .modebar { opacity: 0 } .chart:hover .modebar { opacity: 1 } }
aside { border: 1px solid var(--error); border-radius: 8px; padding: 1rem 1.2rem; margin: 1.5rem 0 }
aside h2 { color: var(--error) }
summary { cursor: pointer; color: var(--soft) }
pre { background: var(--fill); padding: 1rem; border-radius: 6px; overflow-x: auto }
@media (max-width: 700px) { .tiles { grid-template-columns: repeat(2, 1fr) }
  .tiles div:empty:nth-child(odd), .tiles div:empty + div:empty { display: none }
  body { margin-top: 1rem; padding: 0 .9rem } h1 { font-size: 1.4rem }
  section { margin-top: 1.8rem } td, th { padding-right: .6rem } }
"""
