"""Reports stand alone, say what was recorded and run nothing; videos play what was rendered."""

from __future__ import annotations

import html
import html.parser
import json
import math
import re
import stat

import numpy as np
import pytest
import scipy.stats
from charts import blocks, figures, legend, panels
from PIL import Image, ImageSequence

from podracer.io.seal import seal_json
from podracer.reports.charts import Panel, curves
from podracer.reports.lineage import lineage_figures
from podracer.reports.page import charts_script, hash_of, plotly_script
from podracer.reports.run import write_report
from podracer.reports.video import write_video
from podracer.scores.runs import RunRecords
from podracer.scores.score import best_return, returns_of
from podracer.scores.statistics import (
    ENOUGH,
    bootstrap_interval,
    final_mean,
    interquartile_mean,
    running_mean,
    score_of_seeds,
)

HOSTILE = "<script>alert(1)</script> & {x} $y$"


def make_run(directory, *, seed=0, learning_rate=0.001, records=12, offset=0.0, **config):
    directory.mkdir(parents=True)
    content = {
        "recipe": "catch",
        "experiment": {"seed": seed, "agent": {"learning_rate": learning_rate, "note": HOSTILE}},
        "versions": {"jax": "0.10.2", "python": "3.11.7"},
        "device": {"kind": "TPU v5", "devices": 4},
        **config,
    }
    seal_json(directory / "config.json", content)
    with (directory / "metrics.jsonl").open("w") as file:
        for i in range(1, records + 1):
            record = {
                "updates": i, "frames": 1000 * i, "seconds": 5.0 + i, "frames_per_second": 2e6,
                "episode_return": None if i == 3 else offset + i / records, "episode_length": 9.0,
                "policy_loss": -0.1 * i, "entropy": None, "time_step": 0.75,
                "time_compile": 5.0 if i == 1 else 0.0,
            }  # fmt: skip
            if i % 4 == 0:
                record["evaluation_return"] = offset + (0.9 if i == 8 else 0.5)
            file.write(json.dumps(record) + "\n")
        file.write('{"updates": 99, "fra')
    return directory


class Page(html.parser.HTMLParser):
    """The tags, attributes, and visible text of a page."""

    def __init__(self, path):
        super().__init__()
        whole = path.read_text(encoding="utf-8")
        self.scripts = re.findall("<script>(.*?)</script>", whole, re.DOTALL)
        self.source = re.sub("<script>.*?</script>", "", whole, flags=re.DOTALL)
        self.tags, self.attributes, text = set(), [], []
        self.handle_data = text.append
        self.feed(re.sub("<script.*?</script>", "", self.source, flags=re.DOTALL))
        self.size = len(whole.encode())
        self.text = re.sub(r"\s+", " ", " ".join(text))

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = [
        make_run(root / "a0", seed=0),
        make_run(root / "a1", seed=1, offset=0.25),
        make_run(root / "slow", learning_rate=0.0001, records=8),
    ]
    crash = {"code": 72, "exception": "OSError", "message": HOSTILE, "traceback": HOSTILE}
    (runs[2] / "crash.json").write_text(json.dumps(crash))
    return Page(write_report(runs, root / "report.html"))


def test_a_report_is_self_contained_and_runs_its_own_scripts_alone(compared):
    assert not compared.tags & {"script", "link", "iframe", "object", "embed", "form", "a", "img"}
    assert not any(name.startswith("on") for name, _ in compared.attributes)
    assert "://" not in compared.source
    assert "@import" not in compared.source
    assert compared.text.count(HOSTILE) == 3  # one shared setting, the message, the traceback
    assert compared.scripts == [plotly_script(), charts_script()]
    (policy,) = [value for name, value in compared.attributes if "default-src" in (value or "")]
    hashes = " ".join(map(hash_of, compared.scripts))
    assert policy == (
        f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    )


