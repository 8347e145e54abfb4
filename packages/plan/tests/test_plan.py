"""Plans: programs compiled for a target and counted, speed measured or recorded, cost from both."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from podracer import recipes
from podracer.cli.main import main
from podracer.drivers.population import Pod
from podracer.errors import ConfigError, PodracerError
from podracer.run.setup import build, make_driver
from podracer_plan.compiled import compile_program, compile_run, matrix_flops, scaled
from podracer_plan.hlo import Collective, Program
from podracer_plan.plan import cost_lines, largest_batch, make_plan
from podracer_plan.programs import programs_of
from podracer_plan.targets import KINDS, find_target

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # scripts

from compiled import RECORDS as RECORDS_FILE
from compiled import SETTINGS, TARGETS, compile_one, read

RECORDS = read(RECORDS_FILE)

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler of TPUs is not installed"
)

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the compiler of GPUs is not installed",
)

# --- counting a compiled program ------------------------------------------------------------------

TEXT = """HloModule jit_f, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%fused_slice (p0: f32[4,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,8}
}

%inner_condition (a: (s32[], f32[4,8])) -> pred[] {
  %a = (s32[], f32[4,8]{1,0}) parameter(0)
  %four = s32[] constant(4)
  %i = s32[] get-tuple-element(%a), index=0
  ROOT %less = pred[] compare(%i, %four), direction=LT
}

%inner (b: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %b = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%b), index=1
  %row = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused_slice
  %sum = f32[4,8]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %sum)
}

%outer_condition (c: (s32[], f32[4,8], s32[])) -> pred[] {
  %c = (s32[], f32[4,8]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=2
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%outer (d: (s32[], f32[4,8], s32[])) -> (s32[], f32[4,8], s32[]) {
  %d = (s32[], f32[4,8]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%d), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%d), index=1
  %n = s32[] get-tuple-element(%d), index=2
  %pair = (s32[], f32[4,8]{1,0}) tuple(%i, %x)
  %loop = (s32[], f32[4,8]{1,0}) while(%pair), condition=%inner_condition, SCOPE, body=%inner
  %y = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %copy = f32[4,8]{1,0} copy(%y)
  ROOT %t = (s32[], f32[4,8]{1,0}, s32[]) tuple(%i, %copy, %n)
}

ENTRY %main (e: f32[4,8]) -> f32[4,8] {
  %e = f32[4,8]{1,0} parameter(0)
  %negated = f32[4,8]{1,0} negate(%e)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8]{1,0}, s32[]) tuple(%zero, %negated, %zero)
  %loop = (s32[], f32[4,8]{1,0}, s32[]) while(%start), condition=%outer_condition, body=%outer
  ROOT %result = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


ROW = "%row = f32[1,8]{1,0} fusion("
STARTED = "%row = ((f32[4,8]{1,0:S(5)}, s32[]{:T(256)}), f32[1,8]{1,0}, u32[]{:S(2)}) fusion-start("


@pytest.mark.parametrize("row", [ROW, STARTED])  # while a slice comes from host memory, others run
def test_kernels_bytes_and_collectives_are_counted_by_loop_and_scope(row):
    text = TEXT.replace("SCOPE", 'metadata={op_name="rollout/while"}').replace(ROW, row)
    program = Program(text)
    update = program.update.total()
    assert dict(update.kernels) == {"rollout": 8, "": 1}  # 4 times a slice and a sum, and a copy
    assert update.collectives == 4 * (Collective("all-reduce", 128),)
    # A row is read, with its index, and written; the sum and the copy read and write everything.
    assert update.bytes == 4 * (32 + 4 + 32 + 256) + 256
    assert [x.trips for x in program.whole.walk()] == [1, None, 4]
    assert program.whole.total().kernels.total() == 1 + 9


def test_a_program_without_a_loop_of_unknown_length_is_counted_whole():
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((4, 4))).compile()
    assert Program(compiled.as_text()).update.total().kernels.total() >= 1


