"""One self-contained HTML page about one run, or comparing several: no script, no address.

Runs whose configurations differ in nothing but the seed form a group: it is drawn as the
interquartile mean over its seeds with a bootstrap interval (Agarwal et al. 2021, "Deep
reinforcement learning at the edge of the statistical precipice").
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from podracer.io.console import clock, compact, number
from podracer.io.sinks import group, read_metrics

_COLORS = ("#3f8fdb", "#f28e2b", "#2ca58d", "#e15759", "#a06cd5", "#d4a72c", "#e377c2", "#7f8c8d")
_THEMES = {"light": ("#1f2328", "#6b7280", "#d8dce2"), "dark": ("#e6e8eb", "#9aa3ad", "#3a4049")}
_STAGES = ("time_step", "time_compile", "time_evaluate", "time_save")
_SMOOTH = 50  # a curve is the running mean over one part in this many of its records
_POINTS = 1000  # drawn for one curve at most
_GRID = 200  # points at which the seeds of a group are compared


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory says of its run; whatever is missing there is empty here."""

    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    crash: dict[str, Any]

    def series(self, key: str, over: str) -> tuple[np.ndarray, np.ndarray]:
        """The finite values of a metric and where they stand, both f64 `[records]`."""
        pairs = np.array([(r.get(over), r.get(key)) for r in self.records], float).reshape(-1, 2)
        x, y = pairs[np.isfinite(pairs).all(axis=1)].T
        return x, y

    def last(self, key: str) -> Any:
        values = [r[key] for r in self.records if r.get(key) is not None]
        return values[-1] if values else None

    @property
    def settings(self) -> dict[str, str]:
        """The experiment's settings by dotted name, as JSON."""
        return dict(_flatten(self.config.get("experiment", {})))

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", "-"))


Groups = dict[str, list[Run]]  # label to its runs


class Panel(NamedTuple):
    """What to draw in one pair of axes: a metric over frames or seconds, perhaps with dots."""

    title: str
    key: str
    over: str
    points: str = ""


_CURVES = (
    ("Learning", 2, 3.4, (
        Panel("Episode return over frames (dots: evaluation)",
              "episode_return", "frames", "evaluation_return"),
        Panel("Episode return over time (dots: evaluation)",
              "episode_return", "seconds", "evaluation_return"),
    )),
    ("Pace", 2, 2.6, (
        Panel("Episode length over frames", "episode_length", "frames"),
        Panel("Frames per second over time", "frames_per_second", "seconds"),
    )),
)  # fmt: skip


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the report on run directories to the file `out`, and return that.

    Raises `ConfigError` for a directory that holds no run and for files that cannot be read.
    """
    paths = [Path(path).resolve() for path in runs]
    unique = len({path.name for path in paths}) == len(paths)
    loaded = [_load(p, p.name if unique else f"{p.parent.name}/{p.name}") for p in paths]
    out = Path(out)
    out.write_text(_page(loaded), encoding="utf-8", errors="replace")
    return out


def _load(path: Path, name: str) -> Run:
    metrics = path / "metrics.jsonl"
    if not metrics.exists() and not (path / "config.json").exists():
        _refuse(f"{path} is not a run: it has neither config.json nor metrics.jsonl.")
    records = read_metrics(metrics) if metrics.exists() else []
    return Run(name, _object(path / "config.json"), records, _object(path / "crash.json"))


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        content = None
    return content if isinstance(content, dict) else _refuse(f"{path} is not a JSON object.")


def _refuse(message: str) -> NoReturn:
    from podracer.types import ConfigError  # brings JAX in

    raise ConfigError(message)


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree)


def _groups(runs: Sequence[Run]) -> Groups:
    """Runs that differ in nothing but the seed, under what sets them apart from the others."""
    found: Groups = {}
    for run in runs:
        alone = "" if "seed" in run.settings else run.name
        rest = {k: v for k, v in run.settings.items() if k != "seed"}
        found.setdefault(json.dumps([run.recipe, rest, alone]), []).append(run)
    return {_label(members, runs): members for members in found.values()}


def _label(members: Sequence[Run], runs: Sequence[Run]) -> str:
    first = members[0]
    if len(members) == 1:
        return first.name
    peers = [run.settings for run in runs if run.recipe == first.recipe]
    apart = [
        f"{key.rpartition('.')[2]} {value}"
        for key, value in first.settings.items()
        if key != "seed" and any(peer.get(key) != value for peer in peers)
    ]
    return ", ".join([first.recipe, *apart, f"{len(members)} seeds"])


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over about 2 % of the values `[n]`, over fewer of them near the ends."""
    half = len(values) // _SMOOTH // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    start, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (total[end] - total[start]) / (end - start)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean `[...]` over the middle half of `[seeds, ...]`; of fewer than four seeds, the mean."""
    cut = len(values) // 4
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(0)


