"""Replay in the memory of the host: the bits of the one on the device, and no copy of the ring."""

import dataclasses
import operator
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import SMALL, blueprint
from jax.sharding import PartitionSpec
from runs import anakin_setup, sebulba_setup, train_anakin, train_sebulba

from podracer.agent import Context
from podracer.agents.dqn import DQN
from podracer.dataset import Dataset
from podracer.devices.host_memory import (
    HostMemory,
    from_stored,
    host_leaves,
    in_host_memory,
    pin,
    read_windows,
    to_stored,
    write_slices,
)
from podracer.devices.mesh import make_mesh
from podracer.devices.reductions import traced_for
from podracer.drivers import population
from podracer.drivers.anakin import AnakinConfig, anakin, make_chunk
from podracer.drivers.common import abstract_agent, abstract_request, abstract_state
from podracer.drivers.population import Pod
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError
from podracer.plan.programs import state_parts
from podracer.replay import Buffer, Replay
from podracer.run import setup
from podracer.types import ArraySpec, Step, TimeStep

ON_HOST = Replay(
    480, batch_size=16, updates_per_rollout=2, warmup=100, prioritized=True, storage="host"
)
HOST, DEVICE = (DQN(n_step=3, network=SMALL, replay=r)
                for r in (ON_HOST, dataclasses.replace(ON_HOST, storage="device")))  # fmt: skip


def assert_same_bits(state, other):
    """Two states have equal leaves, where a `HostMemory` is what it holds."""
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        x, y = (jax.random.key_data(x), jax.random.key_data(y)) if keys else (x, y)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])  # a TPU keeps whole tiles of words
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, bool])
def test_windows_and_writes_go_around_the_end(platform, dtype):
    random, spec = np.random.default_rng(0), ArraySpec((3, 5), dtype)
    ring, new = (random.integers(0, 2, (*axes, 3, 5)).astype(dtype) for axes in ((2, 7), (5, 2)))
    rows, starts = np.array([0, 1, 1, 0, 1]), np.array([0, 3, 5, 6, -2])
    expected = np.stack(
        [[ring[r, (s + t) % 7] for t in range(4)] for r, s in zip(rows, starts, strict=True)], 1
    )
    with traced_for(platform):
        stored = to_stored(jnp.asarray(ring))
        windows = jax.jit(partial(read_windows, length=4))(stored, rows, starts)
        np.testing.assert_array_equal(from_stored(windows, spec), expected)
        for position in (0, 4, 6):
            expected = ring.copy()
            expected[:, (position + np.arange(5)) % 7] = np.moveaxis(new, 0, 1)
            written = jax.jit(lambda *x: write_slices(*x))(stored, new, jnp.int32(position))
            np.testing.assert_array_equal(from_stored(written, spec), expected)
            assert written.sharding.memory_kind == "pinned_host"
    assert (stored.dtype == jnp.uint32) == (platform == "tpu")


@pytest.mark.parametrize(("platform", "samples"), [("cpu", 1), ("gpu", 16), ("tpu", 1)])
def test_an_iteration_reads_several_samples_on_a_gpu(platform, samples):
    """Beside the copies of a sample, a loop costs some kernels in each iteration."""
    rows = jnp.zeros(64, jnp.int32)
    with traced_for(platform):
        program = jax.make_jaxpr(partial(read_windows, length=4))(jnp.zeros((2, 7)), rows, rows)
    (loop,) = (x for x in program.eqns if x.primitive.name == "scan")
    assert loop.params["unroll"] == samples


@pytest.mark.parametrize("storage", ["device", "host"])
def test_a_tpu_that_keeps_tiles_samples_the_same(storage):
    """Also a ring on the device, where frames are large."""
    config = Replay(2 * 12, storage=storage)
    observation = ArraySpec((32, 99, 2), np.uint8, frame_stack=True)
    spec = dataclasses.replace(make("catch").spec, observation=observation)
    random, buffer = np.random.default_rng(0), Buffer(config, spec, 3)
    frames = random.integers(0, 255, (17, 2, 32, 99)).astype(np.uint8)
    stacks, zeros = jnp.stack([frames[:-1], frames[1:]], -1), jnp.zeros((16, 2))
    signals = zeros, zeros, zeros > 0, zeros > 0
    steps = Step(TimeStep(stacks, *signals), jnp.zeros((16, 2), jnp.int32), ())

    def sampled():
        state = buffer.init(2)
        for start in (0, 5, 10):
            rows = slice(start, start + 5)
            state = buffer.add(state, jax.tree.map(operator.itemgetter(rows), steps))
        rows, starts = jnp.array([0, 1, 1]), jnp.array([4, 5, 10])
        observations = buffer.trajectory_at(state, rows, starts).steps.timestep.observation
        return observations, jax.tree.leaves(state.steps.timestep.observation)[0]

    expected, frames_on_cpu = sampled()
    with traced_for("tpu"):
        actual, tiles = sampled()
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(expected[:, 0], stacks[jnp.array([4, 5]), 0])
    assert (frames_on_cpu.shape, tiles.shape) == ((2, 12, 32, 99), (2, 12, 8, 128))


