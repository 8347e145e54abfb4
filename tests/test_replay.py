"""The replay against a plain list of everything that was ever shown."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants
from walk import methods_of

from podracer.agents import DQN, R2D2, SAC, MuZero
from podracer.devices.mesh import find_devices, make_mesh
from podracer.errors import ConfigError
from podracer.replay import Buffer, Priorities, Replay
from podracer.schedules import Linear
from podracer.types import ArraySpec, Continuous, Discrete, EnvironmentSpec, Step, TimeStep

B = 3
PLAIN = EnvironmentSpec("plain", {"x": ArraySpec((2,)), "n": ArraySpec((), np.int32)}, Discrete(4))
FRAMES = EnvironmentSpec("frames", ArraySpec((2, 2, 4), np.uint8, frame_stack=True), Discrete(4))
BOX = EnvironmentSpec("box", ArraySpec((3,)), Continuous((-1.0, 0.0), (1.0, 2.0)))


class World:
    """Random episodes of B environments, all timesteps kept: `[time][leaf]`."""

    def __init__(self, spec, seed=0, begin="copies"):
        self.spec, self.begin = spec, begin
        self.random = np.random.default_rng(seed)
        self.stacks = None
        self.last = np.ones(B, bool)  # nothing before the first step
        self.steps = []

    def _observe(self, first):
        def one(leaf):
            if not leaf.frame_stack:
                return self.random.uniform(0, 50, (B, *leaf.shape)).astype(leaf.dtype)
            frame = self.random.integers(0, 3, (B, *leaf.shape[:-1], 1)).astype(leaf.dtype)
            older = np.repeat(frame, leaf.shape[-1] - 1, -1)
            if self.begin == "blank":
                older = np.zeros_like(older)
            if self.stacks is not None:
                going = ~first[:, None, None, None]
                older = np.where(going, self.stacks[..., 1:], older)
            self.stacks = np.concatenate([older, frame], -1)
            return self.stacks

        return jax.tree.map(one, self.spec.observation)

    def rollout(self, T):
        for _ in range(T):
            first = self.last.copy()
            self.last = (self.random.uniform(size=B) < 0.15) & ~first
            action = self.random.integers(0, 4, B).astype(np.int32)
            if isinstance(self.spec.action, Continuous):
                action = self.random.uniform(size=(B, 2)).astype(np.float32)
            terminal = self.random.uniform(size=B) < 0.1
            timestep = TimeStep(
                self._observe(first),
                self.random.normal(size=B).astype(np.float32),
                np.where(terminal & ~first, 0, 1).astype(np.float32),
                first,
                self.last,
            )
            self.steps.append(Step(timestep, action, {"log_prob": self.random.normal(size=B)}))
        return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *self.steps[-T:])

    def truth(self, row, start, length):
        """The steps of one environment from a time on."""
        some = self.steps[start : start + length]
        return jax.tree.map(lambda *x: np.stack([leaf[row] for leaf in x]), *some)


EXTRAS = {"log_prob": ArraySpec(())}


def fill(spec, buffer, rollouts, begin="copies", seed=0):
    """A world, and the memory after these rollouts of it with carries that tell their time."""
    world = World(spec, seed, begin)
    memory = buffer.init(B, extras=EXTRAS, carry=ArraySpec((1,)))
    add = jax.jit(buffer.add)
    for T in rollouts:
        carry = jnp.full((B, 1), float(len(world.steps)))
        memory = add(memory, world.rollout(T), carry)
    return world, memory


def draw(buffer, memory, seed, num):
    return jax.jit(partial(buffer.sample, N=num))(memory, jax.random.key(seed))


def valid_starts(world, buffer, memory):
    columns = memory.steps.timestep.reward.shape[1]
    shown = len(world.steps)
    history = 3 if world.spec is FRAMES else 0
    oldest = shown - columns + history if shown > columns else 0
    return [s for s in range(oldest, shown - buffer.length + 1) if s % buffer.stride == 0]


CASES = {
    "one step": (PLAIN, 2, 1, [4] * 3),
    "wraps": (PLAIN, 4, 1, [7] * 9),
    "n steps, aligned": (BOX, 4, 1, [5] * 12),
    "frames": (FRAMES, 3, 1, [6] * 11),
    "frames, not full": (FRAMES, 3, 1, [6] * 2),
    "sequences": (PLAIN, 12, 5, [5] * 13),
    "sequences of frames": (FRAMES, 12, 5, [10] * 8),
}


# By default the ring wraps, actions are continuous, frames are shared.
OTHERS = ("one step", "frames", "frames, not full", "sequences")


@variants("prioritized", [True], [False])
@variants("name", [name for name in CASES if name not in OTHERS], CASES)
def test_a_sample_is_what_was_shown_and_every_start_comes(name, prioritized):
    spec, length, stride, rollouts = CASES[name]
    buffer = Buffer(Replay(B * 40, prioritized=prioritized), spec, length, stride)
    begin = "blank" if prioritized else "copies"
    world, memory = fill(spec, buffer, rollouts, begin)
    starts = valid_starts(world, buffer, memory)
    assert int(buffer.size(memory)) == B * len(starts)
    sample = draw(buffer, memory, 3, 2048)
    columns = memory.steps.timestep.reward.shape[1]
    by_place = {s % columns: s for s in starts}
    pairs = zip(sample.rows, sample.starts, strict=True)
    drawn = {(int(row), by_place[int(start) * stride]) for row, start in pairs}
    assert drawn == {(row, start) for row in range(B) for start in starts}
    shown = sample.trajectory
    for n in range(0, 2048, 41):
        row, start = int(sample.rows[n]), by_place[int(sample.starts[n]) * stride]
        truth = world.truth(row, start, length)
        got = Step(shown.timesteps(), shown.steps.action, shown.steps.extras)
        got = jax.tree.map(lambda x, n=n: np.asarray(x[:, n]), got)
        np.testing.assert_array_equal(got.action, truth.action[:-1])
        np.testing.assert_allclose(got.extras["log_prob"], truth.extras["log_prob"][:-1], rtol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, got.timestep, truth.timestep)
        rollout = max(s for s in np.cumsum([0, *rollouts]) if s <= start)
        if stride > 1 and rollout == start:
            assert shown.carry[n, 0] == start


@variants("name", ["frames"], ["sequences"])
def test_a_count_that_grows_large_changes_no_sample(name):
    spec, length, stride, rollouts = CASES[name]
    buffer = Buffer(Replay(B * 40, prioritized=True), spec, length, stride)
    world, memory = fill(spec, buffer, rollouts)
    ring_size = memory.steps.timestep.reward.shape[1]
    turns = 2**30 // ring_size * ring_size
    old = dataclasses.replace(memory, num_added=memory.num_added % ring_size + turns - ring_size)
    assert int(old.num_added[0]) < 2**30
    add, sample = jax.jit(buffer.add), jax.jit(partial(buffer.sample, N=64))
    for _ in range(2 * ring_size // rollouts[0]):
        steps, carry = world.rollout(rollouts[0]), jnp.zeros((B, 1))
        old, memory = add(old, steps, carry), add(memory, steps, carry)
        samples = (sample(x, jax.random.key(3)) for x in (old, memory))
        jax.tree.map(np.testing.assert_array_equal, *samples)
    assert 2**28 < int(old.num_added[0]) < 2**30 - ring_size


def test_an_episode_that_begins_without_an_end_is_cut_before_it():
    buffer = Buffer(Replay(B * 20), PLAIN, 4)
    world = World(PLAIN)
    steps = world.rollout(8)
    quiet = dataclasses.replace(
        steps.timestep,
        first=jnp.zeros((8, B), bool).at[5, 1].set(True),
        last=jnp.zeros((8, B), bool),
        discount=jnp.ones((8, B)),
    )
    memory = buffer.init(B, extras=EXTRAS)
    memory = buffer.add(memory, dataclasses.replace(steps, timestep=quiet))
    sample = draw(buffer, memory, 0, 256)
    times = np.asarray(sample.starts)[None] + np.arange(3)[:, None]
    lost = (times == 4) & (np.asarray(sample.rows) == 1)[None]
    np.testing.assert_array_equal(~sample.trajectory.valid(), lost)


def test_uniform_samples_are_uniform():
    buffer = Buffer(Replay(B * 40), PLAIN, 3)
    _, memory = fill(PLAIN, buffer, [8] * 9)
    sample = draw(buffer, memory, 1, 60_000)
    places = np.asarray(sample.rows) * 40 + np.asarray(sample.starts)
    counts = np.bincount(places, minlength=120)
    expected = 60_000 / int(buffer.size(memory))
    assert (counts > 0).sum() == int(buffer.size(memory))
    assert np.abs(counts[counts > 0] - expected).max() < 6 * np.sqrt(expected)


def test_priorities_decide_how_often_and_weights_undo_it():
    settings = Replay(B * 40, prioritized=True, priority_exponent=0.5, importance_exponent=1.0)
    buffer = Buffer(settings, PLAIN, 3)
    _, memory = fill(PLAIN, buffer, [8] * 3)
    everything = draw(buffer, memory, 1, 3000)
    errors = (everything.rows + 1.0) ** 2  # row 2 is drawn three times as often as row 0
    priorities = jax.jit(buffer.update_priorities)(memory.priorities, everything, errors)
    memory = dataclasses.replace(memory, priorities=priorities)
    sample = draw(buffer, memory, 2, 6000)
    share = np.bincount(np.asarray(sample.rows), minlength=B) / 6000
    np.testing.assert_allclose(share, np.array([1, 2, 3]) / 6, atol=0.01)
    weights = np.asarray(sample.weights)
    np.testing.assert_allclose(weights, 1 / (np.asarray(sample.rows) + 1), rtol=1e-3)
    schedule = Linear(0.4, 1.0, frames=100)
    settings = dataclasses.replace(settings, importance_exponent=schedule)
    buffer = dataclasses.replace(buffer, config=settings)
    for frames, beta in ((0, 0.4), (50, 0.7), (200, 1.0)):
        sample = buffer.sample(memory, jax.random.key(2), 100, frames)
        expected = (np.asarray(sample.rows) + 1.0) ** -beta
        np.testing.assert_allclose(sample.weights, expected / expected.max(), rtol=1e-3)


def test_what_is_new_gets_the_highest_priority_so_far():
    buffer = Buffer(Replay(B * 40, prioritized=True, priority_exponent=1.0), PLAIN, 3)
    world, memory = fill(PLAIN, buffer, [8] * 2)
    sample = draw(buffer, memory, 1, 64)
    priorities = jax.jit(buffer.update_priorities)(memory.priorities, sample, jnp.full(64, 7.0))
    memory = dataclasses.replace(memory, priorities=priorities)
    memory = jax.jit(buffer.add)(memory, world.rollout(8), jnp.zeros((B, 1)))
    leaves = np.asarray(memory.priorities.tree[0])
    np.testing.assert_allclose(leaves[:, 14:22], 7.0, rtol=1e-5)
    assert (leaves[:, 22:] == 0).all()


def test_adding_costs_the_same_however_large_the_replay():
    """The rings are updated in place: no operation of the compiled program is as large as one."""
    buffer = Buffer(Replay(B * 10_000, prioritized=True), FRAMES, 4)
    world = World(FRAMES)
    memory = buffer.init(B, extras=EXTRAS)

    def chunk(memory, steps):
        def step(memory, key):
            memory = buffer.add(memory, steps)
            sample = buffer.sample(memory, key, 8)
            priorities = buffer.update_priorities(memory.priorities, sample, sample.weights)
            return dataclasses.replace(memory, priorities=priorities), sample.weights

        return jax.lax.scan(step, memory, jax.random.split(jax.random.key(0), 5))

    steps = world.rollout(5)
    text = jax.jit(chunk, donate_argnums=0).lower(memory, steps).compile().as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and "10000" in line]
    assert not copies, copies


def test_refuses_what_cannot_fit():
    with pytest.raises(ConfigError, match=r"need at least 7: take at least 21"):
        Buffer(Replay(B * 4), PLAIN, 5).init(B)
    buffer = Buffer(Replay(B * 20), PLAIN, 4, stride=4)
    memory = buffer.init(B, extras=EXTRAS)
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        buffer.add(memory, World(PLAIN).rollout(6))
    with pytest.raises(ConfigError, match=r"needs a replay\.capacity of 24"):
        buffer.add(memory, World(PLAIN).rollout(16))


def test_frames_are_kept_once():
    """The memory of a replay of stacks is that of the frames, and ten per cent at most."""
    spec = EnvironmentSpec("atari", ArraySpec((84, 84, 4), np.uint8, frame_stack=True), Discrete(4))
    memory = jax.eval_shape(lambda: Buffer(Replay(8 * 1000), spec, 4).init(8))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory))
    assert size <= 1.1 * 8 * 1000 * 84 * 84


def test_weights_are_those_of_transitions_that_teach_something():
    """One from the last timestep of an episode has no error, and would have the largest weight."""
    buffer = Buffer(Replay(B * 40, prioritized=True, importance_exponent=1.0), PLAIN, 3)
    _, memory = fill(PLAIN, buffer, [5] * 8)
    everything = draw(buffer, memory, 0, 2048)
    is_last = np.asarray(everything.trajectory.steps.timestep.last[0])
    errors = jnp.where(is_last, 0.0, 1.0)
    priorities = buffer.update_priorities(memory.priorities, everything, errors)
    sample = draw(buffer, dataclasses.replace(memory, priorities=priorities), 1, 40_000)
    is_last = np.asarray(sample.trajectory.steps.timestep.last[0])
    assert 0 < is_last.sum() < 100
    np.testing.assert_array_equal(np.asarray(sample.weights), 1.0)


@pytest.mark.slow
def test_devices_that_share_a_batch_share_the_scale_of_its_weights():
    settings = Replay(B * 40, prioritized=True, priority_exponent=1.0, importance_exponent=1.0)
    buffer = Buffer(settings, PLAIN, 3)
    _, memory = fill(PLAIN, buffer, [8] * 3)
    everything = draw(buffer, memory, 0, 2048)
    is_small = (everything.rows == 0) & (everything.starts % 2 == 0)
    errors = jnp.where(is_small, 0.05, 1.0)
    priorities = buffer.update_priorities(memory.priorities, everything, errors)

    def sample(memory):
        sample = buffer.sample(memory, jax.random.key(1), 64, axis="data")
        return sample.weights, sample.starts, sample.trajectory.steps.timestep.last[0]

    shard = jax.shard_map(
        sample,
        mesh=make_mesh(find_devices(B)),
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    weights, starts, is_last = map(
        np.asarray, shard(dataclasses.replace(memory, priorities=priorities))
    )
    leaves, rows = np.asarray(priorities.tree[0]), np.repeat(np.arange(B), 64)
    means = leaves.sum(1) / (leaves > 0).sum(1)
    expected = means[rows] / leaves[rows, starts]
    largest = expected[~is_last].max()
    np.testing.assert_allclose(weights, np.minimum(expected / largest, 1), rtol=1e-4)
    assert weights[rows == 1].max() < 0.2 < weights[rows == 0].max()


def test_devices_exchange_nothing_for_uniform_samples():
    buffer = Buffer(Replay(B * 40), PLAIN, 3)
    memory = buffer.init(B, extras=EXTRAS, carry=ArraySpec((1,)))
    sample = jax.shard_map(
        lambda memory: buffer.sample(memory, jax.random.key(1), 8, axis="data").weights,
        mesh=make_mesh(find_devices(B)),
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    assert "pmax" not in str(jax.make_jaxpr(sample)(memory))


@pytest.mark.parametrize("every_step", [False, True])
def test_sequences_that_begin_at_an_episodes_end_set_the_scale_of_weights(every_step):
    """Recurrent agents learn from their other timesteps, also where rollouts have one step."""
    settings = Replay(B * 40, prioritized=True, priority_exponent=1.0, importance_exponent=1.0)
    buffer = Buffer(settings, PLAIN, 3, every_step=every_step)
    _, memory = fill(PLAIN, buffer, [5] * 8)
    everything = draw(buffer, memory, 0, 2048)
    errors = jnp.where(everything.trajectory.steps.timestep.last[0], 0.5, 1.0)
    priorities = buffer.update_priorities(memory.priorities, everything, errors)
    sample = draw(buffer, dataclasses.replace(memory, priorities=priorities), 1, 512)
    is_last = np.asarray(sample.trajectory.steps.timestep.last[0])
    assert is_last.any()
    other = 0.5 if every_step else 1.0
    np.testing.assert_allclose(sample.weights, np.where(is_last, 1.0, other), rtol=1e-4)


def test_priorities_are_only_kept_where_they_are_used():
    uniform = Buffer(Replay(B * 20), PLAIN, 2).init(B)
    assert uniform.priorities is None
    assert isinstance(
        Buffer(Replay(B * 20, prioritized=True), PLAIN, 2).init(B).priorities, Priorities
    )


class Recent(Replay):
    """A replay of one's own: samples begin at the newest few starts of a ring."""

    def build(self, *args, **options):
        return RecentBuffer(self, *args, **options)


