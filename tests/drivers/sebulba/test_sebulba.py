"""The Sebulba driver: equal to Anakin in lock-step, reproducible, exact in its accounts."""

import contextlib
import dataclasses
import itertools
import threading
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, SMALL, blueprint, environment_for
from hosts import CounterBatch, Counters, slow
from runs import actor_threads, anakin_setup, sebulba_setup, train_anakin, train_sebulba
from variants import variants

from podracer import recipes
from podracer.agent import Agent
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.devices import memory, mesh
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba import SebulbaConfig, actor_pool, learner, split_devices
from podracer.drivers.sebulba.actor import STAGES
from podracer.drivers.sebulba.actor_pool import ActorPool
from podracer.drivers.sebulba.config import environment_indices
from podracer.drivers.sebulba.supervisor import Supervisor
from podracer.drivers.sebulba.trajectory import ActorFunctions
from podracer.drivers.sebulba.validator import TimestepValidator
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError, EnvironmentFault, NonFiniteError
from podracer.evaluate import make_evaluator
from podracer.fields import struct
from podracer.io.checkpoint import fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.recipes import RECIPES
from podracer.run.training import train
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, LearnerState, TimeStep
from podracer_testing.parity import check_equal, check_parity, optimized


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    assert actor_threads() == []
    assert CounterBatch.open == 0


# --- the golden property -------------------------------------------------------------------------


# By default an agent with a replay on one device, and one without on several.
DEFAULT = [("dqn", 1), ("ppo", 4)]
# Relative tolerances where XLA rounds the two programs otherwise (docs/numerics.md).
ROUNDED = {
    ("td3", 2): 1e-5,
    ("fast_td3", 2): 1e-5,
    ("muzero-planes", 2): 1e-4,
    ("muzero-reanalyze", 1): 1e-3,
    ("disco-gru", 2): 1e-5,
    **dict.fromkeys([("ppo-gtrxl", 2), ("ppo-gtrxl", 4)], 1e-4),  # equal as users compile
}


@variants(("name", "learners"), DEFAULT, itertools.product(AGENTS, (1, 2, 4)))
def test_lock_step_equals_anakin_to_the_bit(name, learners):
    """Every leaf of the state, environments included, and every metric, after ten updates."""
    data = blueprint(AGENTS[name], environment_for(name).spec).context.data
    rtol = ROUNDED.get((name, learners), 0.0)
    check_parity(AGENTS[name], environment_for(name), learners, data=data, rtol=rtol)


@variants(
    ("name", "learners", "config"),
    [("dqn", 1, {"update_pieces": 100})],
    [("ppo", 2, {"update_pieces": 3}),
     ("muzero", 1, {"update_pieces": 1}), ("ppo-gtrxl", 1, {"update_pieces": 100}),
     ("sac", 2, {"update_pieces": 2, "updates_per_batch": 2})],
)  # fmt: skip
def test_an_update_in_pieces_equals_the_whole_one_to_the_bit(name, learners, config):
    """Every leaf of the state and every metric of learning, before and after a replay's warm-up."""
    agent, env = AGENTS[name], DeviceEnvironments(environment_for(name))
    devices = {"devices": 1} if learners == 1 else {"devices": 3, "learners": 2}
    whole = {**devices, **config, "update_pieces": 0, "policy_lag": 0}
    with optimized():
        runs = [train_sebulba(*sebulba_setup(agent, env, **whole | more)) for more in ({}, config)]
    (expected, records), (state, others) = runs
    rtol = 1e-3 if name == "ppo-gtrxl" else 0.0  # where XLA rounds the two otherwise
    check_equal(state, expected, rtol)
    for report, wanted in zip(others, records, strict=True):
        assert report.frames == wanted.frames
        for metric in ("loss", "episode_return", "approx_kl", "q"):
            if wanted.metrics.get(metric) is not None:
                assert report.metrics[metric] == pytest.approx(wanted.metrics[metric], rtol), metric


