"""Catch, the small game of the published Anakin notebook."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.agents import A2C, Impala, MuZero, QLambda, Stacx
from podracer.agents.common.optimizers import Optimizer
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.recipes.sizes import accelerator
from podracer.replay import Replay

NETWORK = TorsoNetwork(MLP((256,)))
# Settings of IMPALA, and of the agents that are IMPALA and more, so that they can be compared.
V_TRACE: dict[str, Any] = {
    "learning_rate": 2e-3,
    "optimizer": Optimizer(),
    "max_gradient_norm": 40.0,
    "network": NETWORK,
}
MANY: dict[str, Any] = {
    "agent": {"learning_rate": 5e-3},
    "driver": {"num_envs": 8192, "updates_per_chunk": 10},
    "frames": 13_107_200,
}


@accelerator(
    agent={"learning_rate": 5e-4},
    driver={"num_envs": 8192, "updates_per_chunk": 20},
    frames=39_321_600,
)
def catch() -> Experiment:
    """Greedy Q(λ) on Catch: the experiment of the published Anakin notebook, fused under Anakin."""
    return Experiment(
        environment="catch",
        agent=QLambda(),
        driver=AnakinConfig(num_envs=128, rollout_length=16, updates_per_chunk=100, fused=True),
        frames=4_096_000,
    )


@accelerator(**MANY)
def catch_a2c() -> Experiment:
    """A2C on Catch, fused under Anakin."""
    return Experiment(
        environment="catch",
        agent=A2C(learning_rate=2e-3, network=NETWORK),
        driver=AnakinConfig(num_envs=128, rollout_length=16, updates_per_chunk=100, fused=True),
        frames=2_048_000,
    )


@accelerator(**MANY)
def catch_impala() -> Experiment:
    """IMPALA on Catch, with Adam instead of RMSProp."""
    return Experiment(
        environment="catch",
        agent=Impala(**V_TRACE),
        driver=AnakinConfig(num_envs=128, rollout_length=16, updates_per_chunk=100),
        frames=2_048_000,
    )


def catch_stacx() -> Experiment:
    """STACX on Catch: `catch_impala` that tunes itself."""
    agent = Stacx(meta_learning_rate=1e-2, **V_TRACE)
    return dataclasses.replace(catch_impala(), agent=agent)


def catch_muzero() -> Experiment:
    """Gumbel MuZero on Catch."""
    return Experiment(
        environment="catch",
        agent=MuZero(
            support_max=1.0,
            support_size=21,
            replay=Replay(capacity=50_000, batch_size=128, updates_per_rollout=8, prioritized=True),
        ),
        driver=AnakinConfig(num_envs=32, rollout_length=8, updates_per_chunk=20),
        frames=256_000,
        evaluation_episodes=64,
    )
