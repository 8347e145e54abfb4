"""Plans: programs compiled for a target and counted, speed measured or recorded, cost from both."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from podracer import recipes
from podracer.cli.main import main
from podracer.drivers.population import Pod
from podracer.errors import ConfigError
from podracer.run.setup import build, make_driver
from podracer_plan.compiled import compile_run, matrix_flops, scaled
from podracer_plan.hlo import Collective, Program
from podracer_plan.plan import Plan, cost_lines, largest_batch
from podracer_plan.programs import programs_of
from podracer_plan.targets import find_target

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # scripts

from compiled import RECORDS as RECORDS_FILE
from compiled import compile_one, read

RECORDS = read(RECORDS_FILE)

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler of TPUs is not installed"
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


def test_pods_of_a_population_do_not_grow_with_devices():
    experiment = dataclasses.replace(recipes.find("catch_a2c"), pods=(Pod(0), Pod(1)))
    assert scaled(experiment, 2) == experiment


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


# --- targets --------------------------------------------------------------------------------------


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


# --- speed and cost -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def catch():
    return recipes.find("catch").with_fields({"driver": {"num_envs": 64}, "frames": 10**6})


@pytest.fixture(scope="module")
def run(catch):
    return compile_run(catch, here())


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


def test_a_plan_says_whether_it_fits_and_what_it_costs(outcome):
    flags = ("--device-bytes", 2**30, "--steps-per-second", 1e6, "--price", 2)
    code, said = outcome("plan", *CATCH, *flags)
    assert code == 0
    assert "It fits into the 1 GiB that a program may use there." in said
    assert "Price: less than $0.01" in said
    plan = Plan(SimpleNamespace(fits=True), None, 1.0, "recorded", None, 2**62, 2**62 / 3600, None)
    assert any("years for" in line for line in cost_lines(plan))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "catch", "--device-bytes", "-1"), "--device-bytes must lie in"),
        (("plan", "catch", "--steps-per-second", "1e-9"), "--steps-per-second must lie in"),
        (("plan", "catch", "--target", "h1000"), "no target 'h1000': did you mean h100"),
        (("plan", "catch", "--target", "x1"), "tpu-v6e. A shape may follow, as in `h100`"),
        (("compile", "cartpole_sebulba", "--arch", "anakin"), "runs on the host"),
        (("compile", "catch", "--devices", "3"), "in a new run 126 or 129"),
    ],
)
def test_wrong_inputs_are_refused_with_a_reason(outcome, arguments, words):
    code, said = outcome(*arguments)
    assert code == 78
    assert words in said