FUSED = [name for name in RECIPES if getattr(recipes.find(name).driver, "fused", False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_recipe_equals_lock_step_without_its_fused_form(name, tmp_path):
    fields = {"devices": 1, "frames": 8192, "evaluations": 0}
    recipe = dataclasses.replace(recipes.find(name), **fields)
    lag = {"driver": {"policy_lag": 0, "threads_per_actor": 1}}
    anakin_run = recipe.with_fields({"driver": {"fused": False}})
    sebulba_run = recipe.with_arch("sebulba").with_fields(lag)
    with optimized():
        digests = {fingerprint(train(run, run_dir=tmp_path / run.arch).state)
                   for run in (anakin_run, sebulba_run)}  # fmt: skip
    assert len(digests) == 1


def test_both_words_of_a_key_count_in_lock_step():
    """Keys that were split or folded have two; keys of seeds have one."""
    key = jax.random.fold_in(jax.random.key(7), 1)
    anakin, _ = anakin_setup(PPO(network=SMALL))
    sebulba, _ = sebulba_setup(PPO(network=SMALL), make("catch"), policy_lag=0, threads_per_actor=1)
    with optimized():
        expected, _ = train_anakin(anakin, anakin.init(key), 2)
        got, _ = train_sebulba(sebulba, sebulba.init(key), 2)
    check_equal(got.actor.env_state, expected.actor.env_state)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_two_runs_with_one_seed_are_equal_to_the_bit(lag):
    one, _ = train_sebulba(*sebulba_setup(policy_lag=lag))
    two, _ = train_sebulba(*sebulba_setup(policy_lag=lag))
    assert fingerprint(one) == fingerprint(two)


@variants("lag", [3], [0, 1])
def test_lags_are_what_they_are_said_to_be(lag):
    _, progress = train_sebulba(*sebulba_setup(policy_lag=lag))
    # The first `lag` rollouts cannot be that old yet.
    ages = [min(lag, update) for update in range(10)]
    assert [p.metrics["lag_mean"] for p in progress] == [np.mean(ages[:5]), np.mean(ages[5:])]
    assert progress[-1].metrics["lag_max"] == lag


@pytest.mark.parametrize(("lag", "bound"), [(2, 2), (None, 3)])
@pytest.mark.slow
def test_newer_parameters_within_a_rollout_stay_within_the_bound(lag, bound):
    """Without a lag, one trajectory is learned from, one waits in the queue, one is being made."""
    env = Counters(slow(0.001))
    _, progress = train_sebulba(
        *sebulba_setup(env=env, policy_lag=lag, refresh_params="step"), num_updates=20
    )
    assert all(0 <= p.metrics["lag_max"] <= bound for p in progress)


@struct
class Mirror:
    """An agent whose local state is the last trajectory, to look at what a learner receives."""

    def build(self, spec, context):
        def init(key, num_envs):
            length, zeros = context.rollout_length, jax.numpy.zeros
            record = {
                "observation": zeros((num_envs, length + 1, 3)),
                "reward": zeros((num_envs, length + 1)),
                "discount": zeros((num_envs, length + 1)),
                "first": zeros((num_envs, length + 1), bool),
                "last": zeros((num_envs, length + 1), bool),
                "action": zeros((num_envs, length), np.int32),
                "version": zeros((num_envs, length)),
            }
            return LearnerState({"updates": np.float32(0)}, record)

        def act(params, carry, timestep, keys, explore):
            action = jax.vmap(lambda k: jax.random.randint(k, (), 0, 2))(keys)
            version = jax.numpy.broadcast_to(params["updates"], action.shape)
            return action.astype(np.int32), version, carry

        def learn(state, trajectory, key, axis):
            steps = trajectory.timesteps()
            record = {
                name: jax.numpy.moveaxis(getattr(steps, name), 0, 1)
                for name in ("observation", "reward", "discount", "first", "last")
            }
            record["action"] = trajectory.steps.action.T
            record["version"] = trajectory.steps.extras.T
            return LearnerState({"updates": state.shared["updates"] + 1}, record), {}

        return Agent(
            name="Mirror",
            spec=spec,
            init=init,
            act=act,
            learn=learn,
            actor_params=lambda state: state.shared,
        )


def received(driver, state, num_updates):
    """What each update was made from, by environment; and the progress."""
    progress = driver.run(state, Orders(num_updates, lambda update: True))
    with contextlib.closing(progress):
        return [(jax.device_get(p.state.learner.local), p) for p in progress]


def expected_rows(num_envs, length, rollouts):
    """What each environment shows, from a slow loop: timesteps `[rollouts * length + 1]` a row."""
    shown = []
    for index in range(num_envs):
        batch = CounterBatch(1, None)
        timesteps = [batch.reset(7, [index], 0)]
        timesteps += [batch.step(np.zeros(1, np.int32)) for _ in range(rollouts * length)]
        batch.close()
        shown.append(jax.tree.map(lambda *x: np.concatenate(x), *timesteps))
    return shown


@variants(
    ("devices", "threads", "learners", "lag"),
    [(1, 1, 1, 0), (5, 2, 4, 1)],
    [
        (*split, lag)
        for split in ((1, 1, 1), (1, 4, 1), (4, 2, 2), (5, 2, 4), (6, 1, 4))
        for lag in (0, 1)
    ],
)
def test_learners_receive_what_environments_showed_in_the_order_of_their_numbers(
    devices, threads, learners, lag
):
    driver, state = sebulba_setup(
        Mirror(), devices=devices, threads_per_actor=threads, policy_lag=lag, updates_per_chunk=1,
        learners=0 if devices == 1 else learners,
    )  # fmt: skip
    rows = expected_rows(16, 8, 3)
    for update, (record, _) in enumerate(received(driver, state, num_updates=3)):
        window = slice(8 * update, 8 * update + 9)  # each begins with what ended the one before
        for row, want in enumerate(rows):
            for name in ("observation", "reward", "discount", "first", "last"):
                np.testing.assert_array_equal(record[name][row], getattr(want, name)[window], name)
        assert (record["version"] == max(0, update - lag)).all()


def test_a_batch_can_be_learned_from_in_parts():
    """N sequential updates of a batch: the agent's counter says N for each batch."""
    state, _ = train_sebulba(*sebulba_setup(Mirror(), updates_per_batch=4), num_updates=5)
    assert float(state.learner.shared["updates"]) == 20
    assert int(state.update) == 5
    whole, _ = train_sebulba(*sebulba_setup(Mirror()), num_updates=5)
    for name, value in whole.learner.local.items():
        if name != "version":
            np.testing.assert_array_equal(value, state.learner.local[name], name)


def test_numbers_of_environments_cover_all_hosts_once():
    for hosts, learners, threads in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4)):
        config = SebulbaConfig(num_envs=32, threads_per_actor=threads, actors=1, learners=learners)
        split = split_devices(jax.devices()[: learners + 1], config)
        numbers = [
            environment_indices(split, thread, host)
            for host in range(hosts)
            for thread in range(threads)
        ]
        assert sorted(np.concatenate(numbers)) == list(range(hosts * 32))


