"""Recipes: board games of two players by self-play, and small tasks by planning in them."""

from __future__ import annotations

from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.schedules import Linear
from podracer_games.alphazero import AlphaZero


def tic_tac_toe_ppo() -> Experiment:
    """PPO by self-play in tic-tac-toe, evaluated against minimax over four moves.

    A high entropy cost keeps all lines of play in the data: with 0.1 and 0.2 the greedy policies of
    some seeds can still be beaten.
    """
    return Experiment(
        environment="game:tic_tac_toe,opponent=self,evaluate_against=minimax-4",
        agent=PPO(
            learning_rate=Linear(1e-3, 1e-4),
            discount=1.0,
            entropy_cost=0.3,
            network=TorsoNetwork(MLP((128, 128), "tanh"), shared=False),
        ),
        driver=AnakinConfig(num_envs=256, rollout_length=16, updates_per_chunk=20),
        frames=3_000_000,
        evaluations=4,
    )


def connect_four_alphazero() -> Experiment:
    """AlphaZero by self-play in connect four, evaluated against minimax over two moves.

    Random openings show positions that a policy which is certain of itself never reaches. Rollouts
    hold whole games, whose outcomes are the targets of values. A search that stretches the smallest
    differences of values would take their noise for a policy.
    """
    return Experiment(
        environment=(
            "model:game:connect_four,opponent=self,evaluate_against=minimax-2,opening_moves=8"
        ),
        agent=AlphaZero(
            learning_rate=Linear(1e-3, 1e-4),
            discount=1.0,
            min_value_range=0.2,
            num_simulations=16,
            max_considered_actions=7,
            td_lambda=1.0,
            num_epochs=4,
            num_minibatches=32,
            network=TorsoNetwork(MLP((256, 256))),
        ),
        driver=AnakinConfig(num_envs=128, rollout_length=128, updates_per_chunk=3),
        frames=3_000_000,
        evaluations=6,
    )


def catch_alphazero() -> Experiment:
    """Gumbel AlphaZero on Catch, planning in Catch itself."""
    return Experiment(
        environment="model:catch",
        agent=AlphaZero(),
        driver=AnakinConfig(num_envs=32, rollout_length=9, updates_per_chunk=20),
        frames=64_000,
        evaluation_episodes=32,
    )


def cartpole_alphazero() -> Experiment:
    """Gumbel AlphaZero on CartPole, planning in CartPole itself.

    Its learning rate falls to 0: with a constant one the policy reaches a return of 500 and then
    gets worse.
    """
    return Experiment(
        environment="model:cartpole",
        agent=AlphaZero(learning_rate=Linear(1e-3, 0.0)),
        driver=AnakinConfig(num_envs=32, rollout_length=16, updates_per_chunk=20),
        frames=128_000,
        evaluations=5,
        evaluation_episodes=16,
        target_return=475.0,
    )
