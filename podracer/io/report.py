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
from typing import Any, NamedTuple

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
        pairs = [(r.get(over), r.get(key)) for r in self.records]
        kept = [(x, y) for x, y in pairs if _is_finite(x) and _is_finite(y)]
        x, y = np.array(kept, float).reshape(-1, 2).T
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


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the report on run directories to the file `out`, and return that.

    Raises `ConfigError` for a directory that holds no run and for files that cannot be read.
    """
    paths = [Path(path).resolve() for path in runs]
    unique = len({path.name for path in paths}) == len(paths)
    loaded = [_load(p, p.name if unique else f"{p.parent.name}/{p.name}") for p in paths]
    out = Path(out)
    out.write_text(_page(loaded), encoding="utf-8")
    return out


def _load(path: Path, name: str) -> Run:
    metrics = path / "metrics.jsonl"
    if not metrics.exists() and not (path / "config.json").exists():
        from podracer.types import ConfigError

        raise ConfigError(f"{path} is not a run: it has neither config.json nor metrics.jsonl.")
    records = read_metrics(metrics) if metrics.exists() else []
    return Run(name, _read_object(path / "config.json"), records, _read_object(path / "crash.json"))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        from podracer.types import ConfigError

        raise ConfigError(f"{path} is damaged; it should be a JSON object.")
    return content


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree)


def _groups(runs: Sequence[Run]) -> Groups:
    """Runs that differ in nothing but the seed, under their recipe's name where there are more."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        rest = {k: v for k, v in run.settings.items() if k != "seed"}
        alone = "" if "seed" in run.settings else run.name
        found.setdefault(json.dumps([run.recipe, rest, alone]), []).append(run)
    labels: Groups = {}
    for members in found.values():
        label = members[0].name
        if len(members) > 1:
            label = f"{members[0].recipe}, {len(members)} seeds"
        while label in labels:
            label += "'"
        labels[label] = members
    return labels