def bootstrap_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of the interquartile mean of `[seeds, ...]`, seeds drawn anew 1000 times.

    The percentile bootstrap, with the same draws at every call.
    """
    generator = np.random.default_rng(0)
    draws = generator.integers(len(values), size=(1000, len(values)))
    means = np.stack([interquartile_mean(values[draw]) for draw in draws])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def _figure(groups: Groups, panels: Sequence[Panel], columns: int, height: float) -> str:
    """Panels as one picture for a light page and one for a dark page."""
    pictures = {}
    for theme, style in _THEMES.items():
        with matplotlib.rc_context(_style(*style)):
            rows = -(-len(panels) // columns)
            figure = Figure(figsize=(10.8, rows * height), layout="constrained")
            for index, panel in enumerate(panels):
                _curves(figure.add_subplot(rows, columns, index + 1), groups, panel)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
        pictures[theme] = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    alt = html.escape(", ".join(panel.title for panel in panels))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{pictures["dark"]}">'
        f'<img alt="{alt}" src="{pictures["light"]}"></picture>'
    )


def _style(strong: str, soft: str, faint: str) -> dict[Any, Any]:
    return {
        "text.color": strong, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": soft,
        "axes.edgecolor": faint, "grid.color": faint, "grid.linewidth": 0.6, "font.size": 8,
        "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlepad": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
        "axes.facecolor": "none", "figure.facecolor": "none", "text.parse_math": False,
        "xtick.major.size": 0, "ytick.major.size": 0, "figure.dpi": 160,
        "figure.constrained_layout.w_pad": 0.15,
    }  # fmt: skip


def _curves(axes: Axes, groups: Groups, panel: Panel) -> None:
    """One curve for each group, with a band if it has several seeds."""
    for color, members in zip(itertools.cycle(_COLORS), groups.values(), strict=False):
        series = [run.series(panel.key, panel.over) for run in members]
        series = [(x, y) for x, y in series if len(x)]
        for x, y in series:
            _line(axes, x, y, color, lone=len(series) == 1)
        if len(series) > 1:
            _band(axes, [(x, running_mean(y)) for x, y in series], color)
        for run in members if panel.points else ():
            edge = matplotlib.rcParams["text.color"]
            x, y = run.series(panel.points, panel.over)
            axes.scatter(x, y, s=15, color=color, edgecolors=edge, linewidths=0.7, zorder=3)
    axes.set(title=panel.title, xlabel=panel.over)
    axes.grid(axis="y")
    axes.margins(x=0.02, y=0.08)
    for axis, ticks in ((axes.xaxis, 6), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(_tick))


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, *, lone: bool) -> None:
    some = slice(None, None, max(1, len(x) // _POINTS))
    if lone and len(x) >= 2 * _SMOOTH:
        axes.plot(x[some], y[some], color=color, alpha=0.25, lw=0.7)
    alpha, width = (1.0, 1.6) if lone else (0.35, 0.7)
    marker = "." if len(x) == 1 else ""
    axes.plot(x[some], running_mean(y)[some], color=color, alpha=alpha, lw=width, marker=marker)


def _band(axes: Axes, series: list[tuple[np.ndarray, np.ndarray]], color: str) -> None:
    start, end = max(x[0] for x, _ in series), min(x[-1] for x, _ in series)
    if end > start:
        at = np.linspace(start, end, _GRID)
        values = np.stack([np.interp(at, x, y) for x, y in series])
        low, high = bootstrap_interval(values)
        axes.fill_between(at, low, high, color=color, alpha=0.2, lw=0)
        axes.plot(at, interquartile_mean(values), color=color, lw=1.8)


def _tick(value: float, _: int | None) -> str:
    """A round number, so without the zeros that `compact` keeps in line."""
    if abs(value) < 1000:
        return f"{value:.4g}"
    power = min(int(math.log10(abs(value)) + 1e-9) // 3, 4)
    return f"{value / 1000**power:.4g}" + " kMBT"[power]


def _page(runs: Sequence[Run]) -> str:
    groups = _groups(runs)
    title = html.escape(
        ", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    )
    body = [
        f"<small>podracer report</small><h1>{title}</h1>",
        *(_crash(run) for run in runs if run.crash),
        _summary(runs),
        *(_verdict(label, members) for label, members in groups.items() if len(members) > 1),
        *_learning(groups),
        _section("Where the time went", _stages(runs)),
        _section("Configuration", _configuration(runs)),
    ]
    return _TEMPLATE.format(title=title, style=_STYLE, body="\n".join(body))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _row(head: str, values: Iterable[str], attributes: str = "", tag: str = "td") -> str:
    cells = "".join(f"<{tag}{attributes}>{html.escape(value)}</{tag}>" for value in values)
    return f"<tr><th>{html.escape(head)}</th>{cells}</tr>"


def _summary(runs: Sequence[Run]) -> str:
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = (f"<div><dt>{k}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts[0].items())
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    head = _row("Run", facts[0], tag="th")
    rows = (_row(run.name, row.values()) for run, row in zip(runs, facts, strict=True))
    return f'<div class="wide"><table><thead>{head}</thead>{"".join(rows)}</table></div>'


def _facts(run: Run) -> dict[str, str]:
    """The row of a run in the summary."""
    keys = ("evaluation_return", "episode_return", "frames_per_second", "time_compile")
    evaluations, returns, pace, compiled = (run.series(key, "updates")[1] for key in keys)
    device, versions = run.config.get("device", "-"), run.config.get("versions")
    if isinstance(device, dict):
        device = f"{device.get('count', 1)} x {device.get('kind', device.get('platform', '?'))}"
    versions = versions if isinstance(versions, dict) else {}
    shown = (f"{k} {versions[k]}" for k in ("podracer", "jax", "python") if k in versions)
    return {
        "Final evaluation": number(float(evaluations[-1]) if len(evaluations) else None),
        "Best evaluation": number(float(evaluations.max()) if len(evaluations) else None),
        "Final return": number(float(running_mean(returns)[-1]) if len(returns) else None),
        "Frames": compact(run.last("frames")),
        "Updates": f"{run.last('updates') or 0:,}",
        "Frames/second": compact(float(np.median(pace)) if len(pace) else None),
        "Wall time": clock(run.last("seconds")),
        "Compile time": clock(float(compiled.sum()) if len(compiled) else None),
        "Recipe": run.recipe,
        "Seed": run.settings.get("seed", "-"),
        "Device": str(device),
        "Versions": ", ".join(shown) or "-",
    }


def _verdict(label: str, members: Sequence[Run]) -> str:
    """The final score of a group over its seeds."""
    for key, name in (("evaluation_return", "evaluation"), ("episode_return", "episode return")):
        finals = np.concatenate([run.series(key, "updates")[1][-1:] for run in members])
        if len(finals) > 1:
            low, high = (number(float(bound)) for bound in bootstrap_interval(finals))
            return (
                f"<p><b>{html.escape(label)}</b>: final {name} "
                f"{number(float(interquartile_mean(finals)))}, 95 % interval {low} to {high} "
                f"<small>(interquartile mean over {len(finals)} seeds, bootstrap)</small></p>"
            )
    return ""


def _learning(groups: Groups) -> Iterator[str]:
    """The sections with curves, of whatever was logged."""
    records = [record for runs in groups.values() for run in runs for record in run.records]
    logged = {key for record in records for key, value in record.items() if value is not None}
    keys = sorted(logged, key=lambda key: ("loss" not in key, key))
    metrics = [
        Panel(key.replace("_", " ").capitalize(), key, "frames")
        for key in keys
        if group(key) == "learn"
    ]
    legend = _legend(zip(groups, itertools.cycle(_COLORS), strict=False))
    for title, columns, height, panels in (*_CURVES, ("Losses and other metrics", 3, 1.9, metrics)):
        if shown := [panel for panel in panels if {panel.key, panel.points} & logged]:
            figure = _figure(groups, shown, columns, height)
            yield _section(title, (legend if len(groups) > 1 else "") + figure)


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    swatch = '<li><i style="background:{}"></i>{}</li>'
    items = (swatch.format(color, html.escape(label)) for label, color in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stages(runs: Sequence[Run]) -> str:
    """Each run's wall time as a bar, its parts the stages."""
    spent = [_spent(run) for run in runs]
    longest = max((sum(stages.values()) for stages in spent), default=0.0)
    if not longest:
        return ""
    names = dict.fromkeys(name for stages in spent for name in stages if name != "other")
    colors = dict(zip(names, itertools.cycle(_COLORS), strict=False)) | {"other": "#8a919a"}
    part = '<i style="width:{:.3f}%;background:{}"></i>'
    rows = []
    for run, stages in zip(runs, spent, strict=True):
        total = sum(stages.values())
        bar = "".join(part.format(100 * v / longest, colors[name]) for name, v in stages.items())
        shares = ", ".join(f"{name} {100 * v / (total or 1):.0f} %" for name, v in stages.items())
        rows.append(
            f'<tr><th>{html.escape(run.name)}</th><td class="bar"><div>{bar}</div>'
            f"<small>{html.escape(shares)}</small></td><td>{clock(total)}</td></tr>"
        )
    return f"{_legend(colors.items())}<table>{''.join(rows)}</table>"