def test_loops_of_a_compiled_program_have_their_lengths():
    def f(x):
        step = lambda x, _: (jnp.sin(x @ x), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=7)[0]

    program = Program(jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text())
    assert 7 in [loop.trips for loop in program.whole.walk()]


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (jnp.matmul, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(2, 3, 4), (2, 4, 5)], 2 * 120),
        (
            lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"),
            [(1, 3, 8, 8), (5, 3, 3, 3)],
            2 * 5 * 64 * 3 * 9,
        ),
        (
            jax.grad(lambda x, k: jax.lax.conv(x, k, (2, 2), "VALID").sum()),
            [(1, 3, 9, 9), (5, 3, 3, 3)],
            2 * 3 * 81 * 5 * 9 // 4,  # of a stride of 2 only a quarter multiplies no zeros
        ),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, 6)[0], [(4, 4)], 6 * 128),
        (
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x),
            [(4, 4)],
            2 * 128,
        ),
        (jax.jit(lambda x: jax.vmap(jnp.dot)(x, x)), [(6, 7)], 2 * 42),
        (jnp.tanh, [(9, 9)], 0),
        (lambda x: jax.jit(lambda x: (x + 1, x @ x))(x)[0], [(4, 4)], 0),  # no result needs it
    ],
)
def test_operations_of_matrix_products_are_exact(function, shapes, flops):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert matrix_flops(jax.make_jaxpr(function)(*arguments).jaxpr) == flops


# --- programs of a run ----------------------------------------------------------------------------


def here(num_devices=1):
    return find_target("here", num_devices)


def test_the_state_has_the_bytes_of_the_runs_own_state():
    experiment = recipes.find("cartpole_dqn").with_fields({"driver": {"num_envs": 4}})
    (program,) = programs_of(experiment, here())
    driver = make_driver(dataclasses.replace(experiment, devices=1))
    state = driver.init(jax.random.key(0))

    def size(tree):
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    parts = (state.learner.shared, state.learner.local, state.actor)
    assert list(program.state.values())[:3] == [size(part) for part in parts]


def test_collectives_of_an_update_do_not_grow_with_devices():
    experiment = recipes.find("catch_a2c").with_fields({"driver": {"num_envs": 8}})
    collectives = [
        compile_run(scaled(experiment, count), here(count)).programs[0].work.collectives
        for count in (2, 4)
    ]
    assert collectives[0] == collectives[1]
    (experiment_gradients,) = {x.bytes for x in collectives[0] if x.bytes > 1000}
    params = jax.tree.leaves(build(experiment)[0].build().init(jax.random.key(0), 1).shared.params)
    assert experiment_gradients >= 4 * sum(x.size for x in params)


def test_each_device_has_the_recipes_environments_and_replay():
    experiment = recipes.find("cartpole_dqn")
    alone, shared = (programs_of(scaled(experiment, count), here(count))[0] for count in (1, 4))
    assert shared.state == alone.state
    assert shared.steps == alone.steps


def test_a_sebulba_run_has_a_program_for_learners_and_one_for_actors():
    experiment = recipes.find("catch_a2c").with_arch("sebulba")
    experiment = experiment.with_fields({"driver": {"num_envs": 96}})
    run = compile_run(experiment, here(4))
    assert [x.program.role for x in run.programs] == ["learner", "actor"]
    assert [role for role, _ in run.memory] == ["learner", "actor"]
    alone = compile_run(experiment, here(1))
    ((role, parts),) = alone.memory
    assert role == "device"
    assert {"parameters of actors", "rollouts"} <= parts.keys()
    assert all(size >= 0 for size in parts.values())


@pytest.mark.parametrize("devices", [1, 4])
def test_what_waits_under_sebulba_is_apart_from_what_the_compiler_counts(devices):
    experiment = recipes.find("catch_a2c").with_arch("sebulba")
    driver = {"num_envs": 96, "queue_depth": 3, "threads_per_actor": 2}
    run = compile_run(experiment.with_fields({"driver": driver}), here(devices))
    for x in run.programs:
        facts = x.to_json()
        total = facts["state_bytes"] + facts["temporary_bytes"] + facts["bytes_beside"]
        assert total == pytest.approx(x.compiler_bytes, rel=0.1)
        assert sum(x.memory.values()) == total + facts["waiting_bytes"]
    learner, actor = (x.program for x in run.programs)
    assert learner.waiting == {"rollouts that wait": 3 * learner.state["rollouts"]}
    assert sum(actor.waiting.values()) == 3 * actor.state["buffer of an actor"]
    assert sum(sum(parts.values()) for _, parts in run.memory) == sum(
        sum(x.memory.values()) for x in run.programs
    )


def test_a_population_is_one_program():
    experiment = recipes.find("catch_a2c").with_fields({"driver": {"num_envs": 8}})
    pods = tuple(Pod(seed) for seed in range(2))
    run = compile_run(dataclasses.replace(experiment, pods=pods), here())
    assert run.num_envs == 16
    assert run.programs[0].program.steps == 2 * experiment.run_driver.steps_per_update


SIZED = [name for name in recipes.RECIPES if recipes.accelerator_changes(name)]


