"""Plans: work is counted right, parts add up as they should, memory is that of the run."""

import dataclasses
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hosts import Counters
from jax.sharding import PartitionSpec

from podracer import cgroups, envs
from podracer.cli.main import main
from podracer.drivers.common import init_state
from podracer.drivers.sebulba import SebulbaConfig
from podracer.envs.host.device import DeviceEnvironments
from podracer.experiments import recipes
from podracer.experiments.run_setup import build
from podracer.mesh import make_mesh, num_cores
from podracer.plan import make as planning
from podracer.plan import measured
from podracer.plan.check import (
    COUNTED,
    COUNTED_ERRORS,
    GYMNAX,
    GYMNAX_ENVIRONMENTS,
    PPO_DEVICES,
    all_rows,
    errors,
    ours,
    scaling,
    simulators,
    splits,
    table,
)
from podracer.plan.counted import abstract_mesh, anakin_work, keys_of
from podracer.plan.devices import Price, Speeds, read_catalog
from podracer.plan.machine import machine_of
from podracer.plan.make import make_plan
from podracer.plan.memory import anakin_memory, largest_batch
from podracer.plan.parts import Part, affine_fit, largest_multiple, ring_seconds, update_seconds
from podracer.plan.plan import format_seconds
from podracer.plan.work import Work, count
from podracer.types import ConfigError

ROOT = Path(__file__).parents[1]


# --- counted work ---------------------------------------------------------------------------------


def test_a_matrix_product_counts_two_operations_for_each_multiplication():
    work = count(lambda x, w: x @ w, jnp.zeros((3, 4)), jnp.zeros((4, 5)))
    assert work == Work(operations=1, flops=2 * 3 * 4 * 5, bytes_written=4 * 3 * 5)


def test_a_convolution_counts_its_window():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    work = count(convolve, jnp.zeros((2, 9, 9, 3)), jnp.zeros((3, 3, 3, 8)))
    assert work.flops == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)


def test_a_loop_counts_as_often_as_it_runs_and_a_while_once():
    def body(x, _):
        return jnp.sin(x), None

    assert count(lambda x: jax.lax.scan(body, x, length=7)[0], 1.0).operations == 7
    unbounded = count(lambda x: jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, x), 1.0)
    assert (unbounded.operations, unbounded.is_bounded) == (2, False)


def test_an_update_in_place_writes_only_what_changes():
    work = count(lambda x: x.at[2].set(1.0), jnp.zeros(1000))
    assert work.bytes_written < 100
    loop = jax.lax.dynamic_update_index_in_dim
    assert count(lambda x, i: loop(x, 1.0, i, 0), jnp.zeros(1000), 3).bytes_written < 100


def test_what_no_result_needs_is_not_counted():
    def function(x):
        return x + 1, jnp.sin(x) @ x

    assert count(lambda x: function(x)[0], jnp.ones(4)).operations == 1
    assert count(jax.jit(lambda x: jax.jit(function)(x)[0]), jnp.ones(4)).operations == 1


def test_a_platforms_own_form_is_not_counted_and_the_longer_branch_is():
    def function(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: jnp.sin(jnp.cos(x)), default=jnp.sin)

    assert count(function, 1.0).operations == 1
    work = count(lambda p, x: jax.lax.cond(p, lambda x: jnp.sin(jnp.cos(x)), jnp.sin, x), True, 1.0)
    assert work.operations == 2


