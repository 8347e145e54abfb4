"""Games of two players by self-play: whose reward and value a number is, opponents, and a proof
that a trained policy never loses. Needs pgx."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import methods_of, slow

from podracer.agent import Blueprint
from podracer.agents.muzero import MuZero
from podracer.agents.planning.gumbel import next_discount
from podracer.checks import check_agent, check_environment
from podracer.environment import evaluation_environment
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.ops.returns import lambda_returns
from podracer.types import ACTION_MASK, EnvironmentSpec, TimeStep
from podracer_games.alphazero import AlphaZero
from podracer_games.board import SelfPlay

pgx = pytest.importorskip("pgx")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of pgx, when it is imported
    pytest.mark.usefixtures("lenient_ranks"),
]

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@functools.cache
def random_games(name: str, steps: int, num: int) -> Any:
    """Timesteps `[steps + 1, num]` and the random legal actions between them `[steps, num]`."""
    env, rng = make(name), np.random.default_rng(0)
    step = jax.jit(jax.vmap(env.step))
    state, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num))
    timesteps, actions = [timestep], []
    for t in range(steps):
        legal = np.asarray(timestep.observation[ACTION_MASK])
        actions.append(np.argmax(legal * rng.uniform(0.1, 1, legal.shape), -1).astype(np.int32))
        keys = jax.random.split(jax.random.key(t + 1), num)
        state, timestep = step(keys, state, actions[-1])
        timesteps.append(timestep)
    return jax.tree.map(lambda *x: jnp.stack(x), *timesteps), np.stack(actions)


def wins(stones: np.ndarray) -> bool:
    """Whether the stones, bool `[9]`, have a line."""
    return any(stones[list(line)].all() for line in LINES)


@functools.cache
def solve(own: frozenset[int], other: frozenset[int]) -> int:
    """The outcome of perfect play for the player who moves: 1, 0 or -1."""
    if any(set(line) <= other for line in LINES):
        return -1
    empty = set(range(9)) - own - other
    return max((-solve(other, own | {a}) for a in empty), default=0)


def test_the_turn_passes_with_every_move_and_a_reward_is_the_movers():
    timesteps, actions = random_games("game:tic_tac_toe,opponent=self", 20, 32)
    board = np.asarray(timesteps.observation["board"]).reshape(21, 32, 9, 2)
    reward, discount = np.asarray(timesteps.reward), np.asarray(timesteps.discount)
    ends = 0
    for t in range(20):
        for b in range(32):
            own, other = board[t, b, :, 0].copy(), board[t, b, :, 1]
            own[actions[t, b]] = True
            over = wins(own) or (own | other).all()
            assert reward[t + 1, b] == wins(own)
            assert discount[t + 1, b] == (0 if over else -1)
            if not over:  # the next player sees the mover's stones as the other's
                np.testing.assert_array_equal(board[t + 1, b, :, 1], own)
                np.testing.assert_array_equal(board[t + 1, b, :, 0], other)
            ends += over
    assert ends > 32


def test_a_return_is_the_games_outcome_for_the_player_who_moves():
    """The winner's moves are worth 1 and the loser's -1, all the way back to the first one."""
    timesteps, _ = random_games("game:tic_tac_toe,opponent=self", 20, 32)
    zeros, valid = jnp.zeros((20, 32)), jnp.ones((20, 32), bool)
    returns = lambda_returns(zeros, zeros, timesteps.reward[1:], timesteps.discount[1:], valid, 1.0)
    ended = np.asarray(timesteps.discount)[1:] == 0
    for b in range(32):
        length = int(ended[:, b].argmax()) + 1
        outcome = float(timesteps.reward[length, b])
        expected = [outcome * (-1) ** (length - 1 - t) for t in range(length)]
        np.testing.assert_array_equal(np.asarray(returns)[:length, b], expected)


@pytest.mark.slow
def test_minimax_finds_the_values_of_a_solver():
    """With at most three empty places, three moves ahead are the whole game."""
    from podracer_games.opponents import action_values

    game = pgx.make("tic_tac_toe")
    values = jax.jit(functools.partial(action_values, game, plies=3))
    for order in ([4, 0, 8, 2, 1, 7], [0, 1, 4, 8, 2, 6], [1, 0, 2, 5, 3, 4, 7]):
        state = game.init(jax.random.key(0))
        for action in order:
            state = game.step(state, action)
        own, other = (frozenset(order[len(order) % 2 + k :: 2]) for k in (0, 1))
        own, other = (
            frozenset(order[len(order) % 2 :: 2]),
            frozenset(order[1 - len(order) % 2 :: 2]),
        )
        expected = [-np.inf if a in own | other else -solve(other, own | {a}) for a in range(9)]
        np.testing.assert_array_equal(values(state), expected)


@pytest.mark.parametrize("game", ["tic_tac_toe", slow("connect_four"), slow("go_9x9")])
def test_keeps_the_contract(game):
    name = f"game:{game}"
    env = make(name)
    assert check_environment(env).name == name
    assert env == make(f"pgx:{game}")  # its name in runs of before
    assert hash(env) == hash(make(name))


def test_games_are_won_lost_and_drawn_against_an_opponent():
    """Rewards come once a game, at its end."""
    timesteps, _ = random_games("game:tic_tac_toe", 40, 128)
    reward, discount = np.asarray(timesteps.reward), np.asarray(timesteps.discount)
    assert set(np.unique(reward)) == {-1.0, 0.0, 1.0}
    assert (reward[discount == 1] == 0).all()
    # The board before our move is empty, or has one stone of the other, when a game begins.
    boards = np.asarray(timesteps.observation["board"])[np.asarray(timesteps.first)]
    assert set(np.unique(boards.reshape(len(boards), -1).sum(-1))) == {0, 1}


def test_self_play_is_evaluated_against_the_opponent_also_where_the_state_is_shown():
    for name in ("game:tic_tac_toe", "model:game:tic_tac_toe"):
        env = make(f"{name},opponent=self,evaluate_against=minimax-2")
        evaluation = evaluation_environment(env)
        inner = getattr(evaluation, "environment", evaluation).inner
        assert inner.opponent is make("game:tic_tac_toe,opponent=minimax-2").inner.opponent
        assert env.spec.takes_turns
        shapes = [jax.tree.map(jnp.shape, e.reset(jax.random.key(0))) for e in (env, evaluation)]
        assert shapes[0] == shapes[1]


def test_games_of_self_play_begin_with_random_moves_that_end_none():
    env = make("game:tic_tac_toe,opponent=self,opening_moves=4")
    keys = jax.random.split(jax.random.key(0), 512)
    stones = {
        name: np.asarray(jax.vmap(each.reset)(keys)[1].observation["board"]).reshape(512, 9, 2)
        for name, each in (("training", env), ("evaluation", evaluation_environment(env)))
    }
    assert set(stones["evaluation"].sum((1, 2))) == {0, 1}  # the opponent may have begun
    made = np.bincount(stones["training"].sum((1, 2)))
    np.testing.assert_allclose(made / 512, 1 / 5, atol=0.06)
    assert len(np.unique(stones["training"], axis=0)) > 100  # 9 * 8 * 7 * 6 orders, fewer boards

    full = make("game:tic_tac_toe,opponent=self,opening_moves=9").reset
    boards = np.asarray(jax.vmap(full)(keys)[1].observation["board"]).reshape(512, 9, 2)
    assert not any(wins(board[:, player]) for board in boards for player in (0, 1))
    assert boards.sum((1, 2)).max() == 8
    for number, words in (
        ("2.5", "be a whole number"),
        ("true", "be a whole number"),
        ("-1", "be at least 0"),
    ):
        with pytest.raises(ConfigError, match=f"opening_moves must {words}"):
            make(f"game:tic_tac_toe,opponent=self,opening_moves={number}")


@pytest.mark.parametrize("opening_moves", [0, 4])
def test_a_game_of_self_play_uses_no_key_twice(opening_moves):
    env = SelfPlay("tic_tac_toe", opening_moves=opening_moves)
    with jax.debug_key_reuse(True):
        env.reset(jax.random.key(0))


@pytest.mark.parametrize(
    "game",
    [
        "kuhn_poker",
        "leduc_holdem",
        *(slow(name) for name in ("animal_shogi", "backgammon", "gardner_chess", "hex", "othello")),
    ],
)
def test_whether_turns_alternate(game):
    """A discount of 1 says that the same player moves again, -1 that the other does."""
    name = f"game:{game},opponent=self"
    spec, (timesteps, _) = make(name).spec, random_games(name, 40, 16)
    moves_again = (np.asarray(timesteps.discount)[1:] == 1) & ~np.asarray(timesteps.first)[1:]
    assert moves_again.any() != spec.turns_alternate
    assert (np.asarray(timesteps.discount)[1:] == -1).any()
    agent = Blueprint(MuZero(latent_size=4), spec)
    if spec.turns_alternate:
        check_agent(agent)
    else:
        with pytest.raises(ConfigError, match="may move twice in a row"):
            check_agent(agent)


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_holdem"])
def test_no_search_sees_the_other_players_cards(game):
    spec = make(f"model:game:{game},opponent=self").spec
    with pytest.raises(ConfigError, match="would see the cards of both players"):
        AlphaZero().build(spec)


def test_muzero_plans_for_two_players():
    """Values of the next state count against the player who moves."""
    for opponent, sign in (("self", -1.0), ("random", 1.0)):
        spec = make(f"game:tic_tac_toe,opponent={opponent}").spec

        @jax.jit
        def discount(settings: MuZero, spec: EnvironmentSpec = spec) -> jax.Array:
            agent = Blueprint(settings, spec).build()
            params = agent.actor_params(agent.init(jax.random.key(0), 1))
            index, embedding = jnp.zeros(1, jnp.int32), (jnp.zeros((1, 4)), {})
            arguments = params, jax.random.key(0), index, embedding
            step = methods_of(agent).model.step
            return step(next_discount(spec, settings.discount), *arguments)[0].discount

        np.testing.assert_array_equal(discount(MuZero(discount=0.5, latent_size=4)), [sign * 0.5])


# --- perfect play --------------------------------------------------------------------------------


def errs(board: np.ndarray, action: int) -> bool:
    """Whether the move is worth less than the position, bool `[3, 3, 2]`, by the solver."""
    own, other = (frozenset(np.flatnonzero(board[..., player])) for player in (0, 1))
    return -solve(other, own | {action}) < solve(own, other)


def all_games(agent: Any, params: Any, moves_first: bool) -> tuple[dict[int, int], list[bool]]:
    """Numbers of games that the greedy policy wins, draws and loses, over all games that it can
    be led into by the other player's moves, and which of its moves are errors."""
    game = pgx.make("tic_tac_toe")
    step = jax.vmap(game.step)

    @jax.jit
    def act(state: Any) -> jax.Array:
        size = state.current_player.shape[0]
        no = jnp.zeros(size, bool)
        observation = {"board": state.observation, ACTION_MASK: state.legal_action_mask}
        timestep = TimeStep(observation, jnp.zeros(size), jnp.ones(size), no, no)
        keys = jax.random.split(jax.random.key(0), size)
        return agent.act(params, agent.carry(size), timestep, keys, False)[0]

    state = jax.vmap(game.init)(jax.random.split(jax.random.key(0), 1))
    state = dataclasses.replace(state, current_player=jnp.zeros(1, jnp.int32))
    player, outcomes, errors = int(not moves_first), {1: 0, 0: 0, -1: 0}, []
    while state.current_player.shape[0]:
        if int(state.current_player[0]) == player:
            rows, actions = np.arange(state.current_player.shape[0]), np.asarray(act(state))
            boards = np.asarray(state.observation).reshape(-1, 3, 3, 2)
            errors += map(errs, boards, actions.tolist())
        else:
            rows, actions = np.nonzero(np.asarray(state.legal_action_mask))
        state = jax.tree.map(lambda x: x[rows], state)  # noqa: B023
        state = step(state, jnp.asarray(actions, jnp.int32))
        over = np.asarray(state.terminated)
        for reward in np.asarray(state.rewards)[over, player]:
            outcomes[int(reward)] += 1
        state = jax.tree.map(lambda x: x[~over], state)  # noqa: B023
    return outcomes, errors


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_self_play_learns_to_lose_no_game_of_tic_tac_toe(tmp_path, seed):
    import podracer
    from podracer.agent import policy_params

    podracer.train("tic_tac_toe_ppo", seed=seed, run_dir=tmp_path / "run", evaluations=0)
    agent, state = podracer.load(tmp_path / "run")
    for moves_first in (True, False):
        outcomes, errors = all_games(agent, policy_params(agent, state), moves_first)
        assert outcomes[-1] == 0
        assert np.mean(errors) < 0.05  # it may miss a win, which the solver counts as an error
        assert outcomes[1] > 50  # it also wins where the other player errs
