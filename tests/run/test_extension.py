"""What a user brings from a folder of their own: an agent, a network, an environment, a recipe, a
sink, a callback. Nothing of it is known to the library, and no file of a run may name it."""

import dataclasses
import json
import math
import re
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
from child import exit_code, records

import podracer
from podracer import recipes
from podracer.cli.main import main
from podracer.cli.recipe_flags import find_experiment, own_recipe, parse_experiment
from podracer.cli.train import TrainOptions
from podracer.config.serialization import from_json, to_json
from podracer.io.checkpoint import fingerprint
from podracer.io.differences import differences
from podracer.names import NO_FLAG
from podracer.run.callbacks import Function, Writers
from podracer.run.loop import Run, Wish
from podracer.tournament.config import restore_experiment

pytestmark = pytest.mark.usefixtures("shared")  # what is patched is not traced

PACKAGE = '''
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import podracer


@podracer.struct
class Shifted(podracer.A2C):
    """A2C with rewards that are shifted; its fields have names and values of all kinds."""

    reward_shift: float = -1.0
    warmup_steps: int = 0
    names: tuple[str, ...] = podracer.static(default=("a", "b"))
    squash: Callable[[jax.Array], jax.Array] = podracer.static(default=jnp.tanh)

    def build(self, spec, context):
        inner = super().build(spec, context)

        def learn(state, trajectory, key, axis):
            rewards = self.squash(trajectory.timesteps().reward + self.reward_shift)
            return inner.learn(state, trajectory.with_rewards(rewards), key, axis)

        return dataclasses.replace(inner, learn=learn)


@dataclasses.dataclass(frozen=True)
class Line:
    """Five steps to the right are worth 1."""

    length: int = 5

    @property
    def spec(self):
        return podracer.EnvironmentSpec("line", podracer.ArraySpec((1,)), podracer.Discrete(2))

    def reset(self, key):
        return jnp.int32(0), podracer.restart(jnp.zeros(1))

    def step(self, key, state, action):
        state = state + 1
        return state, podracer.transition(
            jnp.full(1, state / self.length),
            reward=jnp.where(action == 1, 1.0 / self.length, 0.0),
            terminal=state >= self.length,
        )

    def render(self, state):
        return np.full((8, 8, 3), 40 * int(state), np.uint8)


def mine(length: str = "5"):
    """My agent on my line."""
    return podracer.Experiment(
        environment=podracer.auto_reset(Line(int(length))),
        agent=Shifted(network=podracer.TorsoNetwork(podracer.MLP((8,)))),
        driver=podracer.AnakinConfig(num_envs=16, rollout_length=4, updates_per_chunk=5),
        frames=16 * 4 * 10,
        evaluations=2,
        evaluation_episodes=8,
    )
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a package in it, in which commands are given."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "recipes.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]


def podracer_command(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def test_an_agent_and_an_environment_of_ones_own_on_the_command_line(folder, capsys):
    run, own = folder / "run", ("--recipe", "lab.recipes:mine")
    train = ("train", "lab.recipes:mine", "--length", 4, "--reward-shift", -2.0, "--run-dir", run)
    assert exit_code(*train) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"] == "mine"
    assert "lab" not in json.dumps(config["experiment"])
    agent = config["experiment"]["agent"]
    assert (agent["kind"], agent["reward_shift"], agent["squash"]) == ("Shifted", -2.0, "tanh")
    assert config["experiment"]["environment"]["inner"] == {"kind": "Line", "length": 4}
    assert exit_code("fingerprint", run) == 0
    before = capsys.readouterr().out.splitlines()[-1]
    assert exit_code("eval", run, *own, "--episodes", 4, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["length_mean"] == 4
    assert exit_code("play", run, *own, "--episodes", 1) == 0
    assert (run / "play.gif").exists()
    assert exit_code("report", run) == 0
    assert exit_code("resume", run, *own) == 0
    capsys.readouterr()
    assert exit_code("fingerprint", run) == 0
    assert capsys.readouterr().out.splitlines()[-1] == before
    for command in ("eval", "play", "resume"):
        assert exit_code(command, run) == 78
        assert "--recipe" in capsys.readouterr().err


@pytest.mark.slow
def test_an_agent_of_ones_own_in_a_sweep(folder, capsys):
    sweep = ("sweep", "lab.recipes:mine", "--seeds", 2, "--vary", "reward_shift=-1,1")
    # In a process of its own a sweep would set up a device for each core.
    assert exit_code(*sweep, "--devices", 8, "--run-dir", folder / "run") == 0
    out = capsys.readouterr().out
    assert "reward_shift" in out
    best = json.loads((folder / "run" / "best.json").read_text())
    assert best["experiment"]["agent"]["kind"] == "Shifted"
    (command,) = (line.split() for line in out.splitlines() if line.startswith("Best "))
    assert exit_code(*command[2:], "--run-dir", folder / "best") == 0
    podracer.load(folder / "run", recipe="lab.recipes:mine", pod=1)


def test_a_file_with_classes_of_ones_own_takes_them_from_a_recipe(folder, capsys):
    path, own = str(folder / "best.json"), "lab.recipes:mine"
    sys.path.append(str(folder))
    mine = recipes.find(own)
    best = dataclasses.replace(mine, agent=dataclasses.replace(mine.agent, reward_shift=3.0))
    (folder / "best.json").write_text(json.dumps({"experiment": to_json(best)}))
    for recipe in (own, mine):
        assert recipes.find(path, recipe=recipe) == best
    sys.path.remove(str(folder))
    assert find_experiment([path, "--recipe", own, "--seed", "3"])[1:] == (best, ["--seed", "3"])
    assert exit_code("train", path) == 78
    assert "name its recipe, such as --recipe" in capsys.readouterr().err


INSTALLED = '''
import dataclasses