@pytest.mark.parametrize(
    "name",
    [name if name == "catch" else pytest.param(name, marks=pytest.mark.slow) for name in SIZED],
)
def test_each_size_for_an_accelerator_is_traced(name):
    try:
        programs = programs_of(recipes.with_size(recipes.find(name), name, "accelerator"), here())
    except ConfigError as error:
        if "install" in str(error):
            pytest.skip(str(error))
        raise
    for program in programs:
        program.function.trace(*program.arguments)


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h20", "did you mean h200"),
        ("tpu-v9", "did you mean tpu-v"),
        ("h100:two", "has no shape such as"),
    ],
)
def test_targets_that_do_not_exist_are_refused(name, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=words):
        find_target(name)


@pytest.mark.parametrize(("name", "extra"), [("tpu-v3:2x2", "tpu"), ("a100", "cuda")])
def test_a_compiler_that_is_not_installed_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install -e .packages/plan\[{extra}\]"):
        find_target(name)


COMPILE_TOO_MUCH = """
from podracer_plan.compilers import prepare_compilers
prepare_compilers()
import jax
from podracer_plan.targets import KINDS, find_target
for target in map(find_target, (name for name in KINDS if name.startswith("tpu"))):
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    large = jax.ShapeDtypeStruct((300 * 2**28,), "float32", sharding=sharding)
    try:
        jax.jit(lambda x: x + 1).lower(large).compile()
    except jax.errors.JaxRuntimeError as error:
        assert f"available HBM ({target.usable_bytes / 2**30:.2f}G)" in str(error), str(error)
        print(target.name, len(target.devices))
"""


def printed_words(code):
    """What a process prints that has no flags of the tests, which are for a CPU."""
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ACTING = """
from podracer_plan.compilers import prepare_compilers
prepare_compilers()
from podracer import recipes
from podracer_plan.compiled import compile_run
from podracer_plan.targets import find_target
for games in (8, 64):
    driver = {"num_envs": games, "threads_per_actor": 1}
    experiment = recipes.find("atari_ppo").with_fields({"driver": driver})
    actor = compile_run(experiment, find_target("h100")).programs[1]
    print(actor.work.kernels.total())
"""


@needs_gpu_compiler
def test_a_step_of_an_actor_in_atari_is_few_kernels_on_a_gpu():
    """Each costs 1.3 microseconds or more; there were 22 before the stack was on the device."""
    few, many = map(int, printed_words(ACTING))
    assert few <= 17
    assert many <= 19


@needs_tpu_compiler
def test_a_tpu_has_the_memory_that_its_compiler_has():
    devices = {"tpu-v3": 8, "tpu-v4": 4, "tpu-v5e": 8, "tpu-v5p": 4, "tpu-v6e": 8}  # v4: chips
    assert printed_words(COMPILE_TOO_MUCH) == [str(x) for item in devices.items() for x in item]


SCATTER = """
from podracer_plan.compilers import prepare_compilers
prepare_compilers()
import jax
from podracer_plan.compiled import compile_program
from podracer_plan.programs import Program
from podracer_plan.targets import find_target
target = find_target("tpu-v6e")
sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
arguments = (shape(64, 3136), *2 * (shape(256, dtype="int32"),), shape(256))
function = jax.jit(lambda x, i, j, y: x.at[i, j].max(y))
print(compile_program(Program("device", 1, function, arguments, 1, 1, {}), target).work.kernels[""])
"""


@needs_tpu_compiler
def test_a_scatter_on_the_sparse_core_of_tpus_is_counted():
    """JAX 0.10.2 refuses to read its instruction `async-update` with several operands."""
    (kernels,) = printed_words(SCATTER)
    assert int(kernels) >= 1


def compiled_facts(recipe, target):
    """Compile a recipe by the command; skip where a package of it or of the target is missing.

    What did not compile for `benchmarks/compiled.md` is expected to fail, with its reason.
    """
    facts = compile_one(recipe, target)
    error = facts.get("error", "")
    if re.search("not installed|needs .*(install|package)", error):
        pytest.skip(error)
    if error and (known := RECORDS.get((recipe, target), {}).get("error")):
        pytest.xfail(known)
    assert not error, error
    assert facts["kernels_per_update"] > 0
    assert facts["temporary_bytes"] > 0
    return facts


