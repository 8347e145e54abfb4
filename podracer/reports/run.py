"""Self-contained HTML report on one run, or comparing several, without any external address.

Runs whose configurations differ only in the seed form a group. It is drawn as its score over the
seeds, with an interval where these are enough (see `scores/statistics.py`).
"""

from __future__ import annotations

import html
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from podracer.io.addresses import local_run
from podracer.io.entry_points import installed
from podracer.io.paths import user_path
from podracer.io.run_directory import write_bytes
from podracer.io.sinks import TASK_REWARD, group
from podracer.reports import charts, seeds
from podracer.reports.lineage import lineage_figures
from podracer.reports.page import page, row, section, table, tiles
from podracer.scores.facts import facts, verdict
from podracer.scores.format import clock, percent
from podracer.scores.runs import RunRecords, as_text, read_members, read_object
from podracer.scores.seeds import count_seeds

_LOG = logging.getLogger("podracer")

_ABBREVIATIONS = {"approx": "approximate", "kl": "KL divergence", "q": "Q", "td": "TD"}

LEARNING = (
    charts.Panel("Episode return (dots: evaluation)", "episode_return", "evaluation_return"),
    charts.Panel("Episode length", "episode_length"),
    charts.Panel("Frames per second", "frames_per_second"),
)
MACHINE = (
    charts.Panel("Cores that process 0 keeps busy", "machine_cores"),
    charts.Panel("Memory of process 0 in GiB", "machine_memory", unit=2**30),
    charts.Panel(
        "Memory of the fullest device of process 0 in GiB", "machine_device_memory", unit=2**30
    ),
)


def write_report(runs: Sequence[Path | str], file: Path, refresh: float = 0) -> Path:
    """Write the report on runs, directories or addresses, to a file, and return its path.

    A browser that shows it loads it again every `refresh` seconds, if not 0.
    Raises `ConfigError` for a directory that holds no run and for files that cannot be read.
    """
    file = user_path(file)
    paths = list(dict.fromkeys(local_run(path).resolve() for path in runs))
    suffixes = (["/".join(path.parts[-n:]) for path in paths] for n in itertools.count(1))
    names = next(names for names in suffixes if len({*names}) == len(names))  # the shortest
    loaded = [run for pair in zip(paths, names, strict=True) for run in read_members(*pair)]
    lineages, of_packages = [], []
    for path, name in zip(paths, names, strict=True):
        config = read_object(path / "config.json")
        lineages.append(lineage_figures(name, path, config.get("experiment", {})))
        for title, content in _installed_sections(path, config).items():
            title = html.escape(title if len(paths) == 1 else f"{name}: {title}")
            of_packages.append(section(title, content))
    title = ", ".join(run.name for run in loaded) if len(loaded) < 4 else f"{len(loaded)} runs"
    if len({run.top.name for run in loaded}) == 1 < len(loaded):
        title = f"{loaded[0].top.name}, {len(loaded)} pods"
    groups = group_runs(loaded)
    waits = []
    for run in loaded:
        if text := html.escape(verdict(run)):
            name = f"<b>{html.escape(run.name)}</b>: " if len(loaded) > 1 else ""
            waits.append(f"<p>{name}{text}</p>")
    body = [
        *(crash_note(run) for run in loaded if run.crash),
        _summary(loaded, groups),
        _end_note(loaded),
        section("Scores", seeds.final_scores(groups)),
        *_learning_sections(groups),
        section("Lineage", "".join(lineages)),
        *of_packages,
        section("Who waits for whom", "".join(waits)),
        section("Where the time went", _stages(loaded)),
        section("Configuration", configuration(loaded)),
    ]
    write_bytes(file, page(title, body, refresh).encode(errors="replace"))
    return file


def group_runs(runs: Sequence[RunRecords]) -> charts.Groups:
    """Group the runs that differ only in the seed; keys name the differences between groups."""
    of_recipe: dict[str, charts.Groups] = {}
    for run in runs:
        alone = "" if "seed" in run.settings else run.name
        key = json.dumps([run.configuration, alone], sort_keys=True)
        of_recipe.setdefault(run.recipe, {}).setdefault(key, []).append(run)
    groups: charts.Groups = {}
    for recipe, peers in of_recipe.items():
        for key, settings in charts.differing_settings(peers).items():
            label = peers[key][0].name
            for digits in (6, 0) if len(peers[key]) > 1 else ():  # all where labels are the same
                texts = charts.settings_text(settings, digits)
                label = ", ".join([recipe, *texts, seeds.counted(peers[key])])
                if label not in groups:
                    break
            groups[label] = peers[key]
    return groups


