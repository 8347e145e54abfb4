"""Evaluations: who acts in them, in which episodes, and how many of these differ."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import Counters
from variants import variants

import podracer
from podracer.agent import Agent
from podracer.agents.a2c import A2C
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.progress import Orders, Progress
from podracer.drivers.sebulba import SebulbaConfig
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError, EnvironmentFault
from podracer.evaluate import Evaluation, make_evaluator
from podracer.fields import struct
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.random import random_uniform
from podracer.run import records, setup
from podracer.run.records import Recorder, Stopwatch
from podracer.run.resume import Best
from podracer.run.setup import make_driver
from podracer.scores.score import returns_of
from podracer.tournament.config import Tournament
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec

LENGTH = 16


@dataclasses.dataclass(frozen=True)
class Line:
    """Sixteen steps without chance; the reward is 1 for the second action, 100 for the third."""

    masked: bool = False  # whether the second action is not allowed
    stuck_at: int = LENGTH  # the step from which on no action is allowed

    @property
    def spec(self):
        observation = {ACTION_MASK: ArraySpec((3,), np.bool_)}
        return EnvironmentSpec("line", observation, Discrete(3))

    def _observation(self, step):
        return {ACTION_MASK: jnp.array([True, not self.masked, True]) & (step < self.stuck_at)}

    def reset(self, key):
        return jnp.int32(0), podracer.restart(self._observation(0))

    def step(self, key, state, action):
        reward = jnp.array([0.0, 1.0, 100.0])[action]
        timestep = podracer.transition(
            self._observation(state + 1), reward, terminal=state == LENGTH - 1
        )
        return state + 1, timestep


@dataclasses.dataclass(frozen=True)
class Late(Line):
    """An episode of 2 or 16 steps, after which no action is allowed; restarts by itself."""

    def reset(self, key):
        length = jnp.where(jax.random.bernoulli(key), 2, LENGTH)
        return (jnp.int32(0), length), podracer.restart(self._observation(0))

    def step(self, key, state, action):
        step, length = state[0] + 1, state[1]
        mask = {ACTION_MASK: jnp.full(3, step < length)}
        timestep = podracer.transition(mask, 1.0, terminal=step == length)
        return (step, length), dataclasses.replace(
            timestep, first=step == length, last=jnp.bool_(False)
        )


@dataclasses.dataclass(frozen=True)
class Priced(Line):
    """Pays a price in each step, in an evaluation twice as much."""

    price: float = 1.0

    def for_evaluation(self):
        return dataclasses.replace(self, price=2 * self.price)

    def step(self, key, state, action):
        state, timestep = super().step(key, state, action)
        return state, dataclasses.replace(timestep, reward=jnp.float32(self.price))


class OnHost(DeviceEnvironments):
    def for_evaluation(self):
        return OnHost(self.environment.for_evaluation())


def unused(*_):
    raise NotImplementedError


def scripted(spec):
    """Agent whose best action is the first; it explores with the first two, evenly."""

    def act(params, carry, timestep, keys, explore):
        action = jnp.int32(random_uniform(keys) * 2) if explore else jnp.zeros(len(keys), jnp.int32)
        return action, (), carry

    return Agent(spec=spec, init=unused, act=act, learn=unused)


@struct
class LastAction:
    last_action: jax.Array


def repeating(spec):
    """Agent whose best action is its last one."""

    def act(params, carry, timestep, keys, explore):
        return carry.last_action, (), carry

    def carry(num_envs):
        return LastAction(jnp.zeros(num_envs, jnp.int32))

    return Agent(spec=spec, init=unused, act=act, learn=unused, carry=carry)


def evaluate(episodes=500, host=False, masked=False, update=0, **acting):
    env = podracer.auto_reset(Line(masked))
    chosen = DeviceEnvironments(env) if host else env
    evaluator = make_evaluator(scripted(env.spec), chosen, episodes, **acting)
    result = evaluator((), jax.random.key(0), update)
    assert set(result.lengths) == {LENGTH}
    assert result.unfinished == 0
    return result


@pytest.mark.parametrize("host", [False, True])
def test_a_greedy_evaluation_without_chance_is_one_episode(host):
    greedy = evaluate(20, host)
    assert greedy.distinct_episodes == 1
    assert greedy.repetition == "the 20 evaluation episodes are repetitions of one episode"
    assert evaluate(1, host).repetition is None
    sampled = evaluate(20, host, policy="sampled")
    assert sampled.distinct_episodes == 20
    assert sampled.repetition is None
    assert abs(sampled.returns.mean() - LENGTH / 2) < 4 * (LENGTH / 4 / 20) ** 0.5


@pytest.mark.parametrize("episodes", [-1, 0])
def test_an_evaluation_without_episodes_is_refused(episodes):
    with pytest.raises(ConfigError, match=f"1 to 1,048,576 episodes, not {episodes}"):
        evaluate(episodes)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_epsilon_is_the_share_of_uniformly_random_allowed_actions(host, masked):
    epsilon = 0.3
    returns = evaluate(host=host, masked=masked, epsilon=epsilon).returns
    third, second = np.divmod(returns, 100) / np.float32(LENGTH)
    share = epsilon / (2 if masked else 3)
    bound = 4 * (share / returns.size / LENGTH) ** 0.5
    assert abs(third.mean() - share) < bound
    assert abs(second.mean() - (0 if masked else share)) <= (0 if masked else bound)


@pytest.mark.parametrize("host", [False, True])
def test_the_environment_of_an_evaluation_is_made_once(host):
    env = podracer.auto_reset(Priced())
    evaluator = make_evaluator(scripted(env.spec), OnHost(env) if host else env, 2)
    assert evaluator((), jax.random.key(0)).returns.tolist() == [2 * LENGTH, 2 * LENGTH]


@pytest.mark.parametrize("host", [False, True])
def test_an_episode_in_which_no_action_is_allowed_is_refused(host):
    env = podracer.auto_reset(Line(stuck_at=LENGTH - 1))
    evaluator = make_evaluator(scripted(env.spec), DeviceEnvironments(env) if host else env, 2)
    with pytest.raises(EnvironmentFault, match="evaluation: an action mask was all False"):
        evaluator((), jax.random.key(0))


def test_an_agent_that_observes_its_last_action_observes_a_random_one():
    env = podracer.auto_reset(Line())
    evaluator = make_evaluator(repeating(env.spec), env, 500, epsilon=0.1)
    switched = 1 - (1 - 0.1 * 2 / 3) ** LENGTH  # probability that any random action is another one
    returns = evaluator((), jax.random.key(0)).returns
    assert abs((returns > 0).mean() - switched) < 0.1
    assert returns.mean() > 2 * evaluate(epsilon=0.1).returns.mean()


def test_random_actions_leave_the_others_as_they_were():
    """They have keys of their own: a rare one changes no other sample of the policy."""
    sampled = evaluate(policy="sampled").returns
    rarely = evaluate(policy="sampled", epsilon=1e-3).returns
    assert 0.95 < (sampled == rarely).mean() < 1


def test_episodes_follow_the_key_and_the_update():
    first, again, other = (evaluate(policy="sampled", update=u).returns for u in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()


def test_an_episode_that_a_fault_cut_does_not_count():
    def lose(batch, timestep):
        if batch.steps == 2:  # the worker of row 1 died, and another one begins anew
            batch.at[1] = timestep.reward[1] = 0
            timestep.first[1] = True
        return timestep

    env = Counters(lose)
    result = make_evaluator(scripted(env.spec), env, 4)((), jax.random.key(0))
    assert list(result.lengths) == list(result.returns) == [3, 4, 5, 6]
    assert (result.broken, result.unfinished) == (1, 0)


def test_an_episode_that_faults_break_again_and_again_did_not_end():
    def lose(batch, timestep):
        if batch.steps % 2 == 0:
            batch.at[1] = timestep.reward[1] = 0
            timestep.first[1], timestep.last[1], timestep.discount[1] = True, False, 1
        return timestep

    env = Counters(lose)
    result = make_evaluator(scripted(env.spec), env, 2, max_steps=21)((), jax.random.key(0))
    assert (result.broken, result.unfinished) == (10, 1)
    assert list(result.returns) == [3, 1]
    assert result.repetition is None


@pytest.mark.parametrize("host", [False, True])
def test_rows_whose_episodes_are_over_may_be_stuck(host):
    """Episodes of one environment end before it allows no action any more; the others go on."""
    env = Late()
    evaluator = make_evaluator(scripted(env.spec), DeviceEnvironments(env) if host else env, 8)
    lengths = evaluator((), jax.random.key(0)).lengths
    assert set(lengths) == {2, LENGTH}


# --- in a run -------------------------------------------------------------------------------------

EXPERIMENT = Experiment(
    recipe="test",
    environment="catch",
    agent=A2C(learning_rate=0.0, network=TorsoNetwork(MLP((4,)))),
    driver=AnakinConfig(4, 2, 5),
    frames=20 * 8,
    evaluations=2,
    evaluation_episodes=16,
    evaluation_policy="sampled",
    devices=1,
)


@variants(
    "changes",
    [
        {"pods": (Pod(0), Pod(1))},
        {"environment": Counters(), "driver": SebulbaConfig(4, 2, 5, threads_per_actor=1)},
    ],
    [{}, {"devices": 2, "fixed_evaluation": True}],
    ids=["sweep", "host", "one", "two"],
)
def test_an_evaluation_is_compiled_before_it_is_due(changes):
    """Beside the program's compile and the first chunks; a state of later updates is no other."""
    compiled: list[str] = []

    def listen(event, seconds, **about):
        if "backend_compile" in event:
            compiled.append(str(about.get("fun_name")))

    experiment = dataclasses.replace(EXPERIMENT, **changes)
    driver = make_driver(experiment)
    state, evaluate = driver.init(experiment.key), setup.make_evaluator(experiment, driver)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        evaluate.lower(state)()
        assert compiled
        reports = driver.run(state, Orders(5, is_boundary=lambda _: True))
        states = [progress.state for progress in reports]
        compiled.clear()
        assert evaluate(states[-1]).returns.shape[-1] == EXPERIMENT.evaluation_episodes
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_evaluations_are_the_same_under_every_driver():
    def returns(**changes):
        experiment = dataclasses.replace(EXPERIMENT, evaluation_epsilon=0.2, **changes)
        driver = make_driver(experiment)
        state, evaluate = driver.init(experiment.key), setup.make_evaluator(experiment, driver)
        later = dataclasses.replace(state, update=state.update + 5)
        return [evaluate(s).returns for s in (state, later)]

    fresh, fixed = returns(), returns(fixed_evaluation=True)
    assert (fresh[0] != fresh[1]).any()
    assert (fixed[0] == fixed[1]).all()
    assert (fixed[0] == fresh[0]).all()
    for changes in (
        {"devices": 2},
        {"driver": EXPERIMENT.with_arch("sebulba").driver},
        {"pods": (Pod(0), Pod(1))},
    ):
        for one, other in zip(fresh, returns(**changes), strict=True):
            assert (one == (other[0] if "pods" in changes else other)).all()