@needs_tpu_compiler
@pytest.mark.parametrize("recipe", ["catch", "cartpole_ppo", "cartpole_sebulba"])
def test_a_run_compiles_for_a_host_of_tpus(recipe):
    facts = compiled_facts(recipe, "tpu-v3:2x2")
    assert facts["devices"] == 8
    assert facts["fits"] is True
    kinds = {x["kind"] for x in facts["collectives_per_update"]}
    assert kinds == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_every_recipe_compiles_for_every_target(recipe, target):
    facts = compiled_facts(recipe, target)
    kinds = {x["kind"] for x in facts["collectives_per_update"]}
    assert kinds <= {"all-reduce"}
    assert facts["target"] == target


def test_a_program_that_jax_cannot_read_is_written_by_its_compiler(monkeypatch):
    (program,) = programs_of(recipes.find("catch").with_fields({"driver": {"num_envs": 8}}), here())
    compiled = compile_program(program, here())

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", refuse)
    assert compile_program(program, here()).work == compiled.work
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # the compiler wrote nothing
    with pytest.raises(PodracerError, match="fails on the device: INTERNAL: RET_CHECK") as failure:
        compile_program(program, here())
    assert failure.value.exit_code == 70  # 71 is a device that fails


# --- the largest batch ----------------------------------------------------------------------------


def test_the_largest_batch_is_found_on_the_line_and_checked():
    asked = []

    def memory(num_envs):
        asked.append(num_envs)
        return 100 + 10 * num_envs

    assert largest_batch(memory, 4096, 8, 1000) == 88
    assert asked == [1024, 4096, 88]
    assert largest_batch(memory, 4096, 8, 150) == 0
    assert largest_batch(memory, 8, 8, 150) == 0


@pytest.mark.parametrize(("split", "num_envs", "largest"), [(4, 512, 340), (3, 36, 27), (8, 16, 8)])
def test_the_largest_batch_is_one_that_the_agent_can_split(split, num_envs, largest):
    def memory(num_envs):
        if num_envs % split:
            raise ConfigError("no equal minibatches")
        return 100 + 10 * num_envs

    assert largest_batch(memory, num_envs, 1, 100 + 10 * (largest + split - 1)) == largest


def test_the_largest_batch_goes_down_where_memory_is_no_line():
    def memory(num_envs):
        return 10 * num_envs + 200 * (num_envs < 100)

    largest = largest_batch(memory, 4096, 1, 1000)
    assert memory(largest) <= 1000


# --- speed and cost -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def catch():
    return recipes.find("catch").with_fields({"driver": {"num_envs": 64}, "frames": 10**6})


@pytest.fixture(scope="module")
def run(catch):
    return compile_run(catch, here())


def plan_of(catch, run, monkeypatch, kind="h200", **known):
    """Plan for a target with a kind's numbers, as this machine compiles for it."""
    monkeypatch.setattr("podracer_plan.plan.compile_run", lambda *_: run_on)
    target = dataclasses.replace(run.target, kind=KINDS[kind], title=KINDS[kind].title)
    run_on = dataclasses.replace(run, target=target)
    return make_plan(catch, target, **known)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "Speed, hours and price are not known: no recorded speed of the NVIDIA H200 is given"),
        ({"seconds": 5.0}, "Speed, hours and price are not known"),  # that is another machine
        ({"steps_per_second": 1e6}, "Price: not known"),
        ({"steps_per_second": 1e6, "price": 3.0}, "steps a second (recorded; at most"),
    ],
)
def test_cost_needs_a_speed_and_a_price(catch, run, monkeypatch, known, words):
    plan = plan_of(catch, run, monkeypatch, **known)
    assert words in "\n".join(cost_lines(plan))
    assert (plan.hours is None) == ("steps_per_second" not in known)
    assert (plan.dollars is None) == (len(known) < 2)


def test_hours_are_frames_by_speed(catch, run, monkeypatch):
    plan = plan_of(catch, run, monkeypatch, steps_per_second=1e6, price=3.0)
    assert plan.hours == pytest.approx(plan.frames / 1e6 / 3600)
    assert plan.dollars == pytest.approx(3.0 * plan.hours)
    week = dataclasses.replace(plan, hours=7 * 24.0)
    assert "Time: 7 days, 0:00:00 for" in "\n".join(cost_lines(week))


def test_launches_bound_the_speed_of_a_gpu(catch, run, monkeypatch):
    plan = plan_of(catch, run, monkeypatch)
    launches = run.programs[0].work.kernels.total() * 1.3e-6
    steps = catch.run_driver.steps_per_update
    assert plan.steps_per_second_at_most == pytest.approx(steps / launches)
    on_tpu = plan_of(catch, run, monkeypatch, kind="tpu-v4")
    flops = run.programs[0].flops / KINDS["tpu-v4"].flops
    assert on_tpu.steps_per_second_at_most == pytest.approx(steps / flops)