# --- the programs --------------------------------------------------------------------------------


def test_environments_that_replace_what_hangs_do_so_before_the_drivers_deadline():
    class Replacing(Counters):
        def with_deadline(self, seconds):
            deadlines.append(seconds)
            return Counters()

    deadlines, config = [], SebulbaConfig(4, 3, env_timeout_seconds=7.0)
    split = split_devices(jax.devices()[:1], config)
    with Supervisor(config.env_timeout_seconds) as supervisor:
        actor_pool.make_environments(Replacing(), split, config, "actor 0", supervisor).close()
    assert deadlines == [7.0]


@pytest.mark.slow
def test_actors_are_sent_buffers_that_the_next_update_does_not_take():
    """The learner donates its state while the actors' parameters still travel."""
    driver, state = sebulba_setup(env=DeviceEnvironments(make("catch")))
    published = []
    publish = ActorPool.publish

    def keep(actors, params, version):
        published.append((version, params, jax.device_get(params)))
        publish(actors, params, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActorPool, "publish", keep)
        train_sebulba(driver, state, num_updates=10)
    assert len(published) == 12
    for _, params, value in published:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), value)


def test_an_update_that_would_not_fit_does_not_run(monkeypatch):
    """What it needs beside its state is known once it is compiled."""
    driver, _ = sebulba_setup()
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1000)
    with pytest.raises(ConfigError, match=r"beside its state, but 1000 B are free"):
        driver.lower()()


