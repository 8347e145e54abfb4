"""What `examples/extensions` builds from public names alone: checked, trained, and held to that."""

import dataclasses
import importlib
import importlib.util
import math
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import podracer
from podracer.cli.main import main
from podracer.io.checkpoint import stored_fingerprint
from podracer.run.sweep import make_pods

ROOT = Path(__file__).parents[2]
EXTENSIONS = ROOT / "examples" / "extensions"


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXTENSIONS)
    yield importlib.import_module
    for path in EXTENSIONS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def settings_of(name, load):
    """An extension's settings with their defaults."""
    if name == "transformer":
        return podracer.PPO(network=load(name).Transformer())
    return getattr(load(name), {"vmpo": "VMPO", "rnd": "RND", "dreamer": "Dreamer"}[name])()


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("vmpo", "catch"),
        pytest.param("vmpo", "pendulum", marks=pytest.mark.slow),
        pytest.param("vmpo", "probe:multidiscrete", marks=pytest.mark.slow),
        ("rnd", "catch"),
        ("dreamer", "cartpole"),
        ("transformer", "probe:memory"),
    ],
)
def test_an_agent_passes_the_check_as_it_is(name, environment, load):
    spec = podracer.make(environment).spec
    podracer.check_agent(podracer.Blueprint(settings_of(name, load), spec))


SLOW = ("rnd", "dreamer", "transformer")  # to compile
FRAMES = {"vmpo": 20_480, "rnd": 10_240, "dreamer": 5_120, "transformer": 10_240}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FRAMES],
)
def test_an_extension_runs(name, load):
    """For a chunk, too little to learn."""
    assert math.isfinite(load(name).main(frames=FRAMES[name], evaluations=1, devices=1))


@pytest.mark.slow
def test_a_curriculum_moves_to_levels_that_fail_and_a_resumed_run_goes_on_with_it(load, tmp_path):
    module, seen = load("curriculum"), {}

    class Seen(module.Curriculum):
        def on_boundary(self, run):
            super().on_boundary(run)
            seen[run.directory.name, run.totals.frames] = run.changes["environment"]["inner"]

    settings = {"evaluations": 4, "frames": 10_240}
    whole = module.train([Seen()], run_dir=tmp_path / "whole", **settings)
    stop = lambda boundary: boundary.metrics["updates"] >= 10  # noqa: E731
    module.train([Seen(), stop], run_dir=tmp_path / "cut", **settings)
    cut = module.train([Seen()], run_dir=tmp_path / "cut", resume=True, **settings)
    jax.tree.map(np.testing.assert_array_equal, cut.state.shared.params, whole.state.shared.params)
    (run, frames), inner = list(seen.items())[-1]
    assert seen["whole", frames] == inner
    assert run == "cut"
    weights = [parts["weights"] for parts in seen.values()]
    assert [sum(x) for x in weights] == pytest.approx([1] * len(weights))
    assert any(x[0] < x[-1] for x in weights)  # the shortest level is learned first


def test_level_replay_refuses_a_sweep_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples" / "level_replay")
    module = importlib.import_module("level_replay")
    mazes = dataclasses.replace(module.maze_random(), environment=module.Mazes())
    sweep = dataclasses.replace(mazes, pods=make_pods({}, seeds=(0, 1)))
    monkeypatch.setattr("podracer.run.loop.Run.execute", lambda *_: pytest.fail("it begins"))
    with pytest.raises(podracer.ConfigError, match="levels of one run"):
        podracer.train(sweep, run_dir=tmp_path / "run", callbacks=[module.LevelReplay("0.1")])


@pytest.mark.slow
def test_level_replay_is_a_recipe_that_a_killed_run_resumes_with(tmp_path, monkeypatch):
    """From the command line, by the entry points of the example's package."""
    folder = ROOT / "examples" / "level_replay"
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "level_replay-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: level_replay\nVersion: 0.1\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in names.items())
        for group, names in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("".join(lines))
    for path in (tmp_path, folder):
        monkeypatch.syspath_prepend(path)
    monkeypatch.setattr("podracer.cli.train.initialize_devices", lambda *_: None)  # they are
    small = {
        "driver": {"num_envs": 16, "updates_per_chunk": 2}, "frames": 4096, "evaluations": 4,
        "evaluation_episodes": 8, "save_seconds": 0.0, "devices": 1,
    }  # fmt: skip

    class Killed(podracer.Callback):
        def on_record(self, run, record):
            if record["updates"] == 6:
                raise KeyboardInterrupt

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    podracer.train("maze_plr", run_dir=whole, **small)
    with pytest.raises(KeyboardInterrupt):
        podracer.train("maze_plr", run_dir=killed, callbacks=[Killed()], **small)
    with pytest.raises(SystemExit, match="0"):
        main(["resume", str(killed), "--recipe", "maze_plr"])
    assert stored_fingerprint(killed) == stored_fingerprint(whole)
