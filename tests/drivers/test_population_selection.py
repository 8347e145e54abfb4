"""Selection inside a population's program: a tournament's decisions, exact, on any devices."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import resumed_and_whole
from standings import entry, stand
from variants import variants

from podracer.agents.a2c import A2C
from podracer.cli.pods import read_spaces
from podracer.config.experiment import Experiment
from podracer.drivers import selection
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Hyperparameter, Pod, Population, population_mesh
from podracer.drivers.selection import (
    Generational,
    PopulationBased,
    Range,
    Selection,
    SelectionState,
    Truncation,
    mean_of_floats,
)
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.run import sweep
from podracer.run.loading import load_run, reopen
from podracer.run.setup import make_driver, make_evaluator
from podracer.tournament import selection as tournament
from podracer.types import LearnerState

BOUNDS = (Range("learning_rate", 1e-5, 1e-2), Range("entropy_cost", 0.0, 0.02))


def equals(one, other):
    """Whether two trees are equal bit by bit."""

    def content(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(content(a) == content(b) for a, b in pairs)


# --- the decisions --------------------------------------------------------------------------------


class Draws:
    """The numbers that a population draws for one pod, handed out as a tournament asks for them."""

    def __init__(self, draws):
        self.parent, self.rest = draws[0], iter(draws[1:].reshape(-1, 3))
        self.current = iter([self.parent])

    def integers(self, count):
        number = next(self.current, None)
        if number is None:  # of the next hyperparameter
            self.current = iter(next(self.rest))
            number = next(self.current)
        return int(np.float32(number) * np.float32(count))

    def random(self):
        number = float(next(self.current))
        if number >= 0.25:  # not resampled, so the quantile is not asked for
            self.current = iter(())
        return number


@partial(jax.jit, static_argnums=0)
def decided(rule, scores, draws, values):
    """The parents, the first of a group, and the hyperparameters of all pods."""
    parents = rule.decide(scores, draws[:, 0])[:, 0]
    taken = {name: x[parents] for name, x in values.items()}
    if isinstance(rule, PopulationBased):
        explored = rule.perturb(taken, draws[:, 1:].reshape(len(scores), -1, 3))
        changed = parents != np.arange(len(scores))
        taken = {name: jnp.where(changed, explored[name], x) for name, x in taken.items()}
    return parents, taken


@variants("num_pods", [2, 6], [1024])
@pytest.mark.parametrize(
    "rule",
    [
        Truncation(0.3),
        PopulationBased(BOUNDS),
        PopulationBased(BOUNDS, fraction=0.5, factors=(0.5, 1.1, 2.0)),
        Generational(parents=1),
        Generational(group_size=2, parents=3),
    ],
    ids=str,
)
def test_a_population_decides_as_a_tournament(rule, num_pods):
    """On the same scores, some of them equal, and the same random numbers."""
    rng = np.random.default_rng(num_pods)
    for _ in range(3):
        scores = rng.integers(0, num_pods, num_pods).astype(np.float32)
        draws = rng.random((num_pods, 7), np.float32)
        values = {bound.name: rng.uniform(bound.low, bound.high, num_pods) for bound in BOUNDS}
        parents, explored = decided(rule, scores, draws, values)
        newest = [
            entry(pod, float(score), **{name: x[pod] for name, x in values.items()})
            for pod, score in enumerate(scores)
        ]
        for pod in range(0, num_pods, 1 + num_pods // 100):
            start = tournament.choose(rule, stand(pod, newest), Draws(draws[pod]))
            assert start.parents[0] == f"p{parents[pod]}r0"
            for name, value in start.hyperparameters.items():
                np.testing.assert_allclose(explored[name][pod], value, rtol=2e-6)


# --- one selection --------------------------------------------------------------------------------


def states_of(mesh, num_pods=8):
    """States without an agent: weights with signed zeros, counters, environments, keys."""
    rng = np.random.default_rng(0)
    weights = np.where(rng.random((num_pods, 3, 5)) < 0.5, -0.0, rng.normal(size=(num_pods, 3, 5)))
    state = SelectionState(
        learner=LearnerState(
            {"weights": weights.astype(np.float32), "count": np.arange(num_pods)},
            {"replay": np.arange(num_pods * 2).reshape(-1, 2)},
        ),
        actor={"steps": np.arange(num_pods), "key": jax.random.split(jax.random.key(1), num_pods)},
        update=np.full(num_pods, 10, np.uint32),
        fault=np.zeros((num_pods, 2), np.uint32),
        key=jnp.stack([jax.random.key(pod // 2) for pod in range(num_pods)]),  # seeds are shared
        hyperparameters={"learning_rate": np.linspace(1e-4, 1e-3, num_pods, dtype=np.float32)},
        score=np.arange(num_pods, dtype=np.float32),
    )
    sharding = jax.NamedSharding(mesh, jax.P("pod"))
    return jax.tree.map(lambda x: jax.device_put(x, sharding), state)


def select(rule, mesh, **changes):
    state = dataclasses.replace(states_of(mesh), **changes)
    program = jax.jit(lambda states: selection.select_pods(Selection(rule, 5), mesh, states))
    return state, *program(state)


RATE = (Range("learning_rate", 1e-5, 1e-2),)


@pytest.mark.parametrize(
    "rule", [PopulationBased(RATE, fraction=0.4), Generational(group_size=2)], ids=str
)
def test_devices_change_no_bit_of_a_selection(rule):
    outcomes = [select(rule, population_mesh(jax.devices()[:n], 8))[1:] for n in (1, 2, 4)]
    assert equals(outcomes[0], outcomes[1])
    assert equals(outcomes[0], outcomes[2])


def test_a_pod_takes_all_of_another_but_its_random_numbers():
    mesh = population_mesh(jax.devices()[:1], 8)
    before, after, parents = select(PopulationBased(RATE, fraction=0.25), mesh)
    parents = np.asarray(parents)
    assert set(parents[:2]) <= {6, 7}
    assert parents[2:].tolist() == [2, 3, 4, 5, 6, 7]
    for part in ("learner", "actor", "score"):
        taken = jax.tree.map(lambda x: x[parents], getattr(before, part))
        assert equals(getattr(after, part), taken)
    rates = [np.asarray(x.hyperparameters["learning_rate"]) for x in (before, after)]
    assert (rates[0][2:] == rates[1][2:]).all()
    assert (rates[0][parents[:2]] != rates[1][:2]).all()
    keys = np.asarray(jax.random.key_data(after.key))
    assert len(np.unique(keys[[0, 1]], axis=0)) == 2  # though the pods had one seed
    assert equals(after.key[2:], before.key[2:])


def test_a_fault_is_the_worst_score_and_is_healed_and_what_has_no_score_is_no_parent():
    mesh = population_mesh(jax.devices()[:1], 8)
    fault = np.zeros((8, 2), np.uint32)
    fault[7] = 4, 9
    _, after, parents = select(Truncation(0.125), mesh, fault=jnp.asarray(fault))
    assert np.asarray(parents).tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert not np.asarray(after.fault).any()
    scores = jnp.full(8, -jnp.inf)
    before, after, parents = select(Truncation(0.5), mesh, score=scores)
    assert np.asarray(parents).tolist() == list(range(8))
    assert equals(before, after)


def test_a_fusion_leaves_what_is_equal_as_it_is():
    """To the bit, however many there are; also what is not finite, and integers."""
    constant = jax.random.normal(jax.random.key(0), (1000,)).at[0].set(-jnp.inf)
    for num in (3, 7, 10):
        fused = mean_of_floats(*[constant] * num)
        np.testing.assert_array_equal(fused, constant)
    np.testing.assert_array_equal(mean_of_floats(jnp.arange(3), jnp.zeros(3, int)), np.arange(3))


def test_a_fused_group_has_the_mean_of_its_weights():
    mesh = population_mesh(jax.devices()[:1], 8)
    before, after, parents = select(Generational(group_size=2, parents=2), mesh)
    assert np.asarray(parents).tolist() == [6, 6, 4, 4, 4, 4, 6, 6]  # groups 0 and 1 in turn
    weights = np.asarray(before.learner.shared["weights"])
    fused = np.asarray(after.learner.shared["weights"])
    for pod, parent in enumerate(np.asarray(parents)):
        np.testing.assert_array_equal(fused[pod], (weights[parent] + weights[parent + 1]) / 2)
    assert np.asarray(after.learner.shared["count"]).tolist() == np.asarray(parents).tolist()
    assert len(np.unique(np.asarray(jax.random.key_data(after.key)), axis=0)) == 8


# --- as a run -------------------------------------------------------------------------------------

CONFIG = AnakinConfig(16, 8, 5)
STEPS = 16 * 8
EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=A2C(network=TorsoNetwork(MLP((16,)))),
    driver=CONFIG,
    frames=40 * STEPS,
    evaluations=2,
    evaluation_episodes=8,
    pods=tuple(Pod(i % 2, (Hyperparameter("learning_rate", 1e-4 * 4**i),)) for i in range(4)),
    exchange=Selection(PopulationBased(RATE, fraction=0.5), 10),
    devices=1,
)


def test_fixed_evaluations_play_the_same_episodes_after_a_selection():
    """A pod that starts from another one has a new key."""
    for fixed in (True, False):
        experiment = dataclasses.replace(EXPERIMENT, fixed_evaluation=fixed)
        driver = make_driver(experiment)
        state, evaluate = driver.init(experiment.key), make_evaluator(experiment, driver)
        keys = jax.device_put(state.key[::-1], state.key.sharding)
        returns = [evaluate(x).returns for x in (state, dataclasses.replace(state, key=keys))]
        assert np.array_equal(*returns) == fixed


@pytest.mark.slow
def test_resumed_equals_uninterrupted_and_the_lineage_is_written(tmp_path):
    # It stops where a selection is due, which is therefore made by the resumed run.
    cut, whole = resumed_and_whole(EXPERIMENT, tmp_path, frames=20 * STEPS, evaluations=1)
    assert (cut / "pods.jsonl").read_text() == (whole / "pods.jsonl").read_text()
    lineage = sweep.selections(sweep.read_pods(whole))
    assert [record["updates"] for record in lineage] == [15, 25, 35]
    numbers = list(range(4))
    for record in lineage:
        numbers = [numbers[parent] for parent in record["parent"]]
    assert sweep.ancestors(lineage) == numbers
    last = lineage[-1]["hyperparameter_learning_rate"]
    run = load_run(whole, pod=2)
    assert run.blueprint.settings.learning_rate == last[2]
    assert int(run.state.update) == 40
    found = sweep.configurations(whole, reopen(whole))
    assert sorted(number for each in found for number in each.pods) == [0, 1, 2, 3]
    assert {each.hyperparameters[0].value for each in found} == set(last)


def test_the_program_calls_no_host_and_is_given_the_states():
    env = make("catch")
    parts = (EXPERIMENT.pods, env, CONFIG, jax.devices()[:1], EXPERIMENT.exchange)
    driver = Population(EXPERIMENT.agent, *parts)
    compiled = driver.lower()().func
    assert "callback" not in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes >= driver.saved_bytes


def test_a_selection_is_made_of_flags():
    spaces = read_spaces(["learning_rate=1e-5:1e-2", "entropy_cost=0,0.01"])
    made = sweep.make_exchange(PopulationBased(fraction=0.3), None, 10, spaces)
    assert made == Selection(PopulationBased((BOUNDS[0],), fraction=0.3), 10)
    assert sweep.make_exchange(None, None, 0, spaces) is None
    with pytest.raises(ConfigError, match="give the rule of a selection"):
        sweep.make_exchange(None, None, 10, spaces)
    with pytest.raises(ConfigError, match="either select or average"):
        sweep.make_exchange(Truncation(), "ring", 10, spaces)