import podracer
from lab.recipes import Line, mine


def line(size="5", slope=1.0):
    """Five steps to the right are worth 1."""
    if slope != 1.0:
        raise podracer.ConfigError("this line is level.")
    return podracer.auto_reset(Line(int(size)))


def robot():
    """Balance a pole on the host."""
    return podracer.Gymnasium("CartPole-v1")


robot.on_host = True


def line_a2c():
    """My agent on a line by its name."""
    return dataclasses.replace(mine(), environment="line:4")


@dataclasses.dataclass(frozen=True)
class Wide(podracer.TorsoNetwork):
    """A torso of my own."""

    extra: int = 3


@podracer.struct
class Narrow(podracer.A2C):
    """A2C with a waist."""

    waist: int = podracer.static(default=4)


def draw(arguments):
    """Draw a line of the length that is given."""
    if arguments == ["--fail"]:
        raise podracer.ConfigError("there is no ink.")
    print("_" * int(arguments[0]))
'''

ENTRY_POINTS = """
[podracer.environments]
line = lab.line:line
robot = lab.line:robot
[podracer.recipes]
line_a2c = lab.line:line_a2c
[podracer.agents]
Narrow = lab.line:Narrow
[podracer.kinds]
Wide = lab.line:Wide
[podracer.commands]
draw = lab.line:draw
"""


@pytest.fixture
def installed_package(folder, monkeypatch):
    """A package that is installed, as a folder beside its metadata."""
    (folder / "lab" / "line.py").write_text(INSTALLED)
    metadata = folder / "lab-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_what_an_installed_package_has_is_listed_without_an_import(installed_package, capsys):
    assert podracer_command("--help") == 0
    assert re.search(r"podracer draw \.\.\. +Draw a line of the leng", capsys.readouterr().out)
    assert podracer_command("list") == 0
    out = capsys.readouterr().out
    assert re.search("line +Five steps to the right are worth 1.", out)
    assert re.search("line_a2c +My agent on a line by its name.", out)
    for mistyped, name in (("drawn", "draw"), ("train line_a2", "line_a2c"), ("check lin", "line")):
        assert podracer_command(*mistyped.split()) == 78
        assert f"did you mean {name}" in "".join(capsys.readouterr())
    assert "lab.line" not in sys.modules
    (installed_package / "lab" / "line.py").write_text("not Python")
    assert podracer_command("--help") == 0
    assert re.search(r"podracer draw \.\.\. +installed, lab.line:draw", capsys.readouterr().out)


def test_an_installed_package_brings_commands_and_environments(installed_package, capsys):
    assert exit_code("draw", 3) == 0
    assert capsys.readouterr().out == "___\n"
    assert exit_code("draw", "--fail") == 78
    assert capsys.readouterr().err == "podracer: there is no ink.\n"
    assert podracer.make("line").inner.length == 5
    assert podracer.make("line:7").inner.length == 7
    assert recipes.find("catch_a2c").with_environment("line:7").arch == "anakin"
    assert recipes.find("catch_a2c").with_environment("robot").arch == "sebulba"
    with pytest.raises(podracer.ConfigError, match="this line is level"):
        podracer.make("line,slope=2")
    with pytest.raises(podracer.ConfigError, match=r"^line:7: there is no option 'tilt'"):
        podracer.make("line:7,tilt=2")
    assert exit_code("check", "line:3") == 0


def test_files_name_the_classes_that_an_installed_package_declares(installed_package, capsys):
    agent = {"kind": "Narrow", "network": {"kind": "Wide", "extra": 5}, "waist": 2}
    experiment = to_json(dataclasses.replace(CATCH, agent=None)) | {"agent": agent}
    path = installed_package / "best.json"
    for undeclared in ("lab.line:Narrow", "lab.line.Narrow", "Line"):  # no file names a module
        with pytest.raises(podracer.ConfigError, match="name its recipe"):
            from_json({"kind": undeclared})
    assert exit_code("list", "agents") == 0
    assert re.search("Narrow +A2C with a waist.", capsys.readouterr().out)
    assert exit_code("train", "catch_a2c", "--waist", 3) == 78
    assert "no flag --waist: it belongs to --agent Narrow" in capsys.readouterr().err
    path.write_text(json.dumps({"experiment": experiment}))
    read = recipes.find(str(path)).agent
    assert (type(read).__name__, read.waist, read.network.extra) == ("Narrow", 2, 5)


@pytest.mark.parametrize("size", ["", "_accelerator"])
def test_files_need_no_recipe_where_an_installed_package_has_one_of_their_name(
    size, installed_package
):
    mine = dataclasses.replace(recipes.find("line_a2c"), recipe=f"line_a2c{size}")
    path = installed_package / "best.json"
    path.write_text(json.dumps({"experiment": to_json(mine)}))
    assert recipes.find(str(path)) == mine
    assert restore_experiment(to_json(mine), ()) == mine
    assert (own_recipe("line_a2c"), own_recipe("lab.line:line_a2c")) == (None, "lab.line:line_a2c")


CATCH = dataclasses.replace(
    recipes.find("catch_a2c"),
    driver=podracer.AnakinConfig(num_envs=16, rollout_length=8, updates_per_chunk=5),
    frames=16 * 8 * 40,
    evaluations=4,
    evaluation_episodes=8,
    devices=1,
)


def test_a_callback_sees_each_boundary_and_may_end_the_run(tmp_path):
    seen = []

    def stop_early(boundary):
        seen.append((boundary.metrics["updates"], boundary.evaluation.returns.mean()))
        assert isinstance(boundary.state, podracer.LearnerState)
        return len(seen) == 2

    result = podracer.train(CATCH, run_dir=tmp_path / "run", callbacks=[stop_early])
    assert [updates for updates, _ in seen] == [10, 20]
    assert np.isfinite([value for _, value in seen]).all()
    assert (result.exit_code, result.metrics["updates"]) == (0, 20)
    _, state = podracer.load(tmp_path / "run")
    assert fingerprint(state) == fingerprint(result.state)  # it was saved where it ended


class Kept(podracer.Callback):
    """Compares what it finds on the disk after each save, writes its own into checkpoints."""

    def __init__(self):
        self.calls, self.restored, self.at_start = [], None, None

    def restore(self, run, saved):
        self.restored = saved["kept"]

    def on_start(self, run):
        self.at_start = int(run.state.update)

    def on_record(self, run, record):
        record["kept_calls"] = len(self.calls)

    def on_boundary(self, run):
        self.calls.append(("boundary", run.totals.updates))
        return Wish.SAVE if run.totals.updates == 20 else None

    def saved(self):
        return {"kept": len(self.calls)}

    def on_save(self, run):
        self.calls.append(("save", run.totals.updates))
        assert fingerprint(podracer.load(run.directory)[1]) == fingerprint(run.boundary().state)


def test_a_callback_adds_to_records_and_checkpoints_and_finds_its_boundary_saved(tmp_path):
    first, second = Kept(), Kept()
    settings = {"run_dir": tmp_path / "run", "keep_best": False}
    podracer.train(CATCH, callbacks=[first], **settings)
    boundaries = [("boundary", updates) for updates in (10, 20, 30, 40)]
    assert first.calls == [*boundaries[:2], ("save", 20), *boundaries[2:], ("save", 40)]
    assert (first.at_start, first.restored) == (0, None)
    kept = [record["kept_calls"] for record in records(tmp_path / "run")]
    assert kept == [0, 0, 1, 1, 3, 3, 4, 4]
    podracer.train(CATCH, frames=2 * CATCH.frames, resume=True, callbacks=[second], **settings)
    assert (second.at_start, second.restored) == (40, 5)


@pytest.mark.parametrize("entries", [{"mine": np.float32(0.5)}, None])
def test_what_a_checkpoint_could_not_hold_is_refused(entries, tmp_path):
    class Mine(podracer.Callback):
        def saved(self):
            return entries

    with pytest.raises(podracer.ConfigError, match="Mine saves what is no object of JSON"):
        podracer.train(CATCH, run_dir=tmp_path / "run", callbacks=[Mine()])


@pytest.mark.parametrize("value", ["warm", {"x": 1.0}, 2**64])
def test_what_a_file_of_records_could_not_be_read_with_is_refused(value):
    run = SimpleNamespace(progress=None, recorder=SimpleNamespace(numbers={}))
    numbers = {"updates": 1, "loss": None, "share": np.float32(0.5), "parts": np.ones(2)}
    Writers().on_record(run, numbers)
    with pytest.raises(podracer.ConfigError, match="'phase' of a callback is none"):
        Writers().on_record(run, {**numbers, "phase": value})


@pytest.mark.parametrize("change", [lambda x: x.update(frames=7), lambda x: x.pop("updates")])
def test_a_callback_cannot_change_the_numbers_of_a_record(change, tmp_path):
    class Changes(podracer.Callback):
        def on_record(self, run, record):
            change(record)

    with pytest.raises(podracer.ConfigError, match=r"has changed its '(frames|updates)'"):
        podracer.train(CATCH, run_dir=tmp_path / "run", callbacks=[Changes()])


def test_a_callback_ends_the_run_by_a_bool_of_numpy(tmp_path):
    class Stops(podracer.Callback):
        def on_boundary(self, run):
            return run.evaluation.returns.mean() < 2  # no bool of Python

    result = podracer.train(CATCH, run_dir=tmp_path / "run", callbacks=[Stops()])
    assert (result.reason, result.metrics["updates"]) == ("callback", 10)


@pytest.mark.parametrize("answer", [{"loss": 0.5}, np.float32(3.0), [], "done", np.ones(2, bool)])
def test_an_answer_of_a_callback_that_is_no_bool_is_refused(answer):
    run: Any = SimpleNamespace(callbacks=[Function(lambda at: answer)], boundary=lambda: None)
    with pytest.raises(podracer.ConfigError, match="a callback returns True, a Wish or None, not"):
        Run._wish(run)


class FailsAtSeal(podracer.Callback):
    def on_seal(self):
        if threading.current_thread() is not threading.main_thread():  # of a checkpoint
            raise RuntimeError("my own fault")


@pytest.mark.slow
@pytest.mark.parametrize("at_seal", [False, True])
def test_a_callback_that_fails_ends_the_run_in_its_name(at_seal, tmp_path):
    def fails(boundary):
        raise RuntimeError("my own fault")

    callback = FailsAtSeal() if at_seal else fails
    with pytest.raises(RuntimeError, match=r"^my own fault"):
        podracer.train(CATCH, run_dir=tmp_path / "run", callbacks=[callback])
    crash = json.loads((tmp_path / "run" / "crash.json").read_text())
    assert crash["component"] == "callback"


def test_every_public_name_exists():
    for name in podracer.__all__:
        assert getattr(podracer, name).__name__ == name
    assert len(podracer.__all__) <= 50
    assert not set(dir(podracer)) - set(podracer.__all__)


@pytest.mark.parametrize(
    ("name", "place"), [("DDPG", "DDPG."), ("TD3", "ddpg.td3("), ("Rainbow", "dqn.rainbow(")]
)
def test_an_agent_that_is_no_public_name_is_found(name, place):
    with pytest.raises(AttributeError, match=re.escape(f"podracer.agents.{place}")):
        getattr(podracer, name)


def test_a_replaced_learn_is_not_ignored_by_the_fused_form():
    @podracer.struct
    class Louder(podracer.A2C):
        def build(self, spec, context):
            inner = super().build(spec, context)
            return dataclasses.replace(inner, learn=lambda *args: inner.learn(*args))

    with pytest.raises(podracer.ConfigError, match="Louder has no fused form"):
        podracer.train("catch_a2c", agent=Louder(), frames=2048)


def test_values_that_are_not_numbers_equal_themselves_when_a_run_is_resumed():
    assert differences({"tilt": math.nan}, {"tilt": math.nan}) == {}
    assert list(differences({"tilt": math.nan}, {"tilt": 1.0})) == ["tilt"]


def test_functions_with_other_bound_arguments_are_other_experiments():
    function = partial(np.clip, -1.0, a_max=1.0)
    assert to_json(function) == {
        "kind": "partial", "function": "clip", "arguments": [-1.0], "keywords": {"a_max": 1.0},
    }  # fmt: skip
    assert from_json(to_json(function), original=function) is function
    with pytest.raises(podracer.ConfigError, match="name its recipe"):
        from_json(to_json(function), original=partial(np.clip, -2.0, a_max=1.0))


def parsed_agent(agent, *flags):
    experiment = dataclasses.replace(recipes.find("catch_a2c"), agent=agent)
    return parse_experiment("train mine", flags, experiment, TrainOptions())[1]


def test_a_field_with_the_name_of_another_flag_begins_with_its_part():
    @podracer.struct
    class Clashing(podracer.A2C):
        frames: int = podracer.static(default=1)

    experiment = parsed_agent(Clashing(), "--frames", "7", "--agent.frames", "5")
    assert (experiment.frames, experiment.agent.frames) == (7, 5)


def test_an_agent_around_another_has_the_flags_of_both():
    @podracer.struct
    class Around(podracer.A2C):
        inner: podracer.PPO = podracer.static(default=podracer.PPO())

    agent = parsed_agent(Around(), "--discount", "0.5", "--inner.discount", "0.25").agent
    assert (agent.discount, agent.inner.discount) == (0.5, 0.25)


def test_a_part_has_no_flags_where_it_says_so():
    @podracer.struct
    class WithoutFlags(podracer.A2C):
        target: Annotated[podracer.TorsoNetwork, NO_FLAG] = podracer.static(
            default=podracer.TorsoNetwork()
        )

    agent = parsed_agent(WithoutFlags(), "--hidden", "8").agent
    assert agent.network.torso.hidden == (8,)
    assert agent.target == podracer.TorsoNetwork()
    with pytest.raises(podracer.ConfigError, match=r"no flag --target\.hidden"):
        parsed_agent(WithoutFlags(), "--target.hidden", "8")


@pytest.mark.parametrize(
    ("flags", "agent"),
    [
        ("--agent.learning-rate 1e-3", {"learning_rate": 1e-3}),
        ("--learning_rate 1e-3:0", {"learning_rate": podracer.Linear(1e-3, 0.0)}),
        (
            "--agent.network.torso.hidden 64,32 --optimizer.name=rmsprop",
            {"network": {"torso": {"hidden": (64, 32)}}, "optimizer": {"name": "rmsprop"}},
        ),
        (
            "--no-agent.network.shared --value-cost 2",
            {"network": {"shared": False}, "value_cost": 2.0},
        ),
        ("--shared=false", {"network": {"shared": False}}),
        (
            "--hidden 8 --torso resnet --channels 4 --torso.blocks 1",
            {"network": {"torso": podracer.networks.ResNet((4,), 1, hidden=8)}},
        ),
    ],
)
def test_a_flag_means_what_its_path_does_in_python(flags, agent):
    experiment = recipes.find("catch_a2c")
    changed = parse_experiment("train", flags.split(), experiment, TrainOptions())[1]
    assert changed == experiment.with_fields({"agent": agent})


def test_an_agent_is_chosen_by_its_name():
    experiment = recipes.find("catch_a2c")
    flags = ["--value-cost", "0.25", "--agent", "ppo"]
    agent = parse_experiment("train", flags, experiment, TrainOptions())[1].agent
    assert agent == podracer.PPO(value_cost=0.25)


def test_a_setting_whose_name_begins_with_no_is_not_switched_off():
    @podracer.struct
    class WithNoise(podracer.A2C):
        no_noise: bool = podracer.static(default=False)
        noise: bool = podracer.static(default=True)

    agent = parsed_agent(WithNoise(), "--no-noise").agent
    assert (agent.no_noise, agent.noise) == (True, True)


def test_an_end_of_several_paths_is_that_of_the_shallowest_or_refused():
    @podracer.struct
    class WithTwo(podracer.A2C):
        epsilon: float = 0.5
        inner: podracer.PPO = podracer.static(default=podracer.PPO())

    agent = parsed_agent(WithTwo(), "--epsilon", "0.25").agent
    assert (agent.epsilon, agent.optimizer.epsilon) == (0.25, podracer.A2C().optimizer.epsilon)

    @podracer.struct
    class Equal(podracer.A2C):
        first: podracer.TorsoNetwork = podracer.static(default=podracer.TorsoNetwork())

    sentence = "write --agent.network.memory-size or --agent.first.memory-size."
    with pytest.raises(podracer.ConfigError, match=f"--memory-size is ambiguous: {sentence}"):
        parsed_agent(Equal(), "--memory-size", "8")
    agent = parsed_agent(Equal(), "--first.memory-size", "8").agent
    assert (agent.first.memory_size, agent.network.memory_size) == (8, 128)
