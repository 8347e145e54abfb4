"""Reading of the charts on a page, as its script reads them."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import plotly.graph_objects as go

BLOCK = re.compile(r'<div class="charts" data-name="([^"]*)"[^>]*>(.*?</script></div>)</div>', re.S)
CHART = re.compile(r'<script type="application/json">([^<>&]*)</script>')


def blocks(page: str) -> dict[str, list[Any]]:
    """Return the figures of each block by name; every one is sound to plotly."""
    found = {}
    for name, text in BLOCK.findall(page):
        found[html.unescape(name)] = [_read(chart) for chart in CHART.findall(text)]
    assert page.count('class="charts"') == len(found)
    return found


def figures(page: str) -> dict[str, Any]:
    """Return all figures of a page, and all panels of those with several, by their titles."""
    return {
        _plain(panel["layout"]["title"]["text"]): panel
        for block in blocks(page).values()
        for figure in block
        for panel in panels(figure)
    }


def panels(figure: Any) -> list[Any]:
    """Return the panels of a figure; traces of curves have `curves`, over each x axis."""
    layout, data = figure["layout"], figure["data"]
    if "grid" not in layout:
        return [figure | {"data": [x for x in data if not x["showlegend"]]}]
    buttons = {x["label"]: x["args"][0] for x in layout["updatemenus"][0]["buttons"]}
    for i, trace in enumerate(x for x in data if not x["showlegend"]):
        curves = {axis: [args["x"][i], args["y"][i]] for axis, args in buttons.items()}
        trace["curves"] = {axis: curve for axis, curve in curves.items() if curve[0]}
    return [
        {
            "data": [x for x in data if x.get("xaxis") == title["xref"].split()[0]],
            "layout": {"title": title},
        }
        for title in layout["annotations"]
    ]


def legend(figure: Any) -> dict[str, str]:
    """Return the labels of a figure's legend, with their colors."""
    return {x["name"]: x["line"]["color"] for x in figure["data"] if x["showlegend"]}


def _plain(text: str) -> str:
    return html.unescape(text.replace("<br>", " "))


def _read(text: str) -> Any:
    content = json.loads(text)
    figure = _revived({x: content[x] for x in ("data", "layout")}, content["arrays"])
    go.Figure(_themed(figure))  # raises where it is not
    return figure


def _themed(value: Any) -> Any:
    """Colors of the page's style, which the script looks up, replaced by one."""
    if isinstance(value, dict):
        return {key: _themed(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_themed(x) for x in value]
    return "#000" if isinstance(value, str) and value.startswith("--") else value


def _revived(value: Any, arrays: Any) -> Any:
    if isinstance(value, list):
        return [_revived(x, arrays) for x in value]
    if not isinstance(value, dict):
        return value
    if "@" in value:
        return arrays[value["@"]]
    return {key: _revived(x, arrays) for key, x in value.items()}