def _installed_sections(run: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the sections of installed packages on a run, by title, without those that fail."""
    sections: dict[str, str] = {}
    for entry in installed("reports").values():
        try:
            sections |= entry.load()(run, config)
        except Exception as error:
            _LOG.warning("The report has no section of %s: %s", entry.value, error)
    return sections


def _summary(runs: Sequence[RunRecords], groups: charts.Groups) -> str:
    repeated = {k: x for members in groups.values() for k, x in count_seeds(members)[1].items()}
    rows = []
    for run in runs:
        marks = [*filter(None, [repeated.get(run.name)]), *run.marks]
        rows.append(facts(run) | ({"Remarks": "; ".join(marks)} if marks else {}))
    if len(runs) == 1:
        return tiles(rows[0])
    names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    for name in ("Evaluation policy", "Recipe", "Device", "Versions"):  # below, where all share it
        if len({row.get(name) for row in rows}) == 1:
            names.pop(name, None)
    cells = ([row.get(name, "-") for name in names] for row in rows)
    return table(["Run", *names], ([run.name, *x] for run, x in zip(runs, cells, strict=True)))


def _end_note(runs: Sequence[RunRecords]) -> str:
    """Return a warning where runs of a comparison ended by their own evaluations."""
    count = sum(run.early_end == "target_return" for run in runs)
    if len(runs) == 1 or not count:
        return ""
    return (
        f"<p><b>{count} of {len(runs)} runs ended when an evaluation reached the target return.</b>"
        " Such an evaluation is partly luck, so the final values of these runs are biased upward. "
        "A fair comparison trains without a target return.</p>"
    )


def _learning_sections(groups: charts.Groups) -> Iterator[str]:
    """Yield sections of HTML with learning curves of all metrics that were logged.

    Each environment has charts of its own, as returns of two have no common measure.
    """
    environments, lines = seeds.by_environment(groups), seeds.caption(groups)
    keys: dict[str, list[str]] = {}
    records = (record for runs in groups.values() for run in runs for record in run.records)
    for key in dict.fromkeys(k for record in records for k, x in record.items() if x is not None):
        keys.setdefault(key.partition("[")[0], []).append(key)
    metrics = [
        charts.Panel(metric_title(name), name, parts=keys[name] if keys[name] != [name] else ())
        for name in sorted(keys, key=lambda name: ("loss" not in name, name))
        if group(name) == "learn"
    ]
    tasks = [x for x in metrics if x.key.startswith(TASK_REWARD)]
    for name, title, panels in (
        ("learning", "Learning", LEARNING),
        ("tasks", "Rewards by task", tasks),
        ("metrics", "Losses and other metrics", [x for x in metrics if x not in tasks]),
        ("machine", "Machine", MACHINE),
    ):
        parts = []
        for environment, members in environments.items():
            block = f"{name} {environment}"
            if content := charts.curves(block, members, panels, num_blocks=len(environments)):
                parts.append(seeds.environment_title(environment, environments) + content)
        yield section(title, "".join(parts) + lines if parts else "")
        lines = ""  # said once


def metric_title(key: str) -> str:
    """Return a metric's name in words."""
    if key.startswith(TASK_REWARD):
        return f"Reward of a step in {key.removeprefix(TASK_REWARD)}"
    words = [_ABBREVIATIONS.get(word, word) for word in key.split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def _stages(runs: Sequence[RunRecords]) -> str:
    """Return the wall time of each run, or sweep, and the share of each stage as a table."""
    tops = {run.top.name: run.top for run in runs}
    stages = {name: run.stage_seconds for name, run in tops.items()}
    names = dict.fromkeys(x for seconds in stages.values() for x in seconds if x != "other")
    rows = []
    for run, seconds in stages.items():
        total = sum(seconds.values())
        times = [seconds.get(name, 0.0) for name in (*names, "other")]
        cells = [f"{percent(x / total)} ({clock(x)})" if x else "-" for x in times]
        rows.append([run, clock(total), *cells])
    has_time = any(any(seconds.values()) for seconds in stages.values())
    return table(["Run", "Wall time", *names, "other"], rows) if has_time else ""


def configuration(runs: Sequence[RunRecords]) -> str:
    """Return all settings as a table; those in which the runs differ come first and are marked."""
    tables = []
    for run in runs:
        context = {part: run.config[part] for part in ("versions", "device") if part in run.config}
        tables.append(run.settings | as_text(context))
    differing, shared = [], []
    for key in dict.fromkeys(key for values_of_run in tables for key in values_of_run):
        values = [values_of_run.get(key, "-") for values_of_run in tables]
        if len(set(values)) > 1:
            differing.append(row(key, values, ' class="differs"'))
        else:
            shared.append(row(key, values[:1], f' colspan="{len(runs)}"'))
    parts = []
    if differing:
        head = f"<thead>{row('', (run.name for run in runs), tag='th')}</thead>"
        parts.append(_settings([head, *differing]))
    if shared:
        count = f"{len(shared)} settings" + (" that all runs share" if len(runs) > 1 else "")
        parts.append(f"<details><summary>{count}</summary>{_settings(shared)}</details>")
    return "".join(parts)


def _settings(rows: Sequence[str]) -> str:
    return f'<div class="wide"><table class="settings">{"".join(rows)}</table></div>'


def crash_note(run: RunRecords) -> str:
    """Return what ended a run, with its traceback folded."""
    text = {key: html.escape(str(value)) for key, value in run.crash.items() if value is not None}
    fields = ("code", "component", "last_update", "last_checkpoint")
    facts = ", ".join(f"{key.replace('_', ' ')} {text[key]}" for key in fields if key in text)
    return (
        f"<aside><h2>{html.escape(run.name)}: {text.get('exception', 'ended by an error')}</h2>"
        f"<p>{text.get('message', '')}</p><small>{facts}</small>"
        f"<details><summary>Traceback</summary><pre>{text.get('traceback', '')}</pre></details>"
        "</aside>"
    )
