"""The named experiments: each a function that returns a whole `Experiment`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podracer.agents.a2c import A2C
from podracer.agents.alphazero import AlphaZero
from podracer.agents.ddpg import DDPG, td3
from podracer.agents.dqn import DQN, rainbow
from podracer.agents.impala import Impala
from podracer.agents.lpg.agent import LPG
from podracer.agents.lpg.rule import UpdateRule
from podracer.agents.lpg.student import lpg_student
from podracer.agents.muzero import MuZero
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.agents.stacx import Stacx
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.experiments.experiment import Experiment, experiment_of
from podracer.networks import CNN, MLP, ResNet, Table, TorsoNetwork
from podracer.ops.action_values import Atoms
from podracer.replay import Replay
from podracer.types import ConfigError

# The shallow network of Espeholt et al. 2018 (figure 3, left).
IMPALA_SHALLOW = CNN((16, 32), (8, 4), (4, 2), (256,))
# As in MinAtar (Young and Tian 2019): one convolution and one fully connected layer.
MINATAR = CNN((16,), (3,), (1,), (128,))


# What both actor-critics with V-trace have on CartPole, so that one can be compared with the other.
CARTPOLE: dict[str, Any] = {
    "learning_rate": 2e-3,
    "discount": 0.97,
    "lambda_": 0.95,
    "network": TorsoNetwork(MLP((64, 64), "tanh")),
}
# What all agents with a replay have on Pendulum and on HalfCheetah.
PENDULUM: dict[str, Any] = {
    "learning_rate": 1e-3,
    "random_frames": 2_000,
    "replay": Replay(100_000, updates=4, warmup=2_000),
    "network": TorsoNetwork(MLP((64, 64))),
}
HALFCHEETAH: dict[str, Any] = {
    "random_frames": 5_000,
    "replay": Replay(1_000_000, batch_size=128, updates=8, warmup=5_000),
}


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


def catch_stacx() -> Experiment:
    """STACX on Catch: `catch_impala` that tunes itself."""
    network = TorsoNetwork(MLP((256,)))
    agent = Stacx(learning_rate=2e-3, meta_learning_rate=1e-2, network=network)
    return dataclasses.replace(catch_impala(), recipe="catch_stacx", agent=agent)


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


def cartpole_impala() -> Experiment:
    """IMPALA on CartPole."""
    return Experiment(
        recipe="cartpole_impala",
        environment="cartpole",
        agent=Impala(**CARTPOLE),
        driver=AnakinConfig(32, 32, 10),
        frames=1_536_000,
        evaluation_episodes=128,
        target_return=475.0,
    )


def cartpole_stacx() -> Experiment:
    """STACX on CartPole: `cartpole_impala` that tunes itself."""
    return dataclasses.replace(cartpole_impala(), recipe="cartpole_stacx", agent=Stacx(**CARTPOLE))


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
    """PPO with continuous actions on Pendulum, observations and rewards normalized."""
    return Experiment(
        recipe="pendulum_ppo",
        environment="pendulum",
        agent=PPO(
            learning_rate=1e-3,
            discount=0.95,
            entropy_cost=0.0,
            epochs=10,
            minibatches=8,
            normalize_observations=True,
            normalize_rewards=True,
        ),
        driver=AnakinConfig(64, 64, 10),
        frames=1_228_800,
    )


def cartpole_dqn() -> Experiment:
    """Double DQN on CartPole."""
    return Experiment(
        recipe="cartpole_dqn",
        environment="cartpole",
        agent=DQN(
            learning_rate=1e-3,
            epsilon=0.05,
            epsilon_frames=20_000,
            target_period=50,
            replay=Replay(50_000, updates=4),
        ),
        driver=AnakinConfig(16, 4, 100),
        frames=320_000,
        evaluations=20,
        target_return=475.0,
    )


def cartpole_rainbow() -> Experiment:
    """Rainbow on CartPole: everything that DQN can be extended with, at once."""
    return dataclasses.replace(
        cartpole_dqn(),
        recipe="cartpole_rainbow",
        agent=rainbow(
            learning_rate=1e-3,
            target_period=50,
            value=Atoms(0.0, 100.0, 51),
            replay=Replay(50_000, updates=4, prioritized=True),
        ),
    )


def memory_r2d2() -> Experiment:
    """R2D2 on a task that only memory solves."""
    return Experiment(
        recipe="memory_r2d2",
        environment="probe:memory",
        agent=R2D2(
            target_period=50,
            burn_in=8,
            unroll=16,
            n_step=2,
            stride=16,
            replay=Replay(40_000, batch_size=64, updates=4, prioritized=True),
        ),
        driver=AnakinConfig(16, 16, 20),
        frames=102_400,
    )


def memorychain_r2d2() -> Experiment:
    """R2D2 on bsuite's memory chain: to say after 15 steps what the first one showed (gymnax)."""
    return Experiment(
        recipe="memorychain_r2d2",
        environment="gymnax:MemoryChain-bsuite,memory_length=15",
        agent=R2D2(
            learning_rate=2e-3,
            target_period=50,
            burn_in=8,
            unroll=40,
            n_step=3,
            stride=32,
            replay=Replay(40_000, batch_size=64, updates=8, prioritized=True),
        ),
        driver=AnakinConfig(16, 32, 20),
        frames=307_200,
    )