class RecentBuffer(Buffer):
    def draw(self, state, key, N):
        ring_size = state.steps.timestep.reward.shape[1]
        rows, ages = jax.random.randint(key, (2, N), 0, jnp.array([[B], [5]]))
        return rows, (state.num_added[0] - self.length - ages) % ring_size, None


def test_a_buffer_of_ones_own_draws_the_newest_timesteps():
    buffer = Recent(B * 40).build(PLAIN, 3)
    world, memory = fill(PLAIN, buffer, [8] * 9)
    sample = draw(buffer, memory, 1, 200)
    newest = len(world.steps) - 3
    assert set(np.unique(sample.starts)) == {(newest - age) % 40 for age in range(5)}
    age = (newest - int(sample.starts[0])) % 40
    truth = world.truth(int(sample.rows[0]), newest - age, 3)
    np.testing.assert_array_equal(sample.trajectory.steps.action[:, 0], truth.action[:2])


@pytest.mark.parametrize("settings", [DQN, R2D2, SAC, MuZero])
def test_an_agent_samples_from_the_buffer_that_its_replay_builds(settings):
    replay = Recent(B * 40, batch_size=8, warmup=0)
    spec = BOX if settings is SAC else dataclasses.replace(BOX, action=Discrete(4))
    methods = methods_of(settings(replay=replay).build(spec))
    assert isinstance(getattr(methods, "learner", methods).buffer, RecentBuffer)