def test_the_charts_hold_what_was_recorded(compared):
    (drawn,) = blocks(compared.source)["learning "]
    returns, length, pace = panels(drawn)
    by_run = {}
    for trace in returns["data"]:
        by_run.setdefault(trace["meta"].partition("<br>")[0], []).append(trace)
    for name, offset in (("a0", 0.0), ("a1", 0.25)):
        line, dots = by_run[name]
        values = [offset + i / 12 for i in range(1, 13) if i != 3]
        for axis, scale, start in (("frames", 1000, 0), ("updates", 1, 0), ("seconds", 1, 5)):
            x, y = line["curves"][axis]
            assert x == [start + scale * i for i in range(1, 13) if i != 3]
            np.testing.assert_allclose(y, values, rtol=1e-5)
        assert dots["curves"]["updates"] == [
            [4, 8, 12],
            [offset + x for x in (0.5, 0.9, 0.5)],
        ]
        assert line["meta"].startswith(f"{name}<br>seed {name[1]}<br>learning_rate 0.001")
    group = "catch, learning_rate 0.001, 2 seeds"
    assert by_run[group][0]["name"] == "score"
    assert [trace["mode"] for trace in by_run["slow"]] == ["lines", "lines", "markers"]
    assert length["data"][0]["curves"]["updates"][1] == [9] * 12
    assert pace["data"][0]["curves"]["updates"][1] == [2_000_000] * 12
    assert [*legend(drawn)] == [group, "slow"]
    assert {x["legendgroup"] for x in drawn["data"]} == {group, "slow"}


def test_an_axis_of_small_values_has_ticks_such_as_1e_4(tmp_path):
    records = [{"updates": i, "rate": 1e-4 * i, "loss": 1e-2 * i} for i in (1, 2, 3)]
    run = RunRecords("a", {"experiment": {}}, records=records, crash={})
    page = curves("block", {"a": [run]}, [Panel("Rate", "rate"), Panel("Loss", "loss")])
    layout = blocks(page)["block"][0]["layout"]
    assert [layout[axis]["exponentformat"] for axis in ("yaxis", "yaxis2")] == ["e", "B"]


