"""Profiles of runs."""

import gzip
import json

import pytest

import podracer


@pytest.mark.slow
def test_a_profile_shows_the_stages_of_actors_and_learner(tmp_path, caplog):
    podracer.train(
        "cartpole_sebulba",
        frames=20_000,
        evaluations=0,
        driver={"updates_per_chunk": 2},
        profile=2,
        run_dir=tmp_path / "run",
        progress=False,
    )
    (trace,) = (tmp_path / "run" / "profile").rglob("perfetto_trace.json.gz")
    assert str(trace) in caplog.text
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"inference", "environment", "collect", "learn"} <= {x.get("name") for x in events}


@pytest.mark.slow
def test_a_run_too_short_for_its_profile_still_writes_it(tmp_path, caplog):
    podracer.train(
        "catch",
        frames=16_384,
        evaluations=0,
        driver={"updates_per_chunk": 2},
        profile=1_000,
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert "the run to its end" in caplog.text
    assert [*(tmp_path / "run" / "profile").rglob("*.xplane.pb")]
