"""Recipes of the package's agents: the core's recipes with another agent."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.agents import DQN, SAC
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.recipes import atari, catch, mujoco, pendulum, rules
from podracer.replay import Replay
from podracer.schedules import Linear
from podracer_agents.augmentation import ShiftedReplay
from podracer_agents.disco_discovery import DiscoDiscovery
from podracer_agents.discrete_sac import DiscreteSAC
from podracer_agents.frodo import Frodo
from podracer_agents.hindsight import HindsightReplay
from podracer_agents.qt_opt import QTOpt
from podracer_agents.sac import crossq, flash_sac, simbav2


def catch_frodo() -> Experiment:
    """FRODO on Catch: `catch_impala` that learns what its values should predict."""
    return dataclasses.replace(catch.catch_impala(), agent=Frodo(**catch.V_TRACE))


def pendulum_qt_opt() -> Experiment:
    """QT-Opt on Pendulum."""
    return dataclasses.replace(pendulum.pendulum_sac(), agent=QTOpt(**pendulum.OFF_POLICY))


def disco_discovery() -> Experiment:
    """Discovery of a small rule with the inputs and outputs of Disco103, in the worlds of `lpg`."""
    return dataclasses.replace(
        rules.lpg(),
        agent=DiscoDiscovery(learning_rate=3e-3, lifetime_groups=2),
        driver=AnakinConfig(num_envs=256, rollout_length=20, updates_per_chunk=50),
        frames=20_000_000,
    )


# Both as their authors begin: after 5,000 random frames.
_EARLY_REPLAY = dataclasses.replace(mujoco.REPLAY, warmup=5_000)


def halfcheetah_crossq() -> Experiment:
    """CrossQ on MuJoCo's HalfCheetah (needs the extra `mujoco`): SAC with batch normalization.

    An update of the critics takes six products of 512 x 2048 x 2048; `halfcheetah_sac` has 16 of
    256 x 256 x 256.
    """
    return dataclasses.replace(mujoco.halfcheetah_sac(), agent=crossq(replay=_EARLY_REPLAY))


def halfcheetah_simbav2() -> Experiment:
    """SimBaV2 on MuJoCo's HalfCheetah (needs the extra `mujoco`): SAC on the unit sphere.

    Two updates for each frame, as in its authors' main results, and their discount for episodes of
    1,000 steps.
    """
    replay = dataclasses.replace(_EARLY_REPLAY, updates_per_rollout=32)
    agent = simbav2(discount=0.995, replay=replay)
    return dataclasses.replace(mujoco.halfcheetah_sac(), agent=agent)


def pendulum_flash_sac() -> Experiment:
    """FlashSAC on Pendulum: many environments, few updates of bounded networks."""
    return Experiment(
        environment="pendulum",
        agent=flash_sac(
            discount=0.97,
            random_frames=10_240,
            replay=Replay(
                capacity=1_048_576, batch_size=2_048, updates_per_rollout=2, warmup=10_240
            ),
        ),
        driver=AnakinConfig(num_envs=1024, rollout_length=1, updates_per_chunk=5),
        frames=1_024_000,
    )


def bit_flipping_dqn() -> Experiment:
    """DQN with HER on 20 bits; without it, `--num-goals 0`, it never sees a reward."""
    return Experiment(
        environment="bit_flipping",
        agent=DQN(
            learning_rate=1e-3,
            discount=0.98,
            epsilon=Linear(1.0, 0.05, frames=100_000),
            target_update_period=100,
            network=TorsoNetwork(MLP((256,))),
            replay=HindsightReplay(
                capacity=100_000, updates_per_rollout=8, warmup=2_000, horizon=20
            ),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=4, updates_per_chunk=100),
        frames=200_000,
    )


def catch_discrete_sac() -> Experiment:
    """Discrete SAC on Catch."""
    return Experiment(
        environment="catch",
        agent=DiscreteSAC(
            learning_rate=1e-3,
            random_frames=1_000,
            initial_temperature=0.1,
            target_entropy=0.3,
            target_update_rate=0.01,
            network=TorsoNetwork(MLP((64, 64))),
            replay=Replay(capacity=50_000, batch_size=128, updates_per_rollout=4, warmup=1_000),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=2, updates_per_chunk=100),
        frames=40_000,
        evaluation_episodes=128,
    )


def atari_drq(game: str = "pong") -> Experiment:
    """Double DQN on an Atari game (`--game NAME`), with randomly shifted pictures (DrQ)."""
    experiment = atari.atari_dqn(game)
    agent: Any = experiment.agent
    agent = dataclasses.replace(agent, replay=ShiftedReplay(**vars(agent.replay)))
    return dataclasses.replace(experiment, agent=agent)


def point_reach_sac() -> Experiment:
    """SAC with HER on a point that reaches a goal; without it, `--num-goals 0`, it is slower."""
    return Experiment(
        environment="point_reach",
        agent=SAC(
            learning_rate=1e-3,
            discount=0.95,
            random_frames=2_000,
            initial_temperature=0.1,
            network=TorsoNetwork(MLP((64, 64))),
            replay=HindsightReplay(capacity=100_000, updates_per_rollout=4, warmup=2_000),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=1, updates_per_chunk=250),
        frames=40_000,
    )