def test_names_and_settings_are_text_in_charts(tmp_path):
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>", records=4)
    record = {"updates": 9, "frames": 9, "seconds": 9, "episode_return": 1.0, HOSTILE: 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "<img" not in page.source
    titles = [html.escape(x) for x in figures(page.source) if "alert" in x]
    assert len(titles) == 1
    for figure in figures(page.source).values():
        for trace in figure["data"]:
            shown = [trace.get("text", ""), trace.get("meta", ""), trace.get("name", "")]
            assert not re.search("<(?!br>)", str(shown))
        assert "<img" not in str(figure["layout"])


@pytest.mark.parametrize("seeds", [ENOUGH - 1, ENOUGH])
def test_an_interval_needs_five_seeds_in_words_and_in_figures(tmp_path, seeds):
    runs = [make_run(tmp_path / f"{i}", seed=i, offset=0.25 * (i == 0)) for i in range(seeds)]
    page = Page(write_report(runs, tmp_path / "report.html"))
    if seeds < ENOUGH:
        words = "4 seeds 0.562 0.750, 0.500, 0.500, 0.500 mean of 4 seeds evaluation"
    else:
        words = "5 seeds 0.500 0.500 to 0.667 interquartile mean of 5 seeds evaluation"
    assert words in page.text
    traces = figures(page.source)["Episode return (dots: evaluation)"]["data"]
    parts = {trace["name"]: trace["curves"] for trace in traces if "name" in trace}
    assert ("low" in parts) == (seeds >= ENOUGH)
    x, score = parts["score"]["updates"]
    series = [0.25 * (i == 0) + np.delete(np.arange(1, 13) / 12, 2) for i in range(seeds)]
    at = np.delete(np.arange(1.0, 13.0), 2)
    grid = np.linspace(1, 12, len(x))
    values = np.stack([np.interp(grid, at, running_mean(y)) for y in series])
    np.testing.assert_allclose(score, score_of_seeds(values), rtol=1e-4)
    if seeds >= ENOUGH:
        bounds = (parts[name]["updates"][1] for name in ("low", "high"))
        np.testing.assert_allclose(list(bounds), bootstrap_interval(values), rtol=1e-4)


@pytest.mark.parametrize("config", [None, "{}", '{"experiment": {}, "device": "cpu"}'])
@pytest.mark.parametrize("metrics", ["", '{"updates": 1}\n', '{"updates": 1, "loss": null}\n{"up'])
def test_a_report_needs_little(tmp_path, config, metrics):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert tmp_path.name in page.text


def test_a_pod_that_met_a_fault_is_not_the_best(tmp_path):
    record = {"updates": 9, "episodes": [8, None, 8], "evaluation_return": [-200.0, -100.0, None]}
    returns = returns_of(record, "evaluation_return")
    np.testing.assert_array_equal(returns, [-200.0, np.nan, np.nan])
    experiment = {
        "exchange": {"kind": "Selection", "every": 4},
        "driver": {"updates_per_chunk": 4},
        "pods": [{"seed": seed, "hyperparameters": []} for seed in range(3)],
    }

    def lines():
        records = [{"updates": 5, "parent": [0, 1, 2]}, record]
        (tmp_path / "pods.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
        drawn = lineage_figures("", tmp_path, experiment)
        return [x["y"] for x in figures(drawn)["Pods"]["data"]]

    assert set(lines()[2]) == {0, None}
    record["evaluation_return"] = [None, -100.0, None]  # of a pod with a fault
    pods, _, winner, ancestors = lines()
    assert winner == ancestors == []
    assert set(pods) == {0, 1, 2, None}


def test_the_lineage_of_a_later_round_goes_on_with_its_updates(tmp_path):
    """What its pods began with, earlier selections have chosen."""
    rate = [{"name": "rate", "value": 1.0}]
    experiment = {
        "exchange": {"kind": "Selection", "every": 4},
        "driver": {"updates_per_chunk": 2},
        "pods": [{"seed": seed, "hyperparameters": rate} for seed in range(2)],
    }
    selected = {"parent": [0, 0], "hyperparameter_rate": [2.0, 3.0]}
    for start, first in ((0, [1.0, 1.0]), (20, [None, None])):
        records = [{"updates": start + 2}, {"updates": start + 6, **selected}]
        records[-1] |= {"episodes": [8, 8], "episode_return": [1.0, 2.0]}
        (tmp_path / "pods.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
        drawn = figures(lineage_figures("", tmp_path, experiment))
        dots = drawn["rate"]["data"][1]
        assert list(dots["x"]) == [start, start, start + 4, start + 4]
        assert list(dots["y"]) == [*first, 2.0, 3.0]


def test_a_partial_evaluation_is_never_the_best_and_reaches_no_target(tmp_path):
    records = [{"evaluation_return": 9.0, "evaluation_unfinished": 3}, {"evaluation_return": 1.0}]
    records = [{"updates": i, "seconds": i, **record} for i, record in enumerate(records, 1)]
    config = {"experiment": {"target_return": 5.0}}
    assert best_return(records) == 1.0
    assert best_return(records[:1]) is None
    assert RunRecords("run", config, records[:1], {}).early_end == ""
    whole = [records[0], records[1] | {"evaluation_return": 5.0}]
    assert RunRecords("run", config, whole, {}).early_end == "target_return"
    pods = {"episodes": [8, 8], "evaluation_return": [9.0, 1.0], "evaluation_unfinished": [3, 0]}
    np.testing.assert_array_equal(returns_of(pods, "evaluation_return"), [np.nan, 1.0])


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 4, 7])
def test_interquartile_mean_agrees_with_scipy(seeds):
    values = np.random.default_rng(seeds).normal(size=(seeds, 5))
    np.testing.assert_allclose(interquartile_mean(values), scipy.stats.trim_mean(values, 0.25))


@pytest.mark.parametrize("seeds", [1, 4, 5, 10])
def test_the_score_is_the_mean_of_few_seeds_and_nothing_where_one_failed(seeds):
    values = np.random.default_rng(seeds).normal(size=(seeds, 5))
    few = seeds < ENOUGH
    expected = values.mean(0) if few else interquartile_mean(values)
    np.testing.assert_array_equal(score_of_seeds(values), expected)
    values[0, 1] = np.nan
    np.testing.assert_array_equal(np.isnan(score_of_seeds(values)), np.arange(5) == 1)


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    low, high = bootstrap_interval(generator.normal(size=(20, 400)))  # 400 experiments at once
    covered = np.mean((low <= 0) & (high >= 0))
    assert 0.85 < covered < 0.99  # the percentile bootstrap of 20 is known to be a bit narrow
    low, high = bootstrap_interval(np.full((5, 1), 3.0))
    assert low == high == 3.0


@pytest.mark.parametrize("length", [1, 2, 99, 100, 201, 250, 1275, 3001])
def test_running_mean_against_a_slow_loop(length):
    values = np.random.default_rng(0).normal(size=length)
    half = length // 50 // 2
    slow = [values[max(0, i - half) : i + half + 1].mean() for i in range(length)]
    np.testing.assert_allclose(running_mean(values), slow)
    assert final_mean(values) == pytest.approx(slow[-1])
    assert (len(running_mean(values[:0])), final_mean(values[:0])) == (0, None)
    values[:1] = 1e18  # is in no mean but those around it
    slow = [values[max(0, i - half) : i + half + 1].mean() for i in range(length)]
    np.testing.assert_allclose(running_mean(values), slow)


# --- videos ---------------------------------------------------------------------------------------


def read_gif(path):
    with Image.open(path) as image:
        frames = [(np.asarray(f.convert("RGB")), f.info["duration"])
                  for f in ImageSequence.Iterator(image)]  # fmt: skip
    return np.stack([frame for frame, _ in frames]), [duration for _, duration in frames]


def test_a_gif_of_few_colors_is_exact(tmp_path):
    shades = np.arange(256, dtype=np.uint8).reshape(16, 16)  # neighbors differ by one
    frames = np.repeat(np.stack([shades, shades.T, shades[::-1]])[..., None], 3, axis=-1)
    write_video(frames, tmp_path / "a.gif", fps=30)
    shown, durations = read_gif(tmp_path / "a.gif")
    np.testing.assert_array_equal(shown, frames)
    assert durations == [30, 40, 30]  # hundredths of a second, right in total


@pytest.fixture
def ffmpeg(tmp_path, monkeypatch):
    """Stands for ffmpeg: writes its arguments, and as the video the number of bytes it was sent."""

    def install(script='echo "$@" > "$0.args"; for out; do :; done; wc -c < /dev/stdin > "$out"'):
        tool = tmp_path / "bin" / "ffmpeg"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tool.parent))
        return tool

    return install


def test_an_mp4_is_piped_to_ffmpeg(tmp_path, ffmpeg):
    tool = ffmpeg()
    write_video(np.zeros((3, 5, 7, 3), np.uint8), tmp_path / "a.mp4", fps=12)
    arguments = tool.with_name("ffmpeg.args").read_text()
    assert "-s 7x5 -r 12" in arguments
    assert int((tmp_path / "a.mp4").read_text()) == math.prod((3, 5, 7, 3))


@pytest.mark.figure(16)
def test_reports_and_videos_replace_a_link_and_leave_its_target(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    for name in ("report.html", "play.gif"):
        (tmp_path / name).symlink_to(precious)
    write_report([make_run(tmp_path / "run", seed=7)], tmp_path / "report.html")
    write_video(np.zeros((2, 4, 4, 3), np.uint8), tmp_path / "play.gif", fps=1)
    assert precious.read_text() == "keep"
    assert not (tmp_path / "report.html").is_symlink() | (tmp_path / "play.gif").is_symlink()