def test_images_stay_bytes_until_they_are_in_the_network():
    spec = EnvironmentSpec("pictures", ArraySpec((84, 84, 4), np.uint8), Discrete(6))
    agent = Impala(network=TorsoNetwork(MLP((4,)))).build(spec)
    learner = jax.eval_shape(lambda: agent.init(jax.random.key(0), 2))
    functions = ActorFunctions(agent, 2, 5, learner)
    buffer, start = functions.begin_shapes
    assert [x.dtype for x in buffer.large] == [np.uint8]
    inputs = functions.layout.zeros(2)
    _, shards = jax.eval_shape(partial(functions.finish, 1), buffer, start, *inputs)
    assert shards[0].trajectory.steps.timestep.observation.dtype == np.uint8


def test_evaluation_on_the_host_plays_each_environment_once():
    """Greedy, from a reset of its own, every row's first episode and nothing more."""
    env = Counters()
    agent = Impala(network=SMALL).build(env.spec)
    state = agent.init(jax.random.key(0), 8)
    result = make_evaluator(agent, env, 8)(agent.actor_params(state), jax.random.key(1))
    assert list(result.lengths) == [3 + i % 4 for i in range(8)]
    assert list(result.returns) == [3 + i % 4 for i in range(8)]
    assert result.unfinished == 0
    short = make_evaluator(agent, env, 8, max_steps=4)
    assert short(agent.actor_params(state), jax.random.key(1)).unfinished == 4


# --- episodes, data and accounts -----------------------------------------------------------------


def test_episode_statistics_are_those_of_the_environments():
    _, progress = train_sebulba(*sebulba_setup(), num_updates=20)
    lengths, returns = [], []
    for want in expected_rows(16, 8, 20):
        ends = np.flatnonzero(want.last)
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths += list(ends - starts)
        returns += [want.reward[a : b + 1].sum() for a, b in zip(starts, ends, strict=True)]
    episodes = sum(p.metrics["episodes"] for p in progress)
    assert episodes == len(lengths)
    total = sum(p.metrics["episodes"] * p.metrics["episode_return"] for p in progress)
    assert total == pytest.approx(sum(returns))
    valid = sum((~want.last[:-1]).sum() for want in expected_rows(16, 8, 20))
    assert sum(p.frames for p in progress) == valid


def poison(where, value):
    """Trouble: at its 3rd step, row 2 shows what must not train; its episode lasts 5."""

    def trouble(batch, timestep):
        if batch.steps == 3:
            getattr(timestep, where)[2] = value
        return timestep

    return trouble


@pytest.mark.figure(8)
@variants(
    ("where", "value"),
    [("observation", np.nan), ("reward", np.nan)],
    [("observation", np.inf), ("discount", np.nan)],
)
def test_bad_rows_are_counted_and_never_train(where, value):
    driver, state = sebulba_setup(
        Mirror(), Counters(poison(where, value)), threads_per_actor=1, updates_per_chunk=1
    )
    (record, progress), _ = received(driver, state, num_updates=2)
    assert progress.metrics["environment_faults"] == 1
    assert progress.metrics["environment_faults_not_finite"] == 1
    assert all(np.isfinite(record[name]).all() for name in ("observation", "reward", "discount"))


def test_a_bad_row_of_bfloat16_is_masked():
    space = ArraySpec((3,), jnp.dtype(jnp.bfloat16))
    validator = TimestepValidator(EnvironmentSpec("half", space, Discrete(2)), np.zeros(2, bool))
    observation, zeros = np.zeros((2, 3), space.dtype), np.zeros(2, np.float32)
    observation[1, 0] = np.nan
    timestep = TimeStep(observation, zeros, zeros, zeros == 0, zeros > 0)
    assert validator.validate(timestep).last.tolist() == [False, True]
    assert validator.faults == {"not_finite": 1}


@pytest.mark.figure(8)
@pytest.mark.parametrize("where", ["observation", "reward"])
def test_a_run_without_a_valid_step_ends_with_its_fault(where, caplog):
    def trouble(batch, timestep):
        getattr(timestep, where)[:] = np.nan
        return timestep

    driver, state = sebulba_setup(env=Counters(trouble), updates_per_chunk=2, threads_per_actor=1)
    with pytest.raises(EnvironmentFault, match="4: not one of the last 32 steps of") as caught:
        train_sebulba(driver, state, num_updates=6)
    fault = f"row 0 of the batch: {where} is not finite"
    assert str(caught.value).endswith(
        f"after 512 faults. The first of each kind: `not_finite`, {fault}."
    )
    assert caught.value.exit_code == 72
    assert caplog.messages == [f"the first fault `not_finite` in training, {fault}"]


