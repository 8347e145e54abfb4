"""Plans: memory is that of the run, speed is measured or recorded, cost needs both its factors."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from podracer import recipes
from podracer.bench.anakin import prepare, training
from podracer.cli.main import main
from podracer.devices.mesh import make_mesh
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.common import init_state
from podracer.plan import plan as planning
from podracer.plan.devices import DEVICES, device_of, machine_here, machine_of
from podracer.plan.memory import Memory, anakin_memory, largest_batch
from podracer.plan.plan import format_seconds, make_plan, show
from podracer.run.setup import build

# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_state_has_the_bytes_of_the_runs_own_state():
    experiment = recipes.find("cartpole_dqn")
    agent, env = build(experiment)
    config = dataclasses.replace(experiment.driver, num_envs=4)
    memory = anakin_memory(agent, env, config, "cpu")
    state = init_state(agent, env, make_mesh(jax.devices()[:1]), config, jax.random.key(0))

    def size(tree):
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    names = ("parameters and optimizer", "replay and other state of environments", "environments")
    parts = (state.learner.shared, state.learner.local, state.actor)
    assert [memory.parts[name] for name in names] == [size(part) for part in parts]
    assert memory.total == sum(memory.parts.values())


@pytest.mark.slow
def test_an_accelerators_program_keeps_more_activations_than_that_of_a_cpu():
    experiment = recipes.find("cartpole_ppo")
    agent, env = build(experiment)
    config = dataclasses.replace(experiment.driver, num_envs=512)
    sizes = [anakin_memory(agent, env, config, platform).total for platform in ("cpu", "gpu")]
    assert sizes[0] < sizes[1]


def test_the_largest_batch_is_found_on_the_line_and_checked():
    asked = []

    def memory(num_envs):
        asked.append(num_envs)
        return 100 + 10 * num_envs

    assert largest_batch(memory, 4096, 8, 1000) == 88
    assert asked == [1024, 4096, 88]
    assert largest_batch(memory, 4096, 8, 150) == 0
    assert largest_batch(memory, 8, 8, 150) == 0


def test_the_largest_batch_goes_down_where_memory_is_no_line():
    def memory(num_envs):
        return 10 * num_envs + 200 * (num_envs < 100)

    largest = largest_batch(memory, 4096, 1, 1000)
    assert memory(largest) <= 1000


# --- speed and cost -------------------------------------------------------------------------------


def test_a_chunk_of_training_can_be_timed_again_and_again():
    agent, env = build(recipes.find("catch"))
    chunk = training(agent, env, AnakinConfig(8, 4, 2), make_mesh(jax.devices()[:1]))
    prepared = prepare(*chunk)
    assert prepared.lap().seconds > 0
    assert prepared.lap().cpu_seconds > 0


@pytest.fixture
def small_memory(monkeypatch):
    """Programs are not compiled to learn their memory."""
    memory = Memory("device", 1, {"environments": 1024})
    monkeypatch.setattr(planning, "anakin_memory", lambda *_: memory)


def plan_of(**known):
    experiment = recipes.find("catch").with_fields({"driver": {"num_envs": 64}, "frames": 10**6})
    return make_plan(experiment, machine_of(DEVICES["h200"], 2, 0), **known)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "Speed, hours and price are not known: no recorded speed of the NVIDIA H200 is given"),
        ({"price": 3.0}, "Speed, hours and price are not known"),
        ({"seconds": 5.0}, "Speed, hours and price are not known"),  # that is another machine
        ({"steps_per_second": 1e6}, "Price: not known"),
        ({"steps_per_second": 1e6, "price": 3.0}, "steps a second (recorded)"),
    ],
)
@pytest.mark.usefixtures("small_memory")
def test_cost_needs_a_speed_and_a_price(known, words):
    plan = plan_of(**known)
    assert words in show(plan)
    assert (plan.hours is None) == ("steps_per_second" not in known)
    assert (plan.dollars is None) == (len(known) < 2)


@pytest.mark.usefixtures("small_memory")
def test_hours_are_frames_by_speed_and_hosts_have_a_price_each():
    plan = plan_of(steps_per_second=1e6, price=3.0)
    assert plan.hours == pytest.approx(plan.frames / 1e6 / 3600)
    assert plan.dollars == pytest.approx(2 * 3.0 * plan.hours)


@pytest.mark.usefixtures("small_memory")
def test_the_speed_of_several_hosts_is_measured_on_one(monkeypatch):
    monkeypatch.setattr(planning, "measure_anakin", lambda *_: 1000.0)
    experiment = recipes.find("catch").with_fields({"driver": {"num_envs": 64}, "devices": 2})
    plan = make_plan(experiment, machine_here(2, 2), seconds=1.0)
    assert plan.steps_per_second == pytest.approx(2000.0)
    assert "Speed: 2,000 steps a second (measured here on one of 2 hosts, without" in show(plan)


@pytest.mark.slow
def test_a_plan_proposes_the_largest_batch_that_fits():
    experiment = recipes.find("catch").with_fields({"driver": {"num_envs": 4096}})
    plan = make_plan(experiment, machine_of(device_of(2**21), 1, 2))
    assert plan.fits is False
    assert 0 < plan.largest_num_envs < 4096
    assert plan.largest_num_envs % 2 == 0
    assert f"The largest batch that fits: --num-envs {plan.largest_num_envs}." in show(plan)


@pytest.fixture
def outcome(capsys, monkeypatch):
    """Run a command in this process; return its exit code and what it said."""
    monkeypatch.setattr("podracer.cli.plan.initialize_devices", lambda *_: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return leaving.value.code, captured.out + captured.err

    return run


CATCH = ("catch", "--num-envs", "64", "--measure", "0")


def test_a_plan_can_be_read_by_programs(outcome):
    code, said = outcome(*CATCH, "--device", "h200", "--json")
    plan = json.loads(said)
    assert code == 0
    assert plan["fits"] is True
    assert plan["memory"][0]["total"] == sum(plan["memory"][0]["parts"].values())
    assert plan["steps_per_second"] is None


def test_a_device_that_has_no_name_is_given_by_its_memory(outcome):
    code, said = outcome(*CATCH, "--device-bytes", 2**21, "--steps-per-second", 1e6, "--price", 2)
    assert code == 0
    assert "It fits into the 2 MiB that a program may use there." in said
    assert "Price: less than $0.01" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("catch", "--device", "h20"), "did you mean h200"),
        (("catch", "--device", "v3-8", "--hosts", "3"), "take 120 or 144"),
        (("catch", "--hosts", "0"), "--hosts must lie in"),
        (("catch", "--hosts", "2", "--devices", "3", "--device", "h200"), "evenly over 2 hosts"),
        (("catch", "--measure", "-1"), "--measure must lie in"),
        (("catch", "--price", "-1"), "--price must lie in"),
        (("catch", "--steps-per-second", "nan"), "--steps-per-second must lie in"),
        (("catch", "--hots", "2"), "--hosts"),
    ],
)
def test_wrong_inputs_are_refused_with_a_reason(outcome, arguments, words):
    code, said = outcome(*arguments)
    assert code == 78
    assert words in said


@pytest.mark.slow
def test_nothing_measured_is_said_to_be_unknown(outcome):
    code, said = outcome(*CATCH)
    assert code == 0
    assert "Speed, hours and price are not known" in said


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["anakin", "sebulba"])
def test_this_machine_is_measured(arch):
    command = [sys.executable, "-m", "podracer", "plan", "catch_a2c", "--arch", arch]
    command += ["--devices", "1", "--measure", "1", "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert plan["speed_source"] == "measured here"
    assert plan["steps_per_second"] > 0
    assert plan["dollars"] is None


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--device", "v3-8", "--hosts", "2"], ["--device", "h200"]])
def test_sebulba_is_planned_by_role(outcome, flags):
    recipe = ("catch_a2c", "--arch", "sebulba", "--num-envs", "96", "--measure", "0")
    code, said = outcome(*recipe, *flags, "--json")
    plan = json.loads(said)
    assert code == 0
    assert len(plan["memory"]) == (2 if "v3-8" in flags else 1)


def test_times_are_written_in_the_unit_that_suits_them():
    texts = {0: "0 s", 0.5: "0.5 s", 90: "1.5 min", 7200: "2 hours", 200_000: "2.31 days"}
    texts |= {0.9996: "1 s", 59.97: "1 min", 3599: "1 hours"}
    texts |= {172_000: "47.8 hours", 172_700: "2 days", 1157 * 86_400: "1,157 days"}
    assert {seconds: format_seconds(seconds) for seconds in texts} == texts