def memorychain_dqn() -> Experiment:
    """Feed-forward DQN on the same: it cannot know, and its mean return stays 0 (needs gymnax)."""
    return dataclasses.replace(
        memorychain_r2d2(),
        recipe="memorychain_dqn",
        agent=cartpole_dqn().agent,
        driver=AnakinConfig(16, 4, 100),
    )


def catch_muzero() -> Experiment:
    """Gumbel MuZero on Catch."""
    return Experiment(
        recipe="catch_muzero",
        environment="catch",
        agent=MuZero(
            bound=1.0,
            bins=21,
            replay=Replay(50_000, batch_size=128, updates=8, prioritized=True),
        ),
        driver=AnakinConfig(32, 8, 20),
        frames=256_000,
        evaluation_episodes=64,
    )


def catch_alphazero() -> Experiment:
    """Gumbel AlphaZero on Catch, planning in Catch itself."""
    return Experiment(
        recipe="catch_alphazero",
        environment="model:catch",
        agent=AlphaZero(),
        driver=AnakinConfig(32, 9, 20),
        frames=64_000,
        evaluation_episodes=64,
    )


def cartpole_alphazero() -> Experiment:
    """Gumbel AlphaZero on CartPole, planning in CartPole itself."""
    return dataclasses.replace(
        catch_alphazero(),
        recipe="cartpole_alphazero",
        environment="model:cartpole",
        driver=AnakinConfig(32, 16, 20),
        frames=128_000,
        target_return=475.0,
    )


def cartpole_muzero() -> Experiment:
    """Gumbel MuZero on CartPole."""
    return dataclasses.replace(
        catch_muzero(),
        recipe="cartpole_muzero",
        environment="cartpole",
        agent=MuZero(replay=Replay(50_000, batch_size=128, updates=4, prioritized=True)),
        target_return=475.0,
    )


def pendulum_sac() -> Experiment:
    """SAC on Pendulum."""
    return Experiment(
        recipe="pendulum_sac",
        environment="pendulum",
        agent=SAC(**PENDULUM),
        driver=AnakinConfig(16, 1, 100),
        frames=64_000,
    )


def pendulum_td3() -> Experiment:
    """TD3 on Pendulum."""
    return dataclasses.replace(pendulum_sac(), recipe="pendulum_td3", agent=td3(**PENDULUM))


def pendulum_ddpg() -> Experiment:
    """DDPG on Pendulum."""
    return dataclasses.replace(pendulum_sac(), recipe="pendulum_ddpg", agent=DDPG(**PENDULUM))


def breakout_dqn() -> Experiment:
    """Double DQN on MinAtar Breakout (needs gymnax), fully connected as `breakout_ppo`."""
    return Experiment(
        recipe="breakout_dqn",
        environment="gymnax:Breakout-MinAtar",
        agent=DQN(
            learning_rate=5e-4,
            epsilon_frames=250_000,
            target_period=250,
            replay=Replay(200_000, updates=8, warmup=5_000),
        ),
        driver=AnakinConfig(64, 4, 100),
        frames=1_000_000,
        evaluations=20,
    )


def breakout_rainbow() -> Experiment:
    """Rainbow on MinAtar Breakout (needs gymnax). The game has two openings and no chance besides,
    so actions are random at first and now and then, beside what noisy heads explore."""
    return dataclasses.replace(
        breakout_dqn(),
        recipe="breakout_rainbow",
        agent=rainbow(
            learning_rate=2.5e-4,
            epsilon=0.02,
            epsilon_frames=250_000,
            target_period=250,
            value=Atoms(0.0, 25.0, 51),
            replay=Replay(200_000, updates=8, warmup=5_000, prioritized=True),
        ),
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
        agent=PPO(learning_rate=1e-3, minibatches=8, network=TorsoNetwork(MINATAR)),
        frames=5_000_000,
    )