def test_a_program_without_products_bounds_no_speed_of_a_tpu(catch, run, monkeypatch):
    tabular = dataclasses.replace(run, programs=[dataclasses.replace(run.programs[0], flops=0)])
    plan = plan_of(catch, tabular, monkeypatch, kind="tpu-v4")
    assert plan.steps_per_second_at_most is None


def test_a_population_is_not_measured(catch, run, monkeypatch):
    monkeypatch.setattr("podracer_plan.plan.compile_run", lambda *_: run)
    population = dataclasses.replace(catch, pods=(Pod(0), Pod(1)))
    plan = make_plan(population, run.target, seconds=1.0)
    assert (plan.hours, plan.speed_source) == (None, "populations are not measured")


@pytest.mark.slow
def test_a_plan_proposes_the_largest_batch_that_fits():
    experiment = recipes.find("catch").with_fields({"driver": {"num_envs": 4096}})
    plan = make_plan(experiment, dataclasses.replace(here(2), usable_bytes=2**21))
    assert plan.run.fits is False
    assert 0 < plan.largest_num_envs < 4096
    assert plan.largest_num_envs % 2 == 0
    assert f"The largest batch that fits: --num-envs {plan.largest_num_envs}." in cost_lines(plan)


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def outcome(capsys, monkeypatch):
    """Run a command in this process; return its exit code and what it said."""
    monkeypatch.setattr("podracer_plan.commands.initialize_devices", lambda *_: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return leaving.value.code, captured.out + captured.err

    return run


CATCH = ("catch", "--num-envs", "64", "--devices", "1")


def test_compiled_programs_can_be_read_by_programs(outcome):
    code, said = outcome("compile", *CATCH, "--json")
    facts = json.loads(said)
    assert code == 0
    assert facts["target"] == "here"
    assert facts["fits"] is True
    assert facts["state_bytes"] > 0
    assert facts["temporary_bytes"] > 0
    assert facts["steps_per_update"] == 64 * 16
    assert facts["kernels_per_update"] > facts["kernels_per_step"]
    assert facts["flops_per_update"] > 0
    assert facts["collectives_per_update"] == []
    assert facts["programs"][0]["kernels_per_update"] == facts["kernels_per_update"]


def test_a_plan_says_whether_it_fits_and_what_it_costs(outcome):
    flags = ("--device-bytes", 2**30, "--steps-per-second", 1e6, "--price", 2)
    code, said = outcome("plan", *CATCH, *flags)
    assert code == 0
    assert "It fits into the 1 GiB that a program may use there." in said
    assert "Price: less than $0.01" in said


@pytest.mark.parametrize(
    ("flags", "num_envs", "frames"),
    [
        ([], 4 * 128, 4 * 4_096_000),
        (["--frames", "1e6"], 4 * 128, 10**6),
        (["--num-envs", "256"], 256, 4_096_000),
    ],
)
def test_each_device_has_the_recipes_share_of_what_is_not_given(
    outcome, monkeypatch, flags, num_envs, frames
):
    planned = []
    monkeypatch.setattr("podracer_plan.compilers.prepare_compilers", lambda: None)
    monkeypatch.setattr("podracer_plan.targets.kind_named", lambda _: KINDS["h100"])
    monkeypatch.setattr("podracer_plan.targets.find_target", lambda *_: here(4))
    monkeypatch.setattr("podracer_plan.plan.make_plan", lambda *x, **_: planned.append(x[0]))
    outcome("plan", "catch", *flags, "--target", "h100:4")
    assert [(x.driver.num_envs, x.frames) for x in planned] == [(num_envs, frames)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "catch", "--device-bytes", "-1"), "--device-bytes must lie in"),
        (("plan", "catch", "--target", "h1000"), "no target 'h1000': did you mean h100"),
        (("compile", "cartpole_sebulba", "--arch", "anakin"), "runs on the host"),
        (("compile", "catch", "--devices", "3"), "in a new run 126 or 129"),
    ],
)
def test_wrong_inputs_are_refused_with_a_reason(outcome, arguments, words):
    code, said = outcome(*arguments)
    assert code == 78
    assert words in said


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["anakin", "sebulba"])
def test_this_machine_is_measured(arch):
    command = [sys.executable, "-m", "podracer", "plan", "catch_a2c", "--arch", arch]
    command += ["--devices", "1", "--measure", "1", "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert plan["speed_source"] == "measured here"
    assert plan["steps_per_second"] > 0
    assert plan["dollars"] is None
