"""The named experiments: each a function that returns a whole `Experiment`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable

from podracer.agents.a2c import A2C
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.anakin import AnakinConfig
from podracer.experiment import Experiment
from podracer.networks import CNN, MLP, TorsoNetwork
from podracer.sebulba import SebulbaConfig
from podracer.types import ConfigError


def catch() -> Experiment:
    """Greedy Q(λ) on Catch: the experiment of the published Anakin notebook, fused."""
    return Experiment(
        recipe="catch",
        environment="catch",
        agent=QLambda(),
        driver=AnakinConfig(128, 16, 100, fused=True),
        frames=4_096_000,
    )


def catch_a2c() -> Experiment:
    """A2C on Catch, fused."""
    return Experiment(
        recipe="catch_a2c",
        environment="catch",
        agent=A2C(learning_rate=2e-3, network=TorsoNetwork(MLP((256,)))),
        driver=AnakinConfig(128, 16, 100, fused=True),
        frames=2_048_000,
    )


def catch_impala() -> Experiment:
    """IMPALA on Catch."""
    return Experiment(
        recipe="catch_impala",
        environment="catch",
        agent=Impala(learning_rate=2e-3, network=TorsoNetwork(MLP((256,)))),
        driver=AnakinConfig(128, 16, 100),
        frames=2_048_000,
    )


def cartpole_ppo() -> Experiment:
    """PPO on CartPole."""
    return Experiment(
        recipe="cartpole_ppo",
        environment="cartpole",
        agent=PPO(learning_rate=1e-3),
        driver=AnakinConfig(32, 32, 10),
        frames=512_000,
        evaluations=50,
        evaluation_episodes=128,
        target_return=475.0,
    )


def cartpole_sebulba() -> Experiment:
    """PPO on Gymnasium's CartPole, stepped by processes of the host."""
    return Experiment(
        recipe="cartpole_sebulba",
        environment="gymnasium:CartPole-v1",
        agent=PPO(learning_rate=1e-3),
        driver=SebulbaConfig(32, 32, 10, threads=1),
        frames=512_000,
        evaluations=50,
        evaluation_episodes=32,
        target_return=475.0,
    )


def memory_ppo() -> Experiment:
    """Recurrent PPO on a task that only memory solves."""
    return Experiment(
        recipe="memory_ppo",
        environment="probe:memory",
        agent=PPO(
            learning_rate=1e-3,
            network=TorsoNetwork(MLP((32,), "tanh"), memory="gru", memory_size=32),
        ),
        driver=AnakinConfig(64, 32, 10),
        frames=409_600,
    )


def pendulum_ppo() -> Experiment:
    """PPO with continuous actions on Pendulum, observations and rewards normalised."""
    return Experiment(
        recipe="pendulum_ppo",
        environment="pendulum",
        agent=PPO(
            learning_rate=1e-3,
            discount=0.95,
            entropy_cost=0.0,
            epochs=10,
            minibatches=8,
            normalise_observations=True,
            normalise_rewards=True,
        ),
        driver=AnakinConfig(64, 64, 10),
        frames=1_228_800,
    )


def breakout_ppo() -> Experiment:
    """PPO on MinAtar Breakout (needs gymnax), fully connected as in the peers' benchmarks."""
    return Experiment(
        recipe="breakout_ppo",
        environment="gymnax:Breakout-MinAtar",
        agent=PPO(
            learning_rate=5e-3,
            lambda_=0.9,
            decay_updates=620,
            minibatches=8,
            network=TorsoNetwork(MLP((64, 64), "relu"), shared=False),
        ),
        driver=AnakinConfig(128, 64, 20),
        frames=5_000_000,
        evaluations=20,
    )


def breakout_cnn_ppo() -> Experiment:
    """PPO with a convolutional network on MinAtar Breakout (needs gymnax)."""
    return dataclasses.replace(
        breakout_ppo(),
        recipe="breakout_cnn_ppo",
        agent=PPO(
            learning_rate=1e-3, minibatches=8, network=TorsoNetwork(CNN((16,), (3,), (1,), (128,)))
        ),
        frames=5_000_000,
    )


RECIPES: dict[str, Callable[[], Experiment]] = {
    function.__name__: function
    for function in (
        catch,
        catch_a2c,
        catch_impala,
        cartpole_ppo,
        cartpole_sebulba,
        memory_ppo,
        pendulum_ppo,
        breakout_ppo,
        breakout_cnn_ppo,
    )
}


def find(name: str) -> Experiment:
    """The experiment of a recipe, or `ConfigError` with the nearest name."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(RECIPES)}"
        raise ConfigError(f"There is no recipe {name!r}: {hint}.")
    return RECIPES[name]()