def test_devices_that_only_a_compiler_knows_keep_the_ring_in_host_memory():
    """A GPU's compiler describes no memories, so a sharding there has no kind."""
    mesh: Any = make_mesh(jax.devices()[:1])
    sharding: Any = SimpleNamespace(
        mesh=mesh,
        spec=PartitionSpec("data"),
        with_memory_kind=lambda _: SimpleNamespace(memory_kind=None),
    )
    pinned = pin(HostMemory(sharding)).arrays
    assert (pinned.memory_kind, pinned.spec) == ("pinned_host", sharding.spec)
    assert pinned.shard_shape((4, 2)) == (4, 2)


@pytest.mark.slow
def test_training_is_that_with_a_replay_on_the_device_and_the_ring_stays_where_it_is():
    parts = anakin_setup(HOST, devices=2, rollout_length=7, updates_per_chunk=3)
    places: list[Any] = []
    arrays: Any = None
    ring: Any = None
    for progress in anakin(*parts, num_updates=9, boundary=lambda updates: True):
        assert progress.state is not None
        [ring] = host_leaves(progress.state)
        places.append([shard.data.unsafe_buffer_pointer() for shard in ring.addressable_shards])
        arrays = jax.tree.map(np.asarray, progress.state.learner)
    assert ring.sharding.memory_kind == "pinned_host"
    assert np.any(ring)
    assert places[1] == places[2]  # before, the zeros of numpy may be copied once
    parts = anakin_setup(DEVICE, devices=2, rollout_length=7, updates_per_chunk=3)
    on_device, _ = train_anakin(*parts, num_updates=9)
    assert not host_leaves(on_device)
    assert int(arrays.shared.updates) > 0
    assert on_device is not None
    assert_same_bits(arrays, on_device.learner)


@pytest.mark.slow
def test_sebulba_trains_the_same_with_either():
    states = []
    for agent in (HOST, DEVICE):
        env = DeviceEnvironments(make("catch"))
        parts = sebulba_setup(agent, env, policy_lag=0, num_envs=8, updates_per_chunk=4)
        states.append(train_sebulba(*parts, num_updates=8)[0])
    assert_same_bits(*states)
    assert host_leaves(states[0])[0].sharding.memory_kind == "pinned_host"


def test_the_programs_for_a_gpu_touch_the_ring_in_slices_only():
    """Anything else than a slice, an update of one, or passing it on would be a copy, or computed
    on the host."""
    env, mesh, config = make("catch"), make_mesh(jax.devices()[:1]), AnakinConfig(16, 7, 2)
    agent = blueprint(HOST, env.spec)
    state = abstract_state(agent, env, mesh, config)
    trace = make_chunk(env, mesh, config).trace(agent, state, abstract_request(mesh))
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    uses = uses_in_host_memory(text, "tensor<16x30x10x5xf32>", sides=2)
    assert {"dynamic_slice", "dynamic_update_slice"} <= uses


