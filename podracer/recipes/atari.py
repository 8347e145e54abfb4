"""Atari games, stepped on the host."""

from __future__ import annotations

import dataclasses

from podracer.agents import DQN, PPO, Impala, MuZero
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.dqn import rainbow
from podracer.config.experiment import Experiment
from podracer.drivers.sebulba import SebulbaConfig
from podracer.networks import CNN, ResNet, TorsoNetwork
from podracer.recipes.sizes import accelerator
from podracer.replay import Replay
from podracer.schedules import Linear

# The shallow network of Espeholt et al. 2018 (figure 3, left).
IMPALA_SHALLOW = CNN(channels=(16, 32), kernels=(8, 4), strides=(4, 2), hidden=(256,))


@accelerator(driver={"num_envs": 128})
def atari_impala(game: str = "pong") -> Experiment:
    """IMPALA on an Atari game (`--game NAME`), with the paper's shallow network and protocol.

    The learning rate falls to 0 over the run, by default 50 M frames or 200 M of the emulator.
    With `--size accelerator` as many environments as in Cleanba (Huang et al. 2023), and not
    trained at this size.
    """
    return Experiment(
        environment=f"atari:{game}",
        agent=Impala(learning_rate=Linear(6e-4, 0.0), network=TorsoNetwork(IMPALA_SHALLOW)),
        driver=SebulbaConfig(num_envs=64, rollout_length=20, updates_per_chunk=50),
        frames=50_000_000,
        evaluation_episodes=10,
        evaluation_policy="sampled",
        save_seconds=300.0,
    )


@accelerator(driver={"num_envs": 128})
def atari_ppo(game: str = "pong") -> Experiment:
    """PPO on an Atari game (`--game NAME`) with the Nature network, under sticky actions.

    With `--size accelerator` as `atari_impala`, and not trained at this size.
    """
    return dataclasses.replace(
        atari_impala(game),
        environment=f"atari-sticky:{game}",
        agent=PPO(
            learning_rate=Linear(2.5e-4, 0.0),
            num_epochs=4,
            num_minibatches=4,
            clip_epsilon=0.1,
            network=TorsoNetwork(CNN()),
        ),
        driver=SebulbaConfig(num_envs=64, rollout_length=128, updates_per_chunk=10),
    )


def atari_dqn(game: str = "pong") -> Experiment:
    """Double DQN on an Atari game (`--game NAME`) with the Nature network: a replay of 7 GiB."""
    return dataclasses.replace(
        atari_impala(game),
        agent=DQN(
            learning_rate=1e-4,
            epsilon=Linear(1.0, 0.01, frames=1_000_000),
            target_update_period=2_000,
            replay=Replay(capacity=1_000_000, batch_size=32, updates_per_rollout=16, warmup=50_000),
            network=TorsoNetwork(CNN()),
        ),
        driver=SebulbaConfig(num_envs=16, rollout_length=4, updates_per_chunk=500),
        evaluation_policy="greedy",
        evaluation_epsilon=0.001,  # van Hasselt et al. 2016 (tuned double DQN), and dopamine
    )


def atari_rainbow(game: str = "pong") -> Experiment:
    """Rainbow on an Atari game (`--game NAME`): a replay of 7 GiB."""
    return dataclasses.replace(
        atari_dqn(game),
        agent=rainbow(
            learning_rate=6.25e-5,
            target_update_period=2_000,
            replay=Replay(
                capacity=1_000_000,
                batch_size=32,
                updates_per_rollout=16,
                warmup=20_000,
                prioritized=True,
                priority_exponent=0.5,
                importance_exponent=Linear(0.4, 1.0, frames=50_000_000),
            ),
            stream_hidden=(512,),
            network=TorsoNetwork(CNN(hidden=())),
        ),
    )