@pytest.mark.figure(8)
@pytest.mark.parametrize("limit", [100_000, 40])
def test_faults_now_and_then_in_a_long_episode_end_no_run(limit, monkeypatch):
    """One masks the episode, in all rows here, and a second one falls into what is left of it; only
    an episode that seems to have no end ends the run."""
    monkeypatch.setattr(learner, "EMPTY_EPISODE", limit)

    def trouble(batch, timestep):
        if batch.steps in (17, 50):  # the first leaves no valid step in a whole report
            timestep.reward[:] = np.nan
        first, last = (np.full(batch.num_envs, batch.steps == n) for n in (106, 105))
        discount = np.ones_like(timestep.discount)
        return dataclasses.replace(timestep, discount=discount, first=first, last=last)

    driver, state = sebulba_setup(env=Counters(trouble), updates_per_chunk=2, threads_per_actor=1)
    with pytest.raises(EnvironmentFault) if limit == 40 else contextlib.nullcontext():
        _, reports = train_sebulba(driver, state, num_updates=16)
        assert [report.frames > 0 for report in reports] == [True, *[False] * 5, True, True]
        assert reports[-1].metrics["environment_faults"] == 32


@pytest.mark.figure(8)
def test_the_broken_episode_is_cut_and_the_others_are_undisturbed():
    driver, state = sebulba_setup(
        Mirror(), Counters(poison("reward", np.nan)), threads_per_actor=1, updates_per_chunk=1
    )
    record, _ = received(driver, state, num_updates=1)[0]
    for row, want in enumerate(expected_rows(16, 8, 1)):
        if row != 2:
            np.testing.assert_array_equal(record["observation"][row], want.observation)
            np.testing.assert_array_equal(record["last"][row], want.last)
    # Row 2: 0 1 2 | 3 4 5 are lost, until the next episode begins.
    assert np.isfinite(record["reward"][2]).all()
    want = expected_rows(16, 8, 1)[2]
    begins = 3 + int(np.argmax(want.first[4:])) + 1
    assert begins == 6
    assert not record["last"][2][:2].any()
    assert record["last"][2][2:begins].all()  # masked: nothing of it trains
    assert record["first"][2][begins]
    np.testing.assert_array_equal(record["observation"][2][begins:], want.observation[begins:])


def change(where, make_value):
    def trouble(batch, timestep):
        if batch.steps == 3:
            return dataclasses.replace(timestep, **{where: make_value(getattr(timestep, where))})
        return timestep

    return trouble


@pytest.mark.figure(8)
@variants(
    ("where", "make_value", "message"),
    [
        ("observation", lambda x: {"a": x}, "observation must be"),
        ("reward", lambda x: x[:3], r"reward must be float32\[8\], but it became float32\[3\]"),
    ],
    [
        ("observation", lambda x: x[:, :2], r"observation must be float32\[8, 3\]"),
        ("observation", lambda x: x.astype(np.float64), "but it became float64"),
        ("observation", lambda x: None, "observation must be"),
        ("reward", lambda x: x.astype(np.int32), r"reward must be float32\[8\]"),
        ("last", lambda x: x.astype(np.float32), r"last must be bool\[8\]"),
    ],
)
def test_data_of_another_kind_ends_the_run_in_one_sentence(where, make_value, message):
    with pytest.raises(EnvironmentFault, match=message) as fault:
        train_sebulba(*sebulba_setup(env=Counters(change(where, make_value))), num_updates=10)
    assert fault.value.component.startswith("actor")


def test_environments_that_do_not_restart_are_named():
    def trouble(batch, timestep):
        return dataclasses.replace(timestep, first=np.zeros(batch.num_envs, bool))

    with pytest.raises(ConfigError, match=r"counter: .* no new episode begins"):
        train_sebulba(*sebulba_setup(env=Counters(trouble)), num_updates=10)


@pytest.mark.figure(11)
def test_accounts_close_and_memory_is_bounded_when_the_learner_is_slow():
    """Collected is learned plus in flight, and no more is in flight than the queues hold."""
    driver, state = sebulba_setup(policy_lag=None, queue_depth=2, updates_per_chunk=1)
    progress = driver.run(state, Orders(30))
    steps = 16 * 8
    with contextlib.closing(progress):
        for p in progress:
            in_flight = p.collected - p.updates * steps
            # Each actor: two in its queue, and one that waits for room.
            assert 0 <= in_flight <= 3 * steps