def test_reductions_count_the_bytes_that_travel():
    mean = jax.shard_map(
        partial(jax.lax.pmean, axis_name="data"), mesh=abstract_mesh(4),
        in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    assert count(mean, jnp.zeros(5)).bytes_reduced == 20


def test_parts_of_work_add_up():
    work = Work(1, 2, 3, 4)
    assert work + work == work * 2
    assert (work * 3) - work == work * 2
    assert work - work * 2 == Work()
    assert not (work + dataclasses.replace(work, is_bounded=False)).is_bounded


def test_the_work_of_catch_is_that_of_its_network():
    experiment = recipes.find("catch")
    agent, env = build(experiment)
    config = dataclasses.replace(experiment.driver, num_envs=64)
    work = anakin_work(agent, env, config, 2)
    forward = 2 * 32 * 16 * (50 * 256 + 256 * 3)  # of 32 environments and 16 steps
    assert work.acting.flops == forward
    assert work.simulator.flops == 0
    # Fused: the weights' gradients, those of the hidden layer, and the final timestep's values.
    final = 2 * 32 * (50 * 256 + 256 * 3)
    assert forward < work.learning.flops <= 2 * forward + 3 * final
    parameters = 50 * 256 + 256 + 256 * 3 + 3
    assert 4 * parameters <= work.learning.bytes_reduced < 4 * parameters + 200  # and metrics
    assert work.simulator.bytes_reduced == work.acting.bytes_reduced == 0


# --- parts ----------------------------------------------------------------------------------------

PARTS = [
    *(Part("simulator", 3.0, ""), Part("acting", 1.0, ""), Part("transfer", 0.5, "")),
    *(Part("learning", 4.0, ""), Part("reduction", 0.25, "")),
]


@pytest.mark.parametrize(
    ("schedule", "threads", "lag", "seconds"),
    [
        ("one after another", 2, 1, 8.75),
        ("one device", 2, 1, 5.75),  # the device acts and learns, the simulator waits
        ("one device", 1, 1, 5.75),
        ("split devices", 2, 1, 4.25),  # the learner is the slowest
        ("split devices", 1, 1, 4.5),  # one thread simulates, then acts
        ("split devices", 2, None, 4.25),
        ("split devices", 2, 0, 7.25),  # lock-step
    ],
)
def test_parts_add_up_as_the_schedule_says(schedule, threads, lag, seconds):
    assert update_seconds(PARTS, schedule, threads=threads, lag=lag) == seconds


def test_what_is_unknown_counts_as_nothing():
    parts = [Part("simulator", None, ""), Part("learning", 2.0, "")]
    assert update_seconds(parts, "split devices", threads=2) == 2.0


def test_a_ring_sends_everything_almost_twice():
    assert ring_seconds(100.0, 4, 50.0) == 2 * 3 / 4 * 2
    assert ring_seconds(100.0, 1, None) == ring_seconds(0.0, 8, None) == 0.0
    assert ring_seconds(100.0, 2, None) is None


def test_modeled_seconds_are_operations_and_bytes_and_flops():
    device = read_catalog().device("v3-8")
    seconds = Speeds(1e-6, 0.5).seconds(Work(2, 61.5e12, 450e9), device)
    assert seconds == pytest.approx(2e-6 + 1 + 2)


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


def test_lines_and_multiples():
    assert affine_fit([(1, 5), (3, 9)]) == (3, 2)
    assert largest_multiple(3, 2, 20, 4) == 8
    assert largest_multiple(3, 2, 10, 4) == 0


# --- plans ----------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """A user's file with a device of 2 MiB, its price, and another price of a known one."""
    device = {
        "title": "small device", "memory_bytes": 2**21, "memory_share": 1.0, "peak_flops": 1e12,
        "bytes_per_second": 1e11, "devices_per_host": 2, "cores_per_device": 4, "source": "a test",
        "price": {"low": 1.0, "high": 2.0, "devices": 2, "date": "2026-11", "source": "a test"},
    }  # fmt: skip
    price = {"low": 3.0, "high": 3.0, "devices": 1, "date": "today", "source": "mine"}
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"devices": {"small": device, "h200": {"price": price}}}))
    return file


def test_a_users_file_adds_devices_and_replaces_prices(small):
    catalog, shipped = read_catalog(small), read_catalog()
    assert catalog.device("h200").price == Price(3.0, 3.0, 1, "today", "mine")
    assert catalog.device("h200").peak_flops == shipped.device("h200").peak_flops
    assert catalog.device("small").usable_bytes == 2**21
    assert catalog.device("a100") == shipped.device("a100")


