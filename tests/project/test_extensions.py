"""What `examples/extensions` builds from public names alone: checked, trained, and held to that."""

import importlib
import importlib.util
import math
import re
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from names_of_api import undocumented

import podracer
from podracer.cli.main import main
from podracer.cli.recipe_flags import parse_experiment
from podracer.cli.train import TrainOptions
from podracer.io.checkpoint import stored_fingerprint

ROOT = Path(__file__).parents[2]
EXTENSIONS = ROOT / "examples" / "extensions"
AGENTS = ("vmpo", "rnd", "dreamer", "transformer", "cloning")


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXTENSIONS)
    yield importlib.import_module
    for path in EXTENSIONS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("path", sorted(EXTENSIONS.glob("*.py")), ids=lambda path: path.stem)
def test_an_extension_uses_documented_names_alone(path):
    source = path.read_text()
    assert undocumented(source) == []
    assert not re.search(r"^class \w+\(.*(podracer\.(?!Callback)|PPO|A2C)", source, re.M)


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


def test_a_clone_passes_the_check(load, tmp_path):
    module = load("cloning")
    module.record_teacher(tmp_path / "teacher.npz", num_envs=2, length=8)
    settings = module.Clone(data_file=str(tmp_path / "teacher.npz"))
    data = settings.read((tmp_path / "teacher.npz").read_bytes())
    context = podracer.Context(data=data)
    podracer.check_agent(podracer.Blueprint(settings, podracer.make("cartpole").spec, context))


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
@pytest.mark.parametrize(
    ("name", "overrides", "least"),
    [
        ("vmpo", {"frames": 307_200}, 200.0),
        ("rnd", {}, 0.9),
        ("dreamer", {"frames": 81_920}, 150.0),
        ("transformer", {}, 0.9),
    ],
)
def test_an_extension_learns(name, overrides, least, load):
    assert load(name).main(**overrides, evaluations=1, devices=1) >= least


@pytest.mark.slow
def test_a_clone_acts_as_its_teacher_and_ppo_goes_on_from_it(load):
    clone, ppo = load("cloning").main(frames=10_240)
    assert min(clone, ppo) > 300  # an untrained policy balances for 10 to 30 steps


def test_fields_of_the_second_network_are_flags_with_its_name(load):
    experiment = load("rnd").curious_catch()
    flags = (
        "--ppo.network.torso.hidden",
        "32",
        "--rnd-network.torso.hidden",
        "128,16",
        "--bonus",
        "2",
    )
    agent = parse_experiment("train mine", flags, experiment, TrainOptions())[1].agent
    assert agent.ppo.network.torso.hidden == (32,)
    assert agent.rnd_network.torso.hidden == (128, 16)
    assert agent.bonus == 2


@pytest.mark.slow
def test_a_transformer_computes_the_same_step_by_step(load):
    """Also where episodes begin, and further back than its window reaches."""
    network = (
        load("transformer")
        .Transformer(width=16, num_heads=2, window=4)
        .build(podracer.ArraySpec((3,)), {"value": podracer.Head(1)})
    )
    params = network.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    observations = jax.random.normal(jax.random.key(1), (12, 2, 3))
    first = np.zeros((12, 2), bool)
    first[0], first[5, 0], first[9, 1] = True, True, True
    first = jnp.asarray(first)
    carry = network.carry(2)
    outputs, _ = network.apply(params, carry, observations, first)
    new_outputs, _ = network.apply(params, carry, observations.at[1, 0].add(1.0), first)
    changed = np.abs(np.asarray(outputs["value"] - new_outputs["value"]))[..., 0] > 1e-4
    assert changed[1, 0]
    assert not changed[5:].any()  # another episode, or two layers' windows away
    for t in range(12):
        output, carry = network.apply(params, carry, observations[t : t + 1], first[t : t + 1])
        np.testing.assert_allclose(output["value"][0], outputs["value"][t], atol=1e-5)


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