def evaluation(returns, unfinished, distinct=3, broken=0):
    returns = np.array(returns)
    distinct = np.full(returns.shape[:-1], distinct)
    return Evaluation(returns, np.ones_like(returns), np.array(unfinished), distinct, broken)


def test_an_evaluation_that_did_not_end_is_named_and_never_the_best(caplog):
    recorder = Recorder(EXPERIMENT, podracer.make("catch"))
    records, scores = [], []
    evaluations = [
        evaluation([1.0, 2.0], 0),
        evaluation([8.0, 9.0], 2, distinct=1, broken=60),
        evaluation([8.0, 9.0], 1),
        evaluation([1.0, 3.0], 0, broken=1),
        evaluation([1.0, np.nan], 0),
    ]
    with caplog.at_level(logging.WARNING, "podracer"):
        for updates, played in enumerate(evaluations):
            recorder.add_evaluation(played, record := {}, Progress(updates, 8, {}))
            records.append(record)
            scores.append(recorder.totals.evaluation_return)  # which a target is compared with
    assert recorder.best == Best(3, 2.0)
    assert scores == [1.5, None, None, 2.0, None]
    assert [r.get("evaluation_unfinished") for r in records] == [None, 2, 1, None, None]
    assert [r.get("evaluation_broken") for r in records] == [None, 60, None, 1, None]
    assert caplog.messages == [
        "2 of 2 evaluation episodes did not end within 30,000 steps: their returns are partial, "
        "never the best, and reach no target.",
        "1 of 2 evaluation episodes had rewards that are not finite: this evaluation has no score.",
    ]