def test_a_learner_whose_device_computes_is_not_idle():
    """In lock-step its thread collects all that time, and does not wait for trajectories."""
    agent = PPO(num_epochs=50, num_minibatches=1, network=TorsoNetwork(MLP((256, 256))))
    _, reports = train_sebulba(*sebulba_setup(agent, policy_lag=0), num_updates=5)
    metrics = reports[-1].metrics
    assert 0.0 < metrics["learner_idle"] < 0.5 < metrics["actor_idle"]
    stages = [metrics[f"learner_time_{stage}"] for stage in ("collect", "learn")]
    assert metrics["learner_idle"] == pytest.approx(stages[0] / sum(stages))


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("is_in_turn", [True, False])
def test_waits_for_an_update_on_the_shared_device_are_a_stage(is_in_turn, monkeypatch):
    """A CPU, which infers beside an update, is made to take turns as an accelerator does."""
    monkeypatch.setattr(mesh, "in_turn", lambda device: is_in_turn)
    agent = PPO(num_epochs=50, num_minibatches=1, network=TorsoNetwork(MLP((256, 256))))
    _, reports = train_sebulba(*sebulba_setup(agent), num_updates=5)
    metrics = reports[-1].metrics
    seconds = {name: metrics[f"actor_time_{name}"] for name in STAGES}
    assert (seconds["device"] > 0) == is_in_turn
    # An action waits there, not in the copy: an update takes longer than all copies together.
    assert (seconds["device"] > seconds["transfer"]) == is_in_turn


@pytest.mark.parametrize(
    ("platform", "actors", "threads"),
    [
        ("cpu", 1, 16), ("cpu", 2, 8), ("cpu", 4, 4), ("cpu", 32, 1),
        ("gpu", 1, 16), ("gpu", 2, 16), ("gpu", 4, 8), ("tpu", 16, 2), ("gpu", 64, 1),
    ],
)  # fmt: skip
def test_beside_an_accelerator_actors_have_two_threads_for_each_core(
    platform, actors, threads, monkeypatch
):
    monkeypatch.setattr(actor_pool, "num_cores", lambda: 16)
    split = types.SimpleNamespace(actors=[types.SimpleNamespace(platform=platform)], threads=actors)
    assert actor_pool.native_threads(SebulbaConfig(), split) == threads
    assert actor_pool.native_threads(SebulbaConfig(env_threads=3), split) == 3


@pytest.mark.figure(21)
@pytest.mark.slow
def test_others_do_not_wait_for_an_actor_that_is_slow_or_stands_still():
    """Without a bound on the lag; the actor that stands still holds 2 of 16 environments."""
    end = threading.Event()

    def trouble(batch, timestep):
        if 0 in batch.indices:
            end.wait(60)
        return timestep

    driver, state = sebulba_setup(env=Counters(trouble), policy_lag=None, threads_per_actor=8)
    progress = driver.run(state, Orders(20))
    with contextlib.closing(progress):
        for p in progress:
            assert p.collected >= p.updates * 16 * 8
            if p.updates == 20:
                end.set()
    assert p.updates == 20


def test_what_the_learner_keeps_for_each_environment_stays_in_its_row():
    """So there every actor has a queue of its own, and an update takes a rollout of each."""
    for agent, shared in ((Impala(network=SMALL), True), (AGENTS["dqn"], False)):
        driver, state = sebulba_setup(agent, policy_lag=None)
        queues = actor_pool.rollout_queues(driver.config, driver.split.threads, state)
        assert (queues[0] is queues[1]) == shared


@pytest.mark.figure(21)
@pytest.mark.parametrize("num_actors", [2, 8])
def test_a_slow_actor_is_named_once(num_actors, caplog):
    stragglers = actor_pool.Stragglers()
    for number in range(60):
        for actor in range(num_actors):
            stragglers.record(f"actor {actor}", 1.0 if actor == 1 else 0.1)
        assert len(caplog.records) == (number > 33)  # half a minute of it
    [record] = caplog.records
    assert "actor 1 are 10 times slower than other actors', 1 s for" in record.getMessage()