@pytest.mark.parametrize(
    ("kind", "part", "name", "value"),
    [
        ("devices", ("small", "price"), "devices", 0),
        ("devices", ("small",), "peak_flops", "fast"),
        ("devices", ("small",), "peak_flops", math.inf),
        ("devices", ("small",), "link_bytes_per_second", 0),
        ("devices", ("small",), "memory_bytes", None),
        ("simulators", ("atari",), "steps_per_core_second", 0),
    ],
)
def test_numbers_of_a_users_file_are_above_0(small, kind, part, name, value):
    data = json.loads(small.read_text())
    entry = data.setdefault(kind, {})
    for key in part:
        entry = entry.setdefault(key, {"source": "a test"})
    entry[name] = value
    small.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=f"{name} of .*{part[0]} must be a finite number above 0"):
        read_catalog(small)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices_per_host": 1.5}, "devices_per_host of small must be a whole number"),
        ({"memory_share": 75}, "memory_share of small must be at most 1"),
        ({"price": 3}, "the price of small must be an object"),
        ({"colour": 1}, "small has an unknown field 'colour'"),
    ],
)
def test_an_entry_of_a_users_file_is_checked(small, changes, message):
    data = json.loads(small.read_text())
    data["devices"]["small"] |= changes
    small.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_catalog(small)


def test_prices_are_for_so_many_devices_and_have_a_source():
    assert Price(1.0, 2.0, 8, "", "").of(16, 3.0) == (6.0, 12.0)
    for device in read_catalog().devices.values():
        assert device.source
        if device.price is not None:
            assert device.price.date
            assert device.price.source
            assert device.price.low <= device.price.high


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"devices": {"mine": {}}}', '{"devices": {"h200": {"peak_flops": -1}}}']
)
def test_a_file_of_another_form_is_refused(tmp_path, content):
    file = tmp_path / "own.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"own\.json"):
        read_catalog(file)


@pytest.mark.slow
def test_a_plan_proposes_the_largest_batch_that_fits(small):
    catalog = read_catalog(small)
    experiment = recipes.find("catch").with_fields({"driver": {"num_envs": 4096}, "frames": 10**9})
    plan = make_plan(experiment, machine_of(catalog.device("small"), 1, 0), catalog, 0.0)
    assert plan.fits is False
    assert 0 < plan.largest_num_envs < 4096
    assert plan.largest_num_envs % 2 == 0
    assert plan.speed.is_modeled
    assert math.isclose(plan.hours, plan.frames / plan.steps_per_second / 3600)
    assert plan.dollars == pytest.approx((plan.hours, 2 * plan.hours))


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


def test_a_plan_says_which_numbers_are_modeled_and_what_it_does_not_know(outcome, small):
    code, said = outcome(*CATCH, "--device", "small", "--prices", small)
    assert code == 0
    for words in (
        "It fits into the 2 MiB",
        "(modeled, not measured)",
        "(modeled); prices of",
        "a test",
    ):
        assert words in said
    assert "What this plan does not know:\n- " in said
    assert re.search("reduction +unknown", said)  # the file gives no link
    assert "at most" in said


def test_other_programs_are_compared_with_the_whole_machine(monkeypatch):
    """Not with the share of a container: the load is that of all programs of the machine."""
    monkeypatch.setattr(cgroups, "cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for load, said in ((2.0, 0), (2.5, 1)):
        monkeypatch.setattr(planning, "load", lambda load=load: load)
        assert len(planning._about_load()) == said


def test_a_plan_can_be_read_by_programs(outcome):
    code, said = outcome(*CATCH, "--device", "h200", "--json")
    plan = json.loads(said)
    assert code == 0
    assert plan["fits"] is True
    assert plan["memory"][0]["total"] == sum(plan["memory"][0]["parts"].values())
    assert {part["name"] for part in plan["speed"]["parts"]} >= {"simulator", "acting", "learning"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("catch", "--device", "h20"), "did you mean h200"),
        (("catch", "--device", "v3-8", "--hosts", "3"), "take 120 or 144"),
        (("catch", "--hosts", "0"), "--hosts must lie in"),
        (("catch", "--hosts", "2", "--devices", "3", "--device", "h200"), "evenly over 2 hosts"),
        (("catch", "--measure", "-1"), "--measure must lie in"),
        (("catch", "--prices", "missing.json"), "missing.json cannot be read"),
        (("catch", "--hots", "2"), "--hosts"),
    ],
)
def test_wrong_inputs_are_refused_with_a_reason(outcome, arguments, words):
    code, said = outcome(*arguments)
    assert code == 78
    assert words in said


