"""Board games of two players, learned by self-play."""

from __future__ import annotations

from podracer_games.alphazero import AlphaZero
from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.schedules import Linear


def tic_tac_toe_ppo() -> Experiment:
    """PPO by self-play in tic-tac-toe, evaluated against minimax over four moves (needs pgx).

    A high entropy cost keeps all lines of play in the data: with 0.1 and 0.2 the greedy policies of
    some seeds can still be beaten.
    """
    return Experiment(
        environment="pgx:tic_tac_toe,opponent=self,evaluate_against=minimax-4",
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
    """AlphaZero by self-play in connect four, evaluated against minimax over two moves (needs pgx).

    Random openings show positions that a policy which is certain of itself never reaches. Rollouts
    hold whole games, whose outcomes are the targets of values. A search that stretches the smallest
    differences of values would take their noise for a policy.
    """
    return Experiment(
        environment=(
            "model:pgx:connect_four,opponent=self,evaluate_against=minimax-2,opening_moves=8"
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