def atari_impala(game: str = "pong") -> Experiment:
    """IMPALA on an Atari game (`--game NAME`), with the paper's shallow network and protocol."""
    return Experiment(
        recipe="atari_impala",
        environment=f"atari:{game}",
        agent=Impala(learning_rate=6e-4, network=TorsoNetwork(IMPALA_SHALLOW)),
        driver=SebulbaConfig(64, 20, 50),
        frames=50_000_000,
        evaluations=10,
        evaluation_episodes=10,
        save_seconds=300.0,
    )


def atari_impala_deep(game: str = "pong") -> Experiment:
    """IMPALA on an Atari game (`--game NAME`), with the paper's deep residual network."""
    agent = Impala(learning_rate=6e-4, network=TorsoNetwork(ResNet()))
    return dataclasses.replace(atari_impala(game), recipe="atari_impala_deep", agent=agent)


def pong_impala() -> Experiment:
    """IMPALA on Atari Pong."""
    return dataclasses.replace(atari_impala("pong"), recipe="pong_impala")


def breakout_impala() -> Experiment:
    """IMPALA on Atari Breakout."""
    return dataclasses.replace(atari_impala("breakout"), recipe="breakout_impala")


def atari_ppo(game: str = "pong") -> Experiment:
    """PPO on an Atari game (`--game NAME`) with the Nature network, under sticky actions."""
    return dataclasses.replace(
        atari_impala(game),
        recipe="atari_ppo",
        environment=f"atari-sticky:{game}",
        agent=PPO(
            learning_rate=2.5e-4,
            epochs=4,
            minibatches=4,
            clip=0.1,
            network=TorsoNetwork(CNN()),
        ),
        driver=SebulbaConfig(64, 128, 10),
    )


def atari_dqn(game: str = "pong") -> Experiment:
    """Double DQN on an Atari game (`--game NAME`) with the Nature network: a replay of 7 GiB."""
    return dataclasses.replace(
        atari_impala(game),
        recipe="atari_dqn",
        agent=DQN(
            learning_rate=1e-4,
            epsilon_frames=1_000_000,
            target_period=2_000,
            replay=Replay(1_000_000, batch_size=32, updates=16, warmup=50_000),
            network=TorsoNetwork(CNN()),
        ),
        driver=SebulbaConfig(16, 4, 500),
    )


def atari_rainbow(game: str = "pong") -> Experiment:
    """Rainbow on an Atari game (`--game NAME`): a replay of 7 GiB."""
    return dataclasses.replace(
        atari_dqn(game),
        recipe="atari_rainbow",
        agent=rainbow(
            learning_rate=6.25e-5,
            target_period=2_000,
            replay=Replay(
                1_000_000,
                batch_size=32,
                updates=16,
                warmup=50_000,
                prioritized=True,
                priority_exponent=0.5,
            ),
            network=TorsoNetwork(CNN()),
        ),
    )


def pong_ppo() -> Experiment:
    """PPO on Atari Pong with a small network and few epochs: half an hour on two cores."""
    return dataclasses.replace(
        atari_impala("pong"),
        recipe="pong_ppo",
        agent=PPO(
            learning_rate=5e-4,
            epochs=3,
            minibatches=8,
            clip=0.1,
            network=TorsoNetwork(IMPALA_SHALLOW),
        ),
        driver=SebulbaConfig(32, 64, 10),
        frames=3_000_000,
        evaluations=4,
    )


def halfcheetah_ppo() -> Experiment:
    """PPO on MuJoCo's HalfCheetah (needs `podracer[mujoco]`), everything normalized."""
    return Experiment(
        recipe="halfcheetah_ppo",
        environment="gymnasium:HalfCheetah-v5",
        agent=PPO(
            learning_rate=3e-4,
            entropy_cost=0.0,
            epochs=10,
            minibatches=32,
            normalize_observations=True,
            normalize_rewards=True,
            network=TorsoNetwork(MLP((64, 64), "tanh"), shared=False),
        ),
        driver=SebulbaConfig(16, 128, 10, threads=1),
        frames=1_000_000,
        evaluations=10,
        evaluation_episodes=16,
    )


def halfcheetah_sac() -> Experiment:
    """SAC on MuJoCo's HalfCheetah (needs `podracer[mujoco]`)."""
    return dataclasses.replace(
        halfcheetah_ppo(),
        recipe="halfcheetah_sac",
        agent=SAC(**HALFCHEETAH),
        driver=SebulbaConfig(16, 1, 200, threads=1),
    )


def halfcheetah_td3() -> Experiment:
    """TD3 on MuJoCo's HalfCheetah (needs `podracer[mujoco]`)."""
    return dataclasses.replace(
        halfcheetah_sac(), recipe="halfcheetah_td3", agent=td3(**HALFCHEETAH)
    )