def uses_in_host_memory(text, ring, sides):
    """Operations of a lowered program on a ring, an argument, and with two sides also a result, in
    host memory: it is sliced, updated and passed on."""
    main = text[text.index("func.func public @main") :].split("\n", 1)[0]
    for side in main.split("->")[:sides]:
        [attributes] = re.findall(re.escape(ring) + r" (\{[^}]*\})", side)
        assert "pinned_host" in attributes
    operations = (line.strip() for line in text.split("\n") if ring in line)
    lines = [line for line in operations if line.startswith("%")]
    uses = {re.findall(r" = \"?(?:stablehlo\.|func\.)?(\w+)", line)[0] for line in lines}
    assert uses <= {"dynamic_slice", "dynamic_update_slice", "while", "call", "custom_call"}
    customs = [line for line in lines if "custom_call" in line]
    assert all("annotate_device_placement" in x and "pinned_host" in x for x in customs)
    return uses


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_data_set_that_is_mixed_into_batches_is_there_too(platform):
    """It is an argument, and only sliced."""
    env, mesh, config = make("catch"), make_mesh(jax.devices()[:1]), AnakinConfig(16, 7, 2)
    random, ends = np.random.default_rng(0), np.arange(1, 42) % 9 == 5
    data = Dataset(
        observation=random.normal(size=(41, 10, 5)),
        action=random.integers(0, 3, 41),
        reward=np.ones(41),
        terminal=ends,
        timeout=np.zeros(41, bool),
    )
    with traced_for(platform):
        rows = data.rows()
        rows = dataclasses.replace(rows, observation=in_host_memory(rows.observation))
        agent = dataclasses.replace(blueprint(HOST, env.spec), context=Context(7, rows))
        state = abstract_state(agent, env, mesh, config)
        arguments = (abstract_agent(agent, mesh), state, abstract_request(mesh))
        trace = make_chunk(env, mesh, config).trace(*arguments)
        text = trace.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),)).as_text()
    ring = {"gpu": "tensor<1x41x10x5xf32>", "tpu": "tensor<1x41x8x128xui32>"}[platform]
    assert "dynamic_slice" in uses_in_host_memory(text, ring, sides=1)
    np.testing.assert_array_equal(
        from_stored(jnp.asarray(rows.observation.arrays), env.spec.observation)[0],
        data.observation,
    )


def test_a_new_state_is_where_a_restored_one_is():
    agent, env, mesh, config, state = anakin_setup(HOST)
    like = abstract_state(agent, env, mesh, config)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (x.sharding, x.shape, x.dtype) == (y.sharding, y.shape, y.dtype)
    assert isinstance(state.learner.local.steps.timestep.observation, HostMemory)


def test_a_plan_and_a_run_count_both_memories(monkeypatch):
    env, config = make("catch"), AnakinConfig(16, 8, 1)
    mesh: Any = make_mesh(jax.devices()[:1])
    agent = blueprint(HOST, env.spec)
    state, ring = abstract_state(agent, env, mesh, config), 16 * 30 * 50 * 4
    local = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.learner.local))
    for platform, host_bytes in (("gpu", ring), ("cpu", 0)):  # a CPU has no other memory
        assert state_parts(state, platform)["replay and other state of environments"] == (
            local - host_bytes
        )

    monkeypatch.setattr(setup, "free_host_bytes", lambda: ring - 1)
    whole = setup.checked_size(state, mesh)
    gpu: Any = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="gpu")]), local_devices=[0]
    )
    monkeypatch.setattr(setup, "free_bytes", lambda mesh: 2**30)
    with pytest.raises(ConfigError, match=r"needs 93\.8 KiB in the memory of this host"):
        setup.checked_size(state, gpu)
    monkeypatch.setattr(setup, "free_host_bytes", lambda: ring)
    assert setup.checked_size(state, gpu) == whole - ring


@pytest.mark.parametrize(("platform", "times"), [("cpu", 2), ("gpu", 1)])
def test_a_cpu_needs_the_state_twice_because_a_save_keeps_it(platform, times, monkeypatch):
    env, devices = make("catch"), np.array([SimpleNamespace(platform=platform)])
    agent = blueprint(DEVICE, env.spec)
    state = abstract_state(agent, env, make_mesh(jax.devices()[:1]), AnakinConfig(16, 8, 2))
    mesh: Any = SimpleNamespace(devices=devices, local_devices=[0])
    monkeypatch.setattr(setup, "free_bytes", lambda mesh: 2**40)
    needed = setup.checked_size(state, mesh)
    monkeypatch.setattr(setup, "free_bytes", lambda mesh: times * needed)
    assert setup.checked_size(state, mesh) == needed
    monkeypatch.setattr(setup, "free_bytes", lambda mesh: times * needed - 1)
    with pytest.raises(ConfigError, match="are free") as error:
        setup.checked_size(state, mesh)
    assert ("and as much again during a save, but" in str(error.value)) == (platform == "cpu")


def test_what_a_replay_in_host_memory_cannot_do_is_said_before_anything_is_compiled():
    env = DeviceEnvironments(make("catch"))
    with pytest.raises(ConfigError, match="updates_per_batch is 2, but a replay in host memory"):
        sebulba_setup(HOST, env, num_envs=8, updates_per_batch=2)
    env = make("catch")
    agent = blueprint(HOST, env.spec)
    mesh = population.population_mesh(jax.devices()[:1], 2)
    with pytest.raises(ConfigError, match=r'take `agent\.replay\.storage="device"`, or a'):
        population.init_states(agent, [Pod(0), Pod(1)], env, mesh, AnakinConfig(16, 8, 2))