# --- statistics -----------------------------------------------------------------------------------


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over about 2 % of the values `[n]`, over fewer of them near the ends."""
    half = len(values) // _SMOOTH // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, at[::-1]))
    return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


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


# --- figures --------------------------------------------------------------------------------------


def _figure(groups: Groups, panels: Sequence[Panel], columns: int, height: float) -> str:
    """Panels as one picture for a light page and one for a dark page."""
    dark, light = (_render(groups, panels, columns, height, theme) for theme in ("dark", "light"))
    alt = html.escape("Curves of " + ", ".join(panel.title.lower() for panel in panels))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{alt}" src="{light}"></picture>'
    )


def _render(
    groups: Groups, panels: Sequence[Panel], columns: int, height: float, theme: str
) -> str:
    strong, soft, faint = _THEMES[theme]
    style = {
        "text.color": strong, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": soft,
        "axes.edgecolor": faint, "grid.color": faint, "grid.linewidth": 0.6, "font.size": 8,
        "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titlepad": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
        "axes.facecolor": "none", "figure.facecolor": "none", "text.parse_math": False,
        "xtick.major.size": 0, "ytick.major.size": 0,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(10.8, rows * height), layout="constrained")
        FigureCanvasAgg(figure)
        for index, panel in enumerate(panels):
            _curves(figure.add_subplot(rows, columns, index + 1), groups, panel)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.08)  # type: ignore[union-attr]
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=160, format="png", metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


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
            x, y = run.series(panel.points, panel.over)
            axes.scatter(x, y, s=15, color=color, edgecolors=matplotlib.rcParams["text.color"],
                         linewidths=0.7, zorder=3)  # fmt: skip
    axes.set_title(panel.title)
    axes.set_xlabel(panel.over)
    axes.grid(axis="y")
    axes.margins(x=0.02, y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, *, lone: bool) -> None:
    some = slice(None, None, max(1, len(x) // _POINTS))
    if lone and len(x) >= 2 * _SMOOTH:
        axes.plot(x[some], y[some], color=color, alpha=0.25, lw=0.7)
    style = {"alpha": 1.0, "lw": 1.6} if lone else {"alpha": 0.35, "lw": 0.7}
    marker = "." if len(x) == 1 else ""
    axes.plot(x[some], running_mean(y)[some], color=color, marker=marker, **style)


def _band(axes: Axes, series: list[tuple[np.ndarray, np.ndarray]], color: str) -> None:
    start, end = max(x[0] for x, _ in series), min(x[-1] for x, _ in series)
    if end > start:
        at = np.linspace(start, end, _GRID)
        values = np.stack([np.interp(at, x, y) for x, y in series])
        low, high = bootstrap_interval(values)
        axes.fill_between(at, low, high, color=color, alpha=0.2, lw=0)
        axes.plot(at, interquartile_mean(values), color=color, lw=1.8)


def _tick(value: float, _: int | None) -> str:
    return compact(value) if abs(value) >= 1000 else f"{value:.4g}"


# --- page -----------------------------------------------------------------------------------------


def _page(runs: Sequence[Run]) -> str:
    groups = _groups(runs)
    names = [run.name for run in runs]
    title = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
    body = [
        f"<header><p>podracer report</p><h1>{html.escape(title)}</h1></header>",
        *(_crash(run) for run in runs if run.crash),
        _summary(runs),
        *(_verdict(label, members) for label, members in groups.items() if len(members) > 1),
        *_learning(groups),
        _section("Where the time went", _stages(runs)),
        _section("Configuration", _configuration(runs)),
    ]
    return _TEMPLATE.format(title=html.escape(title), style=_STYLE, body="\n".join(body))


def _section(title: str, content: str, note: str = "") -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{note}{content}</section>" if content else ""


def _summary(runs: Sequence[Run]) -> str:
    rows = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>"
            for name, value in rows[0].items()
        )
        return f'<dl class="tiles">{tiles}</dl>'
    head = "".join(f"<th>{name}</th>" for name in ("Run", *rows[0]))
    lines = [
        f"<tr><th>{html.escape(run.name)}</th>{_cells(row.values())}</tr>"
        for run, row in zip(runs, rows, strict=True)
    ]
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _cells(values: Iterable[str], kind: str = "") -> str:
    return "".join(f"<td{kind}>{html.escape(value)}</td>" for value in values)


def _facts(run: Run) -> dict[str, str]:
    evaluations = run.series("evaluation_return", "updates")[1]
    returns = running_mean(run.series("episode_return", "updates")[1])
    pace = run.series("frames_per_second", "updates")[1]
    compiled = run.series("time_compile", "updates")[1]
    device, versions = run.config.get("device", "-"), run.config.get("versions")
    if isinstance(device, dict):
        device = f"{device.get('count', 1)} × {device.get('kind', device.get('platform', '?'))}"
    versions = versions if isinstance(versions, dict) else {}
    named = [
        f"{name} {versions[name]}" for name in ("podracer", "jax", "python") if name in versions
    ]
    return {
        "Final evaluation": number(evaluations[-1] if len(evaluations) else None),
        "Best evaluation": number(evaluations.max() if len(evaluations) else None),
        "Final return": number(returns[-1] if len(returns) else None),
        "Frames": compact(run.last("frames")),
        "Updates": compact(run.last("updates")),
        "Frames/second": compact(np.median(pace) if len(pace) else None),
        "Wall time": clock(run.last("seconds")),
        "Compile time": clock(compiled.sum() if len(compiled) else None),
        "Recipe": run.recipe,
        "Seed": run.settings.get("seed", "-"),
        "Device": str(device),
        "Versions": ", ".join(named) or "-",
    }


def _verdict(label: str, members: Sequence[Run]) -> str:
    """The final score of a group over its seeds."""
    for key, name in (("evaluation_return", "evaluation"), ("episode_return", "episode return")):
        finals = [run.series(key, "updates")[1][-1:] for run in members]
        scores = np.concatenate(finals)
        if len(scores) > 1:
            low, high = bootstrap_interval(scores)
            mean = number(float(interquartile_mean(scores)))
            return (
                f'<p class="note"><b>{html.escape(label)}</b>: final {name} {mean}, '
                f"95 % interval {number(float(low))} to {number(float(high))} "
                f"(interquartile mean over {len(scores)} seeds, bootstrap).</p>"
            )
    return ""


def _learning(groups: Groups) -> Iterator[str]:
    runs = [run for members in groups.values() for run in members]
    logged = {k for run in runs for record in run.records for k in record if record[k] is not None}
    first = [
        Panel("Episode return over frames", "episode_return", "frames", "evaluation_return"),
        Panel("Episode return over time", "episode_return", "seconds", "evaluation_return"),
    ]
    if logged & {"episode_return", "evaluation_return"}:
        note = "Line: episodes while training, running mean. Dots: evaluation."
        yield _section("Learning", _legend(groups) + _figure(groups, first, 2, 3.4), note)
    second = [
        Panel("Episode length over frames", "episode_length", "frames"),
        Panel("Frames per second over time", "frames_per_second", "seconds"),
    ]
    second = [panel for panel in second if panel.key in logged]
    if second:
        yield _section("Pace", _figure(groups, second, 2, 2.6))
    keys = sorted(
        (key for key in logged if group(key) == "learn"), key=lambda k: ("loss" not in k, k)
    )
    metrics = [Panel(key.replace("_", " ").capitalize(), key, "frames") for key in keys]
    if metrics:
        yield _section("Losses and other metrics", _figure(groups, metrics, 3, 1.9))


def _legend(groups: Groups) -> str:
    return _swatches(zip(groups, itertools.cycle(_COLORS))) if len(groups) > 1 else ""


def _swatches(entries: Iterable[tuple[str, str]]) -> str:
    items = (
        f'<li><i style="background:{color}"></i>{html.escape(label)}</li>'
        for label, color in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stages(runs: Sequence[Run]) -> str:
    """Each run's wall time as a bar, its parts the stages."""
    spent = [_spent(run) for run in runs]
    longest = max((sum(stages.values()) for stages in spent), default=0.0)
    if not longest:
        return ""
    names = list(dict.fromkeys(name for stages in spent for name in stages))
    colors = dict(zip(names, itertools.cycle(_COLORS))) | {"other": "#8a919a"}
    rows = []
    for run, stages in zip(runs, spent, strict=True):
        total = sum(stages.values())
        parts = "".join(
            f'<i style="width:{100 * value / longest:.3f}%;background:{colors[name]}" '
            f'title="{html.escape(name)} {clock(value)}"></i>'
            for name, value in stages.items()
        )
        shares = ", ".join(
            f"{name} {100 * value / (total or 1):.0f} %" for name, value in stages.items()
        )
        rows.append(
            f"<tr><th>{html.escape(run.name)}</th>"
            f'<td class="bar"><div>{parts}</div><small>{html.escape(shares)}</small></td>'
            f"<td>{clock(total)}</td></tr>"
        )
    return f'{_swatches(colors.items())}<table class="bars">{"".join(rows)}</table>'


