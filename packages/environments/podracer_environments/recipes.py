"""Recipes of the suites: arcade games, Craftax and robots."""

from __future__ import annotations

from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.networks import CNN, MLP, TorsoNetwork
from podracer.recipes.sizes import accelerator
from podracer.schedules import Linear


def octax_ppo(game: str = "brix") -> Experiment:
    """PPO on the pixels of a CHIP-8 game (`--game NAME`, needs octax)."""
    torso = CNN(channels=(16, 32), kernels=(4, 4), strides=(4, 2), hidden=(128,))
    return Experiment(
        environment=f"octax:{game}",
        agent=PPO(
            learning_rate=Linear(1e-3, 0.0),
            num_epochs=3,
            num_minibatches=8,
            network=TorsoNetwork(torso),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=64, updates_per_chunk=8),
        frames=1_000_000,
        evaluations=5,
        evaluation_policy="sampled",
    )


def jaxtari_ppo(game: str = "pong") -> Experiment:
    """PPO on the objects of an Atari game (`--game NAME`, needs jaxtari and its sprites)."""
    return Experiment(
        environment=f"jaxtari:{game},objects=true",
        agent=PPO(
            learning_rate=Linear(1e-3, 0.0),
            num_minibatches=8,
            normalize_observations=True,
            network=TorsoNetwork(MLP((64, 64), "relu"), shared=False),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=128, updates_per_chunk=10),
        frames=2_000_000,
        evaluations=5,
        evaluation_policy="sampled",
    )


@accelerator(
    agent={
        "learning_rate": Linear(2e-4, 0.0),
        "discount": 0.999,
        "gae_lambda": 0.8,
        "entropy_cost": 0.002,
        "network": {
            "torso": {"hidden": (256,)},
            "memory_size": 256,
            "memory_heads": 8,
            "memory_window": 128,
        },
    },
    driver={"num_envs": 1024, "rollout_length": 128},
    frames=1_000_000_000,
)
def craftax_ppo() -> Experiment:
    """PPO with a GTrXL on Craftax-Classic (needs craftax).

    A short discount learns sooner: after 0.42 M frames the return is 4.4 (seed 0). With 0.999, a
    lambda of 0.8 and an entropy cost of 0.002 it is 3.3 (three other seeds). The latter are the
    settings of transformerXL_PPO_JAX (Hamon 2024), whose GTrXL leads Craftax-1B. They come with its
    sizes, by `--size accelerator`; for Craftax-1B add `--environment craftax:Craftax-Symbolic-v1`.
    Nothing was trained at that size.
    """
    return Experiment(
        environment="craftax:Craftax-Classic-Symbolic-v1",
        agent=PPO(
            learning_rate=Linear(4.5e-4, 0.0),
            discount=0.925,
            gae_lambda=0.625,
            entropy_cost=0.01,
            max_gradient_norm=1.0,
            num_minibatches=8,
            network=TorsoNetwork(MLP((128,)), memory="gtrxl"),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=64, updates_per_chunk=4),
        frames=1_000_000,
        evaluations=5,
        evaluation_episodes=64,
        evaluation_policy="sampled",
    )


@accelerator(driver={"num_envs": 4096}, frames=30_000_000)
def mjlab_cartpole_ppo(task: str = "Cartpole-Balance") -> Experiment:
    """PPO on mjlab's cart-pole (`--task Cartpole-Swingup`, needs mjlab), with mjlab's settings.

    Those are of its rsl_rl configuration, but the learning rate is annealed where it adapts, and
    activations are SiLU where they are ELU.
    """
    return _mjlab(task, TorsoNetwork(MLP((64, 64), "silu"), shared=False), False, 32)


@accelerator(driver={"num_envs": 4096, "updates_per_chunk": 20}, frames=150_000_000)
def mjlab_velocity_ppo(task: str = "Velocity-Flat-Unitree-Go1") -> Experiment:
    """PPO on a legged robot of mjlab that follows a commanded velocity (`--task`, needs mjlab).

    The critic gets what only the simulator measures. Settings as in `mjlab_cartpole_ppo`.
    """
    return _mjlab(task, TorsoNetwork(MLP((512, 256, 128), "silu"), shared=False), True, 24)


def _mjlab(task: str, network: TorsoNetwork, normalize: bool, rollout_length: int) -> Experiment:
    return Experiment(
        environment=f"mjlab:{task}",
        agent=PPO(
            learning_rate=Linear(1e-3, 0.0),
            value_cost=1.0,
            max_gradient_norm=1.0,
            num_epochs=5,
            normalize_observations=normalize,
            network=network,
        ),
        driver=SebulbaConfig(
            num_envs=64, rollout_length=rollout_length, updates_per_chunk=5, threads_per_actor=1
        ),
        frames=1_000_000,
        evaluations=5,
        evaluation_episodes=16,
    )