def test_a_simulator_is_measured_with_as_many_environments_as_it_takes(monkeypatch):
    """A run on another machine may have more than this one has memory for, or time to make."""
    made = []

    class Counted(Counters):
        def make(self, num_envs, num_threads):
            made.append(num_envs)
            return super().make(num_envs, num_threads)

    monkeypatch.setattr("podracer.drivers.sebulba.driver.free_bytes", lambda mesh: 1)
    experiment = recipes.find("catch_a2c")
    config = dataclasses.replace(SebulbaConfig(), num_envs=2**20, threads_per_actor=2)
    rate = measured.measure_simulator(experiment.agent, Counted(), config, 0.05)
    assert rate > 0
    assert made == [32 * num_cores()] * 2
    on_device = DeviceEnvironments(envs.make("catch"))
    config = dataclasses.replace(config, num_envs=1)
    assert measured.measure_simulator(experiment.agent, on_device, config, 0.05) > 0


@pytest.mark.slow
def test_nothing_measured_is_said_to_be_unknown(outcome):
    code, said = outcome(*CATCH)
    assert code == 0
    assert "Speed, hours and price are not known" in said


@pytest.mark.slow
def test_this_machine_is_measured():
    command = [sys.executable, "-m", "podracer", "plan", "catch", "--devices", "1"]
    command += ["--measure", "1", "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert plan["speed"]["source"] == "measured here"
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
    assert plan["speed"]["parts"][0]["seconds"] is None  # the simulator was not measured


# --- the model beside published points ------------------------------------------------------------


def test_fitted_points_are_met_and_others_have_errors():
    rows = [*scaling(), *splits(), *simulators(), *ours()]
    for row in rows:
        assert row.published > 0
        if row.is_fitted:
            assert abs(row.error) < 1e-9, row
    number, median, worst = errors(rows)
    assert number > 30
    assert 0 < median < worst


def test_our_measurements_stand_in_the_file_that_is_named():
    file = ROOT / "benchmarks" / "results" / "ppo.jsonl"
    if not file.exists():
        pytest.skip("an archive of the sources leaves it out")
    text = file.read_text()
    assert all(str(rate) in text for pair in PPO_DEVICES.values() for rate in pair)


@pytest.mark.slow
def test_the_tables_in_the_documentation_are_those_of_the_model():
    if not importlib.metadata.version("jax").startswith("0.10."):
        pytest.skip("counted with JAX 0.10")
    rows = all_rows()
    assert table(rows) in (ROOT / "docs" / "plan.md").read_text(), "podracer plan --check"
    _, median, worst = errors(row for row in rows if row.group == COUNTED)
    assert (round(median, 2), round(worst, 2)) == COUNTED_ERRORS


@pytest.mark.slow
@pytest.mark.parametrize("name", GYMNAX)
def test_gymnax_environments_have_the_work_that_is_noted(name):
    pytest.importorskip("gymnax")
    if importlib.metadata.version("gymnax") != "1.0.1":
        pytest.skip("counted with gymnax 1.0.1")
    env = envs.make(f"gymnax:{name}")
    keys = keys_of(GYMNAX_ENVIRONMENTS)
    state, _ = jax.eval_shape(jax.vmap(env.reset), keys)
    action = jax.ShapeDtypeStruct((GYMNAX_ENVIRONMENTS,), jnp.int32)
    work = count(jax.vmap(env.step), keys, state, action)
    assert (work.operations, work.bytes_written) == GYMNAX[name][1:]


def test_times_are_written_in_the_unit_that_suits_them():
    texts = {2e-6: "2 us", 0.5: "500 ms", 90: "1.5 min", 7200: "2 hours", 200_000: "2.31 days"}
    texts |= {0: "0 us", 0.99949: "999 ms", 0.9996: "1 s", 59.97: "1 min", 3599: "1 hours"}
    texts |= {172_000: "47.8 hours", 172_700: "2 days", 1157 * 86_400: "1,157 days"}
    assert {seconds: format_seconds(seconds) for seconds in texts} == texts


def test_the_model_is_fitted_without_an_emulator(monkeypatch):
    """Its Atari is written down, and is the one that the adapter has."""
    from podracer.envs.host import atari
    from podracer.plan import check

    pytest.importorskip("ale_py")
    assert atari.impala("pong").spec == check.ATARI

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr(check, "build", fail)
    check.fitted_speeds.cache_clear()
    assert check.fitted_speeds().efficiency > 0
