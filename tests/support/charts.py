"""Reading of the charts on a page, as its script reads them."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import plotly.graph_objects as go

BLOCK = re.compile(
    r'<div class="charts" data-name="([^"]*)"[^>]*>'
    r'<script type="application/json">([^<>&]*)</script></div>'
)


def blocks(page: str) -> dict[str, Any]:
    """Return the blocks of charts on a page by name; every figure is a sound one to plotly."""
    found = {}
    for name, text in BLOCK.findall(page):
        content = json.loads(text)
        block = _revived(content["block"], content["arrays"])
        for figure in block["figures"]:
            go.Figure(_themed(figure))  # raises where it is not
        found[html.unescape(name)] = block
    assert page.count('class="charts"') == len(found)
    return found


def figures(page: str) -> dict[str, Any]:
    """Return all figures of a page by their titles."""
    return {
        html.unescape(figure["layout"]["title"]["text"].replace("<br>", " ")): figure
        for block in blocks(page).values()
        for figure in block["figures"]
    }


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