def test_a_report_that_comes_late_leaves_the_rest_to_the_next(monkeypatch):
    clock = types.SimpleNamespace(perf_counter=lambda: 0.0, process_time=lambda: 0.0)
    monkeypatch.setattr(records, "time", clock)
    recorder, times = Recorder(EXPERIMENT, podracer.make("catch")), Stopwatch()
    clock.perf_counter = lambda: 9.0
    reports = [Progress(1, 8, {}, time=4.0), Progress(2, 8, {}, time=8.0)]
    lines = [recorder.record(progress, times) for progress in reports]
    assert [line["frames_per_second"] for line in lines] == [2.0, 2.0]
    times.add("time_evaluate")
    recorder.add_seconds(lines[1], times)
    assert (lines[1]["time_evaluate"], lines[1]["seconds"]) == (1.0, 9.0)


def test_an_end_that_is_noticed_late_does_not_show_as_speed(monkeypatch):
    clock = types.SimpleNamespace(perf_counter=lambda: 0.0, process_time=lambda: 0.0)
    monkeypatch.setattr(records, "time", clock)
    recorder, times = Recorder(EXPERIMENT, podracer.make("catch")), Stopwatch()
    ends = [0.06, 0.18, 0.175, 0.24, 0.30]  # of chunks of 0.06 s each; the second was seen late
    lines = [recorder.record(Progress(i, 8, {}, time=end), times) for i, end in enumerate(ends, 1)]
    speeds = [line["frames_per_second"] for line in lines]
    np.testing.assert_allclose(
        speeds, [8 / 0.06, 8 / 0.12, 16 / 0.12, 24 / 0.18, 16 / 0.12], rtol=1e-6
    )
    assert lines[-1]["seconds"] == pytest.approx(0.30)


