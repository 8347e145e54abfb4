"""Teachers within an environment, and students that learn what these would do."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demonstrations import Recorded

import podracer
from podracer import recipes
from podracer.agents import A2C, PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.environment import features
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.distributions import Categorical
from podracer.replay import Replay
from podracer.reports.recording import is_drawable
from podracer.run.warm_start import Weights
from podracer.types import ACTION_MASK, ArraySpec, EnvironmentSpec, TimeStep
from podracer_offline import Cloning, DAgger, Dataset, replay, teach
from podracer_offline.records import Record

NETWORK = TorsoNetwork(MLP((32,), "tanh"), shared=False)
REPLAY = Replay(32_000, updates_per_rollout=4, warmup=0)
DRIVER = AnakinConfig(num_envs=16, rollout_length=16, updates_per_chunk=10)


@dataclasses.dataclass(frozen=True)
class WithHint:
    """CartPole whose observations also have the side that a rule of thumb pushes to."""

    inner: Any = dataclasses.field(default_factory=lambda: make("cartpole"))
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def spec(self) -> EnvironmentSpec:
        spec = self.inner.spec
        observation = {"observation": spec.observation, "hint": ArraySpec((2,))}
        return dataclasses.replace(spec, observation=observation, groups=dict(self.groups))

    def reset(self, key: jax.Array) -> Any:
        return self._hint(*self.inner.reset(key))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        return self._hint(*self.inner.step(key, state, action))

    def _hint(self, state: Any, timestep: TimeStep) -> Any:
        x = timestep.observation
        side = (x @ jnp.asarray([0.1, 0.3, 1.0, 1.0]) > 0).astype(jnp.int32)
        observation = {"observation": x, "hint": jax.nn.one_hot(side, 2)}
        return state, dataclasses.replace(timestep, observation=observation)


def certain(observation: Any) -> Categorical:
    """A teacher that needs the hint."""
    return Categorical(5.0 * observation["hint"])


def mode(observation: Any) -> jax.Array:
    return certain(observation).mode()


def student(environment: Any, frames: int, **settings: Any) -> Experiment:
    agent = DAgger(network=NETWORK, replay=REPLAY)
    return Experiment(
        recipe="test",
        environment=environment,
        agent=dataclasses.replace(agent, **settings),
        driver=DRIVER,
        frames=frames,
        evaluations=1,
        evaluation_episodes=32,
    )


@pytest.mark.parametrize("teacher", [certain, mode])
def test_a_student_without_the_hint_learns_from_a_teacher_with_it(teacher, tmp_path):
    environment = teach(teacher, WithHint(), hidden=("hint",))
    assert list(environment.spec.observation.observation) == ["observation"]
    assert list(environment.for_evaluation().spec.observation) == ["observation"]
    result = podracer.train(student(environment, 25_600), run_dir=tmp_path)
    assert result.metrics["accuracy"] > 0.9
    assert result.metrics["evaluation_return"] > 300


def test_the_student_acts_and_the_teacher_labels():
    """A clone in the same environment acts as its teacher does."""
    environment = teach(certain, WithHint(), hidden=("hint",))
    _, timestep = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 64))
    np.testing.assert_array_equal(
        timestep.observation.action, timestep.observation.distribution.argmax(-1)
    )
    grouped = teach(certain, WithHint(groups=(("actor", ("observation",)),)))
    assert (grouped.hidden, grouped.spec) == (("hint",), environment.spec)
    keys, actions = jax.random.split(jax.random.key(1), 64), []
    for settings in (DAgger(network=NETWORK), Cloning(network=NETWORK)):
        agent = settings.build(environment.spec)
        params = agent.actor_params(agent.init(jax.random.key(2), 64))
        actions.append(agent.act(params, (), timestep, keys, True)[0])
    assert (actions[0] != timestep.observation.action).any()
    np.testing.assert_array_equal(actions[1], timestep.observation.action)


@dataclasses.dataclass(frozen=True)
class OnlyRight(WithHint):
    """CartPole whose mask allows one action."""

    @property
    def spec(self) -> EnvironmentSpec:
        spec = super().spec
        observation = {**spec.observation, ACTION_MASK: ArraySpec((2,), bool)}
        return dataclasses.replace(spec, observation=observation)

    def _hint(self, state: Any, timestep: TimeStep) -> Any:
        state, timestep = super()._hint(state, timestep)
        observation = {**timestep.observation, ACTION_MASK: jnp.asarray([False, True])}
        return state, dataclasses.replace(timestep, observation=observation)


def test_a_student_sees_the_mask_of_its_actions_without_asking():
    environment = teach(mode, OnlyRight(groups=(("actor", ("observation",)),)))
    assert environment.hidden == ("hint",)
    keys = jax.random.split(jax.random.key(0), 64)
    _, timestep = jax.vmap(environment.reset)(keys)
    agent = DAgger(network=NETWORK).build(environment.spec)
    params = agent.actor_params(agent.init(jax.random.key(1), 64))
    assert (agent.act(params, (), timestep, keys, True)[0] == 1).all()


@dataclasses.dataclass(frozen=True)
class MaskWithin(WithHint):
    """CartPole whose mask is within a key, which the group of the actor lacks."""

    @property
    def spec(self) -> EnvironmentSpec:
        spec = super().spec
        observation = {"state": spec.observation.pop("observation"), **spec.observation}
        observation["observation"] = {ACTION_MASK: ArraySpec((2,), bool)}
        return dataclasses.replace(spec, observation=observation)

    def _hint(self, state: Any, timestep: TimeStep) -> Any:
        state, timestep = super()._hint(state, timestep)
        observation = {"state": timestep.observation["observation"], **timestep.observation}
        observation["observation"] = {ACTION_MASK: jnp.asarray([False, True])}
        return state, dataclasses.replace(timestep, observation=observation)


def test_a_student_sees_a_mask_within_a_key():
    assert teach(mode, MaskWithin(groups=(("actor", ("state",)),))).hidden == ("hint",)


def test_recorded_episodes_of_a_student_are_of_what_it_sees():
    environment = teach(mode, WithHint(), hidden=("hint",))
    columns = {name: np.asarray([0, 1]) for name in ("action", "reward", "terminal")}
    observation = {"observation": np.zeros((2, 4))}
    data = replay(Dataset(observation=observation, timeout=np.zeros(2), **columns), environment)
    assert data.spec.observation.observation == environment.spec.observation.observation
    assert data.for_evaluation().spec == environment.for_evaluation().spec


@podracer.struct
class LastAction:
    last_action: jax.Array


@podracer.struct
class Echo:
    """A teacher that names the last action of its memory."""

    def carry(self, num_envs: int) -> LastAction:
        return LastAction(jnp.zeros(num_envs, jnp.int32))

    def __call__(self, carry: LastAction, timestep: TimeStep, keys: jax.Array) -> Any:
        return carry.last_action, None, LastAction(jnp.full_like(carry.last_action, -1))


def test_a_teacher_observes_the_last_action_of_the_student():
    environment = dataclasses.replace(teach(mode, WithHint()), teacher=Echo())
    state, _ = environment.reset(jax.random.key(0))
    for action in (1, 0, 1):
        state, timestep = environment.step(jax.random.key(1), state, jnp.int32(action))
        assert timestep.observation.action == action


def test_what_can_be_drawn_is_drawn_with_a_teacher_and_in_its_evaluations():
    taught = teach(lambda observation: jnp.zeros(len(observation), jnp.int32), make("cartpole"))
    state, _ = taught.reset(jax.random.key(0))
    assert features(taught).render(jax.device_get(state)).ndim == 3
    assert is_drawable(taught)
    assert not is_drawable(teach(mode, WithHint()))


def test_a_run_teaches_and_reinforcement_learning_goes_on_from_the_student(tmp_path):
    """The student's run is resumed exactly, and refused once its teacher has learned more."""
    teacher, name = tmp_path / "teacher", f"taught:{tmp_path / 'teacher'}"
    experiment = dataclasses.replace(recipes.find("catch_a2c"), frames=64_000, evaluations=0)
    podracer.train(experiment, run_dir=teacher)
    environment = make(name)
    _, timestep = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 8))
    record, policy = timestep.observation, podracer.load_policy(teacher)
    np.testing.assert_array_equal(record.action, policy(np.asarray(record.observation)))
    expected = policy.distribution(np.asarray(record.observation)).logits
    np.testing.assert_allclose(record.distribution, expected, rtol=1e-5, atol=1e-5)

    small = student(name, 5_120)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    podracer.train(small, run_dir=whole)
    podracer.train(dataclasses.replace(small, frames=2_560), run_dir=cut)
    podracer.train(small, run_dir=cut, resume=True)
    assert stored_fingerprint(cut)[1] == stored_fingerprint(whole)[1]
    online = dataclasses.replace(small, environment="catch", agent=PPO(network=NETWORK))
    result = podracer.train(online, run_dir=tmp_path / "online", begin=Weights(whole))
    assert np.isfinite(result.metrics["loss"])

    podracer.train(experiment, run_dir=teacher, frames=80_000, resume=True)
    with pytest.raises(ConfigError, match=r"and teacher\.updates changed since"):
        podracer.train(small, run_dir=cut, frames=7_680, resume=True)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (
            lambda: teach(mode, WithHint(), hidden=("hints",)),
            "cannot hide hints",
        ),
        (lambda: teach(mode, WithHint(), hidden="hint"), "hidden cannot be 'hint': write"),
        (lambda: make("taught:RUN,hidden=3"), "hidden cannot be 3: it must be text"),
        (lambda: teach(mode), "a function teaches in an environment"),
        (lambda: teach(mode, gymnasium.make("CartPole-v1")), "TimeLimit is one of Gymnasium: pass"),
        (lambda: teach(mode, "gymnasium:CartPole-v1"), "within an environment of the device"),
        (
            lambda: DAgger().build(make("catch").spec),
            'a teacher, and catch has none: take `environment="taught:RUN"`',
        ),
        (
            lambda: DAgger(network=TorsoNetwork(MLP((8,)), memory="gru")).build(
                Recorded(make("catch")).spec
            ),
            "needs a feed-forward network",
        ),
        (
            lambda: DAgger(replay=Replay(prioritized=True)).build(Recorded(make("catch")).spec),
            "DAgger samples uniformly",
        ),
        (
            lambda: podracer.train(
                dataclasses.replace(student(teach(mode, WithHint()), 512), agent=A2C())
            ),
            "A2C learns from its own actions",
        ),
    ],
)
def test_what_cannot_be_taught_is_refused(make_it, words):
    with pytest.raises(ConfigError, match=words):
        make_it()


def test_a_student_with_memory_learns_each_rollout_once():
    network = TorsoNetwork(MLP((8,)), memory="gru", memory_size=4)
    environment = teach(mode, WithHint())
    agent = DAgger(network=network, replay=None).build(environment.spec)
    assert jax.tree.leaves(agent.carry(2))
    assert agent.init(jax.random.key(0), 2).local == ()
    assert isinstance(environment.spec.observation, Record)