def _spent(run: Run) -> dict[str, float]:
    keys = dict.fromkeys((*_STAGES, *(key for record in run.records for key in record)))
    spent = {
        key.removeprefix("time_").replace("_", " "): float(run.series(key, "updates")[1].sum())
        for key in keys
        if group(key) == "time"
    }
    rest = (run.last("seconds") or 0.0) - sum(spent.values())
    return {name: seconds for name, seconds in spent.items() if seconds} | {"other": max(0.0, rest)}


def _configuration(runs: Sequence[Run]) -> str:
    """All settings; those in which the runs differ come first and are marked."""
    tables = [
        run.settings
        | {f"{part}.{key}": value for part in ("versions", "device")
           for key, value in _flatten(run.config.get(part, {}))}
        for run in runs
    ]  # fmt: skip
    keys = dict.fromkeys(key for table in tables for key in table)
    differing, shared = [], []
    for key in keys:
        values = [table.get(key, "-") for table in tables]
        name = f"<th>{html.escape(key)}</th>"
        if len(set(values)) > 1:
            differing.append(f'<tr class="differs">{name}{_cells(values)}</tr>')
        else:
            span = f' colspan="{len(runs)}"'
            shared.append(f"<tr>{name}{_cells(values[:1], span)}</tr>")
    if not keys:
        return ""
    head = "<th></th>" + "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    head = f"<tr>{head}</tr>" if len(runs) > 1 else ""
    rows = "".join((head, *differing, *shared))
    return f'<div class="wide"><table class="settings">{rows}</table></div>'


def _crash(run: Run) -> str:
    where = html.escape(f"{run.name}: {run.crash.get('exception', 'it ended with an error')}")
    message = html.escape(str(run.crash.get("message", "")))
    facts = ", ".join(
        f"{key.replace('_', ' ')} {value}"
        for key, value in run.crash.items()
        if key in ("code", "component", "last_update", "last_checkpoint") and value is not None
    )
    trace = html.escape(str(run.crash.get("traceback", "")))
    details = f"<details><summary>Traceback</summary><pre>{trace}</pre></details>" if trace else ""
    return (
        f'<aside><h2>{where}</h2><p>{message}</p><p class="note">{html.escape(facts)}</p>'
        f"{details}</aside>"
    )


_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head>
<body>
{body}
</body></html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --soft: #6b7280;
  --line: #e3e6ea; --fill: #f5f6f8; --mark: #fff4d6; --error: #c62828 }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e8eb; --soft: #9aa3ad;
  --line: #2d333b; --fill: #1c2127; --mark: #3d3417; --error: #ff7b72 } }
body { background: var(--page); color: var(--text); max-width: 1080px; margin: 3rem auto 5rem;
  padding: 0 1.5rem; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums }
header p { color: var(--soft); margin: 0 }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 2rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 0 0 .5rem }
section { margin-top: 3rem }
.note, small { color: var(--soft); font-size: .85rem; margin: .5rem 0 }
.note b { color: var(--text) }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; margin: 0;
  background: var(--line); border: 1px solid var(--line); border-radius: 8px; overflow: hidden }
.tiles div { background: var(--page); padding: .8rem 1rem }
dt { color: var(--soft); font-size: .8rem }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere }
.tiles div:nth-child(-n+4) dd { font-size: 1.5rem; line-height: 1.3 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .8rem .4rem 0; text-align: left;
  vertical-align: baseline }
tr > th:first-child { font-weight: 600; white-space: nowrap }
tr:first-child > th { color: var(--soft); font-weight: 400 }
.settings th:first-child { font: .8rem ui-monospace, Menlo, Consolas, monospace; color: var(--soft) }
.differs > * { background: var(--mark) }
picture img { width: 100%; display: block }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0;
  margin: .5rem 0; font-size: .85rem }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .45em }
.bars .bar { width: 100% }
.bar div { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden }
aside { border: 1px solid var(--error); border-radius: 8px; padding: 1rem 1.2rem; margin: 1.5rem 0 }
aside h2 { color: var(--error) }
aside p { margin: .3rem 0; overflow-wrap: anywhere }
pre { background: var(--fill); padding: 1rem; border-radius: 6px; overflow-x: auto;
  font-size: .8rem }
@media (max-width: 700px) { .tiles { grid-template-columns: repeat(2, 1fr) } }
"""