def atari_apex(game: str = "pong") -> Experiment:
    """Ape-X DQN on an Atari game (`--game NAME`): 14 GiB of replay.

    As in Horgan et al. 2018, section 4.1 and appendix: dueling double DQN with returns of three
    rewards, an epsilon for each actor, and a learner that samples 0.8 transitions for each new one.
    Different: 256 actors in batches instead of 360 processes, whose parameters are one or two
    rollouts of 20 steps old (theirs up to 100 steps); a new transition has the largest priority so
    far, where their actors compute it; RMSProp is not centered; the oldest transition gives way at
    2^21, not at a soft limit of 2 M.
    """
    return dataclasses.replace(
        atari_dqn(game),
        agent=DQN(
            learning_rate=6.25e-5,
            epsilon=0.4,
            apex_alpha=7.0,
            max_gradient_norm=40.0,
            optimizer=Optimizer("rmsprop", epsilon=1.5e-7, rmsprop_decay=0.95),
            target_update_period=2_500,
            n_step=3,
            dueling=True,
            stream_hidden=(512,),
            replay=Replay(
                capacity=2**21,
                batch_size=512,
                updates_per_rollout=8,
                warmup=50_000,
                prioritized=True,
            ),
            network=TorsoNetwork(CNN(hidden=())),
        ),
        driver=SebulbaConfig(
            num_envs=256, rollout_length=20, updates_per_chunk=20, threads_per_actor=4
        ),
    )


def atari_muzero(game: str = "pong") -> Experiment:
    """Gumbel MuZero Reanalyze on an Atari game (`--game NAME`), for accelerators.

    Schrittwieser et al. 2020, appendices F to H, has the same planes of 6 x 6 x 256, 16 blocks of
    the dynamics, atoms, simulations, steps, costs and priorities. Samples are 1024, two for each
    frame, and the paper's share of them is searched anew. Adam's learning rate is ours.
    """
    return dataclasses.replace(
        atari_dqn(game),
        agent=MuZero(
            learning_rate=1e-4,
            num_simulations=50,
            support_max=300.0,
            support_size=601,
            reanalyze_fraction=0.8,
            network=TorsoNetwork(ResNet((128, 256, 256, 256), blocks=3, layer_norm=True)),
            dynamics_hidden=(),
            dynamics_blocks=16,
            prediction_hidden=(),
            replay=Replay(
                capacity=1_000_000,
                batch_size=1024,
                warmup=50_000,
                prioritized=True,
                priority_exponent=1.0,
                importance_exponent=1.0,
            ),
        ),
        driver=SebulbaConfig(num_envs=64, rollout_length=8, updates_per_chunk=50),
        evaluation_epsilon=0.0,
    )


def pong_ppo() -> Experiment:
    """PPO on Atari Pong, small network, few epochs: four hours on two cores to a return of 18."""
    return dataclasses.replace(
        atari_impala("pong"),
        agent=PPO(
            learning_rate=Linear(5e-4, 0.0, frames=10_000_000),
            num_epochs=3,
            num_minibatches=8,
            clip_epsilon=0.1,
            network=TorsoNetwork(IMPALA_SHALLOW),
        ),
        driver=SebulbaConfig(num_envs=32, rollout_length=64, updates_per_chunk=10),
        frames=4_500_000,
        evaluations=9,
    )


def pong_impala() -> Experiment:
    """IMPALA on Atari Pong, with updates of 64 frames each, for two cores: an hour or two."""
    return dataclasses.replace(
        atari_impala("pong"),
        agent=Impala(
            learning_rate=Linear(3e-4, 0.0, frames=12_000_000),
            optimizer=Optimizer("adam", epsilon=1e-5),
            max_gradient_norm=0.5,
            entropy_cost=Linear(0.005, 0.001, frames=1_500_000),
            trace_lambda=0.95,
            network=TorsoNetwork(dataclasses.replace(IMPALA_SHALLOW, layer_norm=True)),
        ),
        driver=SebulbaConfig(
            num_envs=32, rollout_length=64, updates_per_batch=32, updates_per_chunk=30
        ),
        frames=8_000_000,
        evaluations=7,
    )
