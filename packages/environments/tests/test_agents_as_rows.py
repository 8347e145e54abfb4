"""Agents of one environment as rows of the batch."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import PROBE_AGENTS, SMALL
from pages import blocks
from runs import anakin_setup, sebulba_setup, train_anakin, train_sebulba

import podracer
from podracer.agents.impala import Impala
from podracer.envs.host.device import DeviceEnvironments
from podracer.evaluate import make_evaluator
from podracer.rollout import count_episodes, zero_episode_stats
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep, Trajectory
from podracer_environments.agents import agents_as_rows

LIMIT = 6


@podracer.struct
class HuntState:
    health: jax.Array  # i32 [n], 0 for the dead
    time: jax.Array  # i32


@dataclasses.dataclass(frozen=True)
class Hunt:
    """Three agents who may rest (0) or hunt (1), paid 3 for the first and 2, 1 for the others.

    Agent i can hunt i + 1 times, and then dies; after six steps the game is over for all.
    """

    timeout: bool = True
    spec = EnvironmentSpec("hunt", ArraySpec((5,)), Discrete(2))

    def reset(self, key):
        state = HuntState(jnp.arange(1, 4), jnp.int32(0))
        return state, jax.vmap(podracer.restart)(self.observe(state))

    def step(self, key, state, actions):
        hunts = (actions == 1) & (state.health > 0)
        health, time = state.health - hunts, state.time + 1
        state = HuntState(health, time)
        reward = jnp.where(hunts, jnp.arange(3.0, 0.0, -1.0), 0.0)
        is_dead, is_late = health == 0, jnp.broadcast_to(time >= LIMIT, (3,))
        terminal = is_dead if self.timeout else is_dead | is_late
        timestep = jax.vmap(podracer.transition)(
            self.observe(state), reward, terminal=terminal, timeout=is_late & self.timeout
        )
        return state, timestep

    def observe(self, state):
        agent, time = jnp.eye(3), jnp.full((3, 1), state.time / LIMIT)
        return jnp.concatenate([agent, state.health[:, None].astype(jnp.float32), time], axis=1)


class MaskedHunt(Hunt):
    """Hunt in which the dead have no action."""

    spec = EnvironmentSpec(
        "hunt",
        {"observation": ArraySpec((5,)), "action_mask": ArraySpec((2,), bool)},
        Discrete(2),
    )

    def observe(self, state):
        mask = jnp.broadcast_to(state.health[:, None] > 0, (3, 2))
        return {"observation": super().observe(state), "action_mask": mask}


def play(env, actions):
    """Timesteps `[T+1, 3]` of one game with actions `[T, 3]`."""
    keys = jax.random.split(jax.random.key(0), 3)
    state, timestep = jax.vmap(env.reset)(keys)
    timesteps = [timestep]
    for action in actions:
        state, timestep = jax.vmap(env.step)(keys, state, jnp.asarray(action))
        timesteps.append(timestep)
    return jax.device_get(jax.tree.map(lambda *x: jnp.stack(x), *timesteps))


def test_the_dead_are_cut_until_the_game_begins_again():
    timesteps = play(agents_as_rows(Hunt(), 3), [[1, 0, 1]] * 8)
    # Agent 0 dies in step 1, agent 2 in step 3; agent 1 rests until the limit in step 6.
    assert timesteps.reward.T.tolist() == [
        [0, 3, 0, 0, 0, 0, 0, 0, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert timesteps.discount.T.tolist() == [
        [1, 0, 1, 1, 1, 1, 1, 1, 0],
        [1] * 9,
        [1, 1, 1, 0, 1, 1, 1, 1, 1],
    ]
    assert timesteps.last.T.astype(int).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
    ]
    assert timesteps.first.T.astype(int).tolist() == [
        [1, 0, 1, 1, 1, 1, 1, 1, 0],
        [1, 0, 0, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1, 1, 1, 1, 0],
    ]


def test_the_dead_may_be_without_an_action():
    rows = agents_as_rows(MaskedHunt(), 3)
    for env in (rows, rows.for_evaluation()):
        timesteps = play(env, [[1, 0, 1]] * 8)
        assert (timesteps.observation["action_mask"].any(axis=-1) | timesteps.last).all()


def test_a_game_that_ends_with_terminals_restarts_in_the_same_step():
    timesteps = play(agents_as_rows(Hunt(), 3), [[1, 1, 1]] * 4)
    assert timesteps.discount[3].tolist() == [1, 1, 0]
    assert timesteps.reward[3].tolist() == [0, 0, 1]
    assert timesteps.first[3].all()
    assert not timesteps.last[3].any()
    assert timesteps.observation[3, :, 3].tolist() == [1, 2, 3]


def test_episodes_and_valid_steps_are_those_of_the_living():
    timesteps = play(agents_as_rows(Hunt(), 3), [[1, 0, 1]] * 14)
    steps = jax.tree.map(lambda x: jnp.asarray(x[:-1]), timesteps)
    final = jax.tree.map(lambda x: jnp.asarray(x[-1]), timesteps)
    trajectory = Trajectory(Step(steps, (), ()), final, (), ())
    stats = count_episodes(zero_episode_stats(3), trajectory)
    assert stats.count.tolist() == [2, 2, 2]
    assert stats.total_return.tolist() == [6, 0, 6]
    assert stats.total_length.tolist() == [2, 12, 6]
    assert trajectory.valid().sum(axis=0).tolist() == [2, 12, 6]


def test_an_evaluation_plays_games_to_their_end_and_returns_are_of_teams():
    env = agents_as_rows(Hunt(), 3)
    timesteps = play(env.for_evaluation(), [[1, 0, 1]] * 7)
    assert (timesteps.reward == timesteps.reward[:, :1]).all()
    assert timesteps.reward.sum(axis=0).tolist() == pytest.approx([2.0] * 3)
    assert timesteps.last.sum(axis=0).tolist() == [1, 1, 1]
    agent = Impala(network=SMALL).build(env.spec)
    params = agent.actor_params(agent.init(jax.random.key(0), 6))
    played = make_evaluator(agent, env, 6, policy="sampled")(params, jax.random.key(1))
    games = played.returns.reshape(2, 3)
    assert (games == games[:, :1]).all()
    with pytest.raises(podracer.ConfigError, match=r"hunt: the 4 rows .* take a multiple of 3 env"):
        make_evaluator(agent, env, 4)(params, jax.random.key(1))


@pytest.mark.parametrize("timeout", [True, False])
def test_both_drivers_compute_the_same(timeout):
    env = agents_as_rows(Hunt(timeout), 3)
    agent = Impala(network=SMALL)
    sizes = {"num_envs": 12, "rollout_length": 8}
    anakin, _ = train_anakin(*anakin_setup(agent, env, **sizes), 5)
    parts = sebulba_setup(agent, DeviceEnvironments(env), policy_lag=0, **sizes)
    sebulba, _ = train_sebulba(*parts, num_updates=5)
    for a, b in zip(*map(jax.tree.leaves, (anakin.learner, sebulba.learner)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert podracer.check_environment(env).usable


PAGE = Path(__file__).parents[1] / "README.md"


def test_rows_of_a_team_play_one_game():
    page = {}
    exec(blocks(PAGE)[0].code.partition("\n\npodracer.train(")[0], page)  # the game of the page
    env = agents_as_rows(page["Meeting"](), 2)
    podracer.check_environment(env)
    rows = jax.random.split(jax.random.key(0), 6)
    state, timestep = jax.vmap(env.reset)(rows)
    actions = jnp.asarray([0, 1, 2, 2, 1, 0])
    ends = 0
    for t in range(30):
        positions = timestep.observation[:, :7].argmax(-1)
        keys = jax.random.split(jax.random.key(t), 6)
        state, timestep = jax.vmap(env.step)(keys, state, actions)
        games = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), timestep)
        for signal in (games.reward, games.discount, games.first, games.last):
            assert (signal[:, 0] == signal[:, 1]).all()
        places, teammates = jnp.split(games.observation, 2, axis=-1)
        assert (places == teammates[:, ::-1]).all()
        moved = timestep.observation[:, :7].argmax(-1)
        assert ((moved == jnp.clip(positions + actions - 1, 0, 6)) | timestep.first).all()
        ends += int(timestep.first.sum())
    assert ends
    with pytest.raises(podracer.ConfigError, match="5 rows of a batch cannot be shared by games"):
        jax.vmap(env.reset)(rows[:5])


# --- a critic for all ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two agents who act by a cue of their own, 1 or -1; both get the sum of the cues besides."""

    spec = EnvironmentSpec(
        "pair",
        {"own": ArraySpec((1,)), "all": ArraySpec((2,))},
        Discrete(2),
        groups={"actor": ("own",), "critic": ("all",)},
    )

    def reset(self, key):
        cues = jax.random.rademacher(key, (2,), jnp.float32)
        return cues, jax.vmap(podracer.restart)(self.observe(cues))

    def step(self, key, cues, actions):
        fit = jnp.where((actions == 1) == (cues > 0), 1.0, -1.0)
        terminal = jnp.ones(2, bool)
        step = jax.vmap(lambda *x: podracer.transition(x[0], x[1], terminal=x[2]))
        return cues, step(self.observe(cues), fit + cues.sum(), terminal)

    def observe(self, cues):
        return {"own": cues[:, None], "all": jnp.broadcast_to(cues, (2, 2))}


def test_a_critic_sees_what_all_agents_of_a_game_see_together():
    env = agents_as_rows(Pair(), 2)
    driver, state = anakin_setup(PROBE_AGENTS["ppo"], env, num_envs=32, updates_per_chunk=50)
    agent, learner = driver.agent, train_anakin(driver, state, 200)[0].learner
    cues = jnp.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    ones, keys = jnp.ones(4), jax.random.split(jax.random.key(0), 4)
    timestep = TimeStep({"own": cues[:, :1], "all": cues}, 0 * ones, ones, ones > 0, ones < 0)
    action, extras, _ = agent.act(agent.actor_params(learner), (), timestep, keys, False)
    assert action.tolist() == [1, 1, 0, 0]
    np.testing.assert_allclose(extras["value"], 1 + cues.sum(1), atol=0.15)
    assert agent.policy_spec.observation == {"own": ArraySpec((1,))}