def _spent(run: Run) -> dict[str, float]:
    logged = dict.fromkeys((*_STAGES, *(key for record in run.records for key in record)))
    times = {key: run.series(key, "updates")[1] for key in logged if group(key) == "time"}
    spent = {
        key.removeprefix("time_").replace("_", " "): float(values.sum())
        for key, values in times.items()
        if values.any()
    }
    return {**spent, "other": max(0.0, (run.last("seconds") or 0.0) - sum(spent.values()))}


def _configuration(runs: Sequence[Run]) -> str:
    """All settings; those in which the runs differ come first and are marked."""
    tables = []
    for run in runs:
        about = {part: run.config.get(part, {}) for part in ("versions", "device")}
        tables.append(run.settings | dict(_flatten(about)))
    differing, shared = [], []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, "-") for table in tables]
        if len(set(values)) > 1:
            differing.append(_row(key, values, ' class="differs"'))
        else:
            shared.append(_row(key, values[:1], f' colspan="{len(runs)}"'))
    head = f"<thead>{_row('', (run.name for run in runs), tag='th')}</thead>"
    rows = "".join([head if len(runs) > 1 else "", *differing, *shared])
    table = f'<div class="wide"><table class="settings">{rows}</table></div>'
    return table if differing or shared else ""


def _crash(run: Run) -> str:
    text = {key: html.escape(str(value)) for key, value in run.crash.items() if value is not None}
    known = ("code", "component", "last_update", "last_checkpoint")
    facts = ", ".join(f"{key.replace('_', ' ')} {text[key]}" for key in known if key in text)
    return (
        f"<aside><h2>{html.escape(run.name)}: {text.get('exception', 'ended by an error')}</h2>"
        f"<p>{text.get('message', '')}</p><small>{facts}</small>"
        f"<details><summary>Traceback</summary><pre>{text.get('traceback', '')}</pre></details>"
        "</aside>"
    )


_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head>
<body>{body}</body></html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --soft: #6b7280;
  --line: #e3e6ea; --fill: #f5f6f8; --mark: #fff4d6; --error: #c62828 }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e8eb; --soft: #9aa3ad;
  --line: #2d333b; --fill: #1c2127; --mark: #3d3417; --error: #ff7b72 } }
body { background: var(--page); color: var(--text); max-width: 1080px; margin: 3rem auto 5rem;
  padding: 0 1.5rem; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 2rem }
h2 { font-size: 1.15rem; margin: 0 0 .5rem }
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
picture img { width: 100%; display: block }
aside { border: 1px solid var(--error); border-radius: 8px; padding: 1rem 1.2rem; margin: 1.5rem 0 }
aside h2 { color: var(--error) }
pre { background: var(--fill); padding: 1rem; border-radius: 6px; overflow-x: auto }
@media (max-width: 700px) { .tiles { grid-template-columns: repeat(2, 1fr) } }
"""