def test_records_a_moment_apart_show_no_more_cores_than_there_are(monkeypatch):
    now = {"clock": 0.0, "cpu": 0.0}
    clock = {"perf_counter": lambda: now["clock"], "process_time": lambda: now["cpu"]}
    monkeypatch.setattr(records, "time", types.SimpleNamespace(**clock))
    recorder, times = Recorder(EXPERIMENT, podracer.make("catch")), Stopwatch()
    lines = []
    for i, (seconds, cpu) in enumerate([(1.0, 2.0), (1.000001, 2.002), (1.5, 2.5)], 1):
        now.update(clock=seconds, cpu=cpu)
        lines.append(recorder.record(Progress(i, 8, {}), times))
    expected = [2.0, 2.002 / 1.000001, 0.498 / 0.499999]
    np.testing.assert_allclose([x["machine_cores"] for x in lines], expected, rtol=1e-6)


def test_a_mean_over_pods_leaves_out_those_that_met_a_fault():
    recorder = Recorder(EXPERIMENT, podracer.make("catch"))
    progress = Progress(7, 8, {}, pods={"episodes": np.array([1.0, np.nan, 3.0])})
    played = evaluation([[1.0, 2.0], [800.0, 900.0], [3.0, 4.0]], [0, 2, 0], distinct=[2, 1, 1])
    recorder.add_evaluation(played, record := {}, progress)
    assert record["evaluation_return"] == recorder.totals.evaluation_return == 2.5
    assert record["evaluation_distinct_episodes"] == 1.5
    assert "evaluation_unfinished" not in record


def test_the_best_pod_is_one_whose_episodes_ended():
    recorder = Recorder(EXPERIMENT, podracer.make("catch"))
    progress = Progress(7, 8, {}, pods={"episodes": np.ones(3)})
    played = evaluation([[1.0, 2.0], [8.0, 9.0], [8.0, np.nan]], [0, 1, 0])
    recorder.add_evaluation(played, record := {}, progress)
    assert recorder.best == Best(7, 1.5)
    assert record["evaluation_unfinished"] == 1
    assert progress.pods is not None
    of_pods = {name: values.tolist() for name, values in progress.pods.items()}
    np.testing.assert_array_equal(returns_of(of_pods, "evaluation_return"), [1.5, np.nan, np.nan])


def test_scores_of_a_tournament_are_compared_only_under_one_policy():
    def digest(**changes):
        return Tournament((dataclasses.replace(EXPERIMENT, **changes),)).evaluation

    assert digest() == digest(seed=5)
    assert len({digest(), digest(evaluation_policy="greedy"), digest(evaluation_epsilon=0.1)}) == 3