def halfcheetah_ddpg() -> Experiment:
    """DDPG on MuJoCo's HalfCheetah (needs `podracer[mujoco]`)."""
    return dataclasses.replace(
        halfcheetah_sac(), recipe="halfcheetah_ddpg", agent=DDPG(**HALFCHEETAH)
    )


def trading_ppo() -> Experiment:
    """PPO on a synthetic stock market; evaluated in a period that it never trained in."""
    return Experiment(
        recipe="trading_ppo",
        environment="trading:synthetic",
        agent=PPO(entropy_cost=0.0, normalize_observations=True),
        driver=AnakinConfig(64, 64, 20),
        frames=2_000_000,
        evaluation_episodes=1,  # from the one start, through the whole of that period
    )


def lpg() -> Experiment:
    """LPG: an update rule discovered in small grid worlds and chains, on a laptop."""
    return Experiment(
        recipe="lpg",
        environment="lifetimes:worlds:small+medium+chain,envs=16,steps=4000",
        agent=LPG(learning_rate=1e-3, lifetime_groups=4, rule=UpdateRule(units=32)),
        driver=AnakinConfig(512, 20, 50),
        frames=60_000_000,
        evaluations=0,
    )


def lpg_paper() -> Experiment:
    """LPG at the size of the Podracer paper: 61,440 environments, 960 learners, tabular worlds."""
    return dataclasses.replace(
        lpg(),
        recipe="lpg_paper",
        environment="lifetimes:worlds:tabular+chains,envs=64,steps=30000",
        agent=LPG(lifetime_groups=4),
        driver=AnakinConfig(61_440, 20, 10),
        frames=20_000_000_000,
    )


def worlds_a2c() -> Experiment:
    """A2C with tables in a grid world of those that update rules are discovered in."""
    return Experiment(
        recipe="worlds_a2c",
        environment="worlds:dense",
        agent=A2C(learning_rate=0.1, network=Table()),
        driver=AnakinConfig(64, 20, 50),
        frames=2_560_000,
        evaluation_episodes=64,
    )


RECIPES: dict[str, Callable[..., Experiment]] = {
    function.__name__: function
    for function in (
        catch,
        catch_a2c,
        catch_impala,
        catch_stacx,
        cartpole_ppo,
        cartpole_impala,
        cartpole_stacx,
        cartpole_sebulba,
        memory_ppo,
        pendulum_ppo,
        breakout_ppo,
        breakout_cnn_ppo,
        cartpole_dqn,
        cartpole_rainbow,
        breakout_dqn,
        breakout_rainbow,
        memory_r2d2,
        memorychain_r2d2,
        memorychain_dqn,
        catch_muzero,
        catch_alphazero,
        cartpole_alphazero,
        cartpole_muzero,
        pendulum_ddpg,
        pendulum_td3,
        pendulum_sac,
        atari_impala,
        atari_impala_deep,
        atari_ppo,
        atari_dqn,
        atari_rainbow,
        pong_impala,
        pong_ppo,
        breakout_impala,
        halfcheetah_ppo,
        halfcheetah_sac,
        halfcheetah_td3,
        halfcheetah_ddpg,
        trading_ppo,
        worlds_a2c,
        lpg,
        lpg_paper,
    )
}


def with_update_rule(experiment: Experiment, file: str) -> Experiment:
    """The experiment with its agent's network taught by the rule of a file."""
    old = experiment.agent
    rate = {} if isinstance(old.network, Table) else {"learning_rate": old.learning_rate}
    agent = lpg_student(file, old.network, discount=old.discount, **rate)
    driver = experiment.driver
    if isinstance(driver, AnakinConfig):
        driver = dataclasses.replace(driver, fused=False)
    return dataclasses.replace(
        experiment, recipe=f"{experiment.recipe}_taught", agent=agent, driver=driver
    )


def find(name: str, **options: str) -> Experiment:
    """The experiment of a recipe, or `ConfigError` with the nearest name.

    A name that ends in .json is a file with one: a run's `config.json`, or a sweep's `best.json`.
    `options` are the recipe's own, see `options_of`.
    """
    if name.endswith(".json"):
        return experiment_of(Path(name))
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(RECIPES)}"
        raise ConfigError(f"There is no recipe {name!r}: {hint}.")
    return RECIPES[name](**options)


def options_of(name: str) -> tuple[str, ...]:
    """What a recipe itself can be told, such as the `game` of `atari_impala`."""
    return tuple(inspect.signature(RECIPES[name]).parameters) if name in RECIPES else ()