@pytest.mark.figure(9)
@pytest.mark.parametrize(
    ("config", "update"), [({}, 4), ({"updates_per_batch": 2, "update_pieces": 2}, 2)]
)
def test_an_update_that_is_not_finite_is_never_applied(config, update):
    @struct
    class Bad:
        def build(self, spec, context):
            mirror = Mirror().build(spec, context)

            def learn(*args):
                state, _ = mirror.learn(*args)
                loss = jax.numpy.where(state.shared["updates"] == 4, jax.numpy.nan, 0.0)
                return state, {"loss": loss}

            return dataclasses.replace(mirror, learn=learn)

    with pytest.raises(NonFiniteError, match=f"update {update}: not finite: loss"):
        train_sebulba(*sebulba_setup(Bad(), **config), num_updates=10)


# --- stopping and going on -----------------------------------------------------------------------


def test_lock_step_goes_on_to_the_bit():
    env = DeviceEnvironments(make("catch"))
    whole, _ = train_sebulba(*sebulba_setup(env=env, policy_lag=0), num_updates=20)
    driver, state = sebulba_setup(env=env, policy_lag=0)
    half, _ = train_sebulba(driver, state, num_updates=10)
    rest, _ = train_sebulba(driver, half, num_updates=20)
    assert fingerprint(rest) == fingerprint(whole)


@pytest.mark.figure(11)
@pytest.mark.slow
def test_other_runs_go_on_with_new_episodes_and_exact_counters():
    seeds = []

    def trouble(batch, timestep):
        if batch.steps == 1:
            seeds.append(batch.seeds)
        return timestep

    driver, state = sebulba_setup(env=Counters(trouble))
    half, _ = train_sebulba(driver, state, num_updates=10)
    assert half.actor == ()
    rest, progress = train_sebulba(driver, half, num_updates=20)
    assert int(rest.update) == 20
    assert [p.updates for p in progress] == [15, 20]
    assert len(set(seeds)) == 4  # two threads, begun twice: no seed stream twice
    assert {start for _, _, start in seeds} == {0, 80}


def test_a_stop_comes_after_the_update_at_hand():
    driver, state = sebulba_setup(updates_per_chunk=1000)
    answers = itertools.chain([0] * 7, itertools.repeat(2))
    orders = Orders(1000, request=lambda: next(answers))
    progress = driver.run(state, orders)
    with contextlib.closing(progress):
        p = next(progress)
    assert p.request == 2
    assert p.updates < 10
    assert int(p.state.update) == p.updates


def test_a_boundary_state_survives_what_comes_after():
    """The state of a boundary is given away until the iterator moves on."""
    driver, state = sebulba_setup()
    progress = driver.run(state, Orders(10, lambda updates: True))
    with contextlib.closing(progress):
        before = fingerprint(next(progress).state)
        assert fingerprint(next(progress).state) != before


# --- what cannot run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "config", "message"),
    [
        (1, {"learners": 2}, "more than the one device"),
        (2, {"actors": 2}, "do not fit the 2 devices"),
        (4, {"actors": 3, "learners": 2}, "do not fit the 4 devices"),
        (4, {"num_envs": 6, "threads_per_actor": 4}, "take 16|take 12|take 8"),
        (4, {"learners": 3, "threads_per_actor": 1}, "take 15 or 18"),
        (1, {"updates_per_batch": 3}, "does not divide the 16"),
        (1, {"rollout_length": 10**8}, "two rollouts of 16 environments .* are free"),
    ],
)
def test_what_does_not_fit_is_one_sentence(devices, config, message):
    with pytest.raises(ConfigError, match=message):
        sebulba_setup(devices=devices, **config)


@pytest.mark.parametrize(
    ("devices", "num_envs", "actors", "learners"),
    [(1, 16, 1, 1), (2, 16, 1, 1), (4, 24, 1, 3), (4, 16, 2, 2), (8, 96, 2, 6), (8, 64, 4, 4)],
)
def test_devices_are_split_without_being_asked(devices, num_envs, actors, learners):
    split = split_devices(jax.devices()[:devices], SebulbaConfig(num_envs=num_envs))
    assert (len(split.actors), len(split.learners)) == (actors, learners)
    assert devices == 1 or not set(split.actors) & set(split.learners)
