"""One small agent of each kind for the tests of drivers, and agents that learn the probes."""

import dataclasses
import os
import tempfile
from pathlib import Path

import disco
import jax
import jax.numpy as jnp

from podracer.agent import Blueprint, Context, ReadsFile
from podracer.agents.a2c import A2C
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.common.recurrent import Recurrence
from podracer.agents.ddpg import DDPG, td3
from podracer.agents.dqn import DQN
from podracer.agents.impala import Impala
from podracer.agents.muzero import MuZero
from podracer.agents.ppo import PPO
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.agents.r2d2 import R2D2
from podracer.agents.rules.disco import Disco
from podracer.agents.rules.lpg import UpdateRule
from podracer.agents.rules.lpg.rule_file import encode_rule
from podracer.agents.rules.lpg.student import lpg_student
from podracer.agents.sac import SAC
from podracer.agents.stacx import Stacx
from podracer.envs import make
from podracer.envs.catch import Catch
from podracer.envs.probes import GAMMA
from podracer.networks import MLP, ResNet, TorsoNetwork
from podracer.ops.action_values import Atoms, Quantiles
from podracer.replay import Replay
from podracer.schedules import Linear
from podracer.types import ArraySpec

SMALL = TorsoNetwork(MLP((16,)))
RECURRENT = TorsoNetwork(MLP((16,)), memory="gru", memory_size=8)
RECURRENCE = Recurrence(burn_in_length=3, unroll_length=6, head_size=8)
REPLAY = Replay(16 * 40, batch_size=16, updates_per_rollout=2, warmup=16 * 16)


def student_of_untrained_rule():
    """A student whose rule has learned nothing yet; its file is the same for all test processes."""
    rule = UpdateRule(units=8, embedding=4, predictions=4)
    path = Path(tempfile.gettempdir()) / f"podracer-test-rule-{os.getuid()}.npz"
    path.write_bytes(encode_rule(rule, rule.init(jax.random.key(0)), {}))
    return lpg_student(rule, SMALL, rule_file=str(path))


def student_of_random_disco_rule():
    """A student of a rule with random weights; its file is the same for all test processes."""
    path = Path(tempfile.gettempdir()) / f"podracer-test-disco-{os.getuid()}.npz"
    path.write_bytes(disco.file_of(disco.random_rule()))
    return Disco(
        network=SMALL,
        replay=REPLAY,
        support_max=3.0,
        support_size=11,
        model_size=4,
        rule_file=str(path),
    )


AGENTS = {
    "q_lambda": QLambda(network=SMALL),
    "a2c": A2C(network=SMALL),
    "impala": Impala(network=SMALL),
    "stacx": Stacx(network=SMALL),
    "ppo": PPO(network=SMALL, num_epochs=2, normalize_observations=True, normalize_rewards=True),
    "ppo-gru": PPO(network=RECURRENT, num_epochs=2, num_minibatches=2),
    "ppo-gtrxl": PPO(
        network=dataclasses.replace(RECURRENT, memory="gtrxl", memory_window=6),
        num_epochs=2,
        num_minibatches=2,
    ),
    "pqn": PQN(network=TorsoNetwork(MLP((16,), layer_norm=True)), num_epochs=2),
    "pqn-gru": PQN(network=RECURRENT, num_epochs=2, num_minibatches=2),
    "dqn": DQN(network=SMALL, replay=REPLAY, epsilon=Linear(1.0, 0.01, 2000.0)),
    "rainbow": DQN(
        network=SMALL,
        replay=dataclasses.replace(
            REPLAY, prioritized=True, importance_exponent=Linear(0.4, 1.0, 2000.0)
        ),
        n_step=3,
        dueling=True,
        stream_hidden=(8,),
        noisy=True,
        value=Atoms(-2.0, 2.0, 11),
        apex_alpha=7.0,
    ),
    "r2d2": R2D2(
        network=RECURRENT,
        replay=dataclasses.replace(REPLAY, prioritized=True),
        burn_in_length=4,
        unroll_length=8,
        n_step=2,
    ),
    "muzero": MuZero(
        network=SMALL,
        replay=dataclasses.replace(REPLAY, prioritized=True),
        latent_size=8,
        dynamics_hidden=(8,),
        prediction_hidden=(8,),
        support_size=11,
        support_max=3.0,
        num_simulations=4,
        unroll_steps=3,
        n_step=2,
    ),
    "sac": SAC(network=SMALL, replay=REPLAY, random_frames=400, normalize_observations=True),
    "sac-gru": SAC(
        network=RECURRENT,
        replay=dataclasses.replace(REPLAY, prioritized=True),
        random_frames=400,
        normalize_observations=True,
        recurrence=RECURRENCE,
    ),
    "td3": td3(network=SMALL, replay=REPLAY, random_frames=400),
    "td3-lstm": td3(
        network=dataclasses.replace(RECURRENT, memory="lstm"),
        replay=REPLAY,
        random_frames=400,
        n_step=2,
        recurrence=RECURRENCE,
    ),
    "fast_td3": td3(
        network=TorsoNetwork(MLP((16,), residual_blocks=1)),
        replay=REPLAY,
        random_frames=400,
        normalize_observations=True,
        return_distribution=Atoms(-40.0, 0.0, 11),
        weight_decay=0.1,
    ),
    "lpg_student": student_of_untrained_rule(),
    "disco": student_of_random_disco_rule(),
}
AGENTS["muzero-reanalyze"] = dataclasses.replace(
    AGENTS["muzero"], reanalyze_fraction=0.5, bootstrap="search"
)
AGENTS["muzero-sampled"] = dataclasses.replace(AGENTS["muzero"], max_considered_actions=5)
AGENTS["muzero-planes"] = dataclasses.replace(
    AGENTS["muzero"], network=TorsoNetwork(ResNet(channels=(4,), blocks=1)), dynamics_blocks=1
)
AGENTS["ppo-multidiscrete"] = AGENTS["ppo"]
AGENTS["disco-gru"] = dataclasses.replace(AGENTS["disco"], network=RECURRENT)
CONTINUOUS = (
    "sac", "sac-gru", "td3", "td3-lstm", "fast_td3",
    "muzero-sampled",
)  # fmt: skip
ENVIRONMENTS = dict.fromkeys(CONTINUOUS, "pendulum") | {"ppo-multidiscrete": "probe:multidiscrete"}


class SquareCatch(Catch):
    """Catch as a square picture, f32 `[10, 10, 1]`."""

    @property
    def spec(self):
        return dataclasses.replace(super().spec, observation=ArraySpec((10, 10, 1)))

    def reset(self, key):
        return self._picture(*super().reset(key))

    def step(self, key, state, action):
        return self._picture(*super().step(key, state, action))

    def _picture(self, state, timestep):
        picture = jnp.pad(timestep.observation[..., None], ((0, 0), (0, 5), (0, 0)))
        return state, dataclasses.replace(timestep, observation=picture)


def environment_for(name):
    """An environment for an agent of `AGENTS`."""
    return SquareCatch() if name == "muzero-planes" else make(ENVIRONMENTS.get(name, "catch"))


def blueprint(settings, spec, rollout_length=8):
    """What a driver takes, with the content of the file that the settings name."""
    data = None
    if isinstance(settings, ReadsFile) and settings.data_file:
        data = settings.read(Path(settings.data_file).read_bytes())
    return Blueprint(settings, spec, Context(rollout_length, data))


# --- agents that learn the probes ----------------------------------------------------------------

TANH = TorsoNetwork(MLP((16,), "tanh"))
RECURRENT_TANH = TorsoNetwork(MLP((16,), "tanh"), memory="gru", memory_size=16)
ADAM = {"optimizer": Optimizer(), "max_gradient_norm": 40.0}  # for steps of about 0.01
COMMON = {"network": TANH, "learning_rate": 0.01, "discount": GAMMA}
PROBE_REPLAY = Replay(32 * 200, batch_size=128, updates_per_rollout=4, warmup=256)
EXPLORING = {"epsilon": Linear(1.0, 0.05, 10_000.0), "target_update_period": 20}
PROBE_AGENTS = {
    "a2c": A2C(**COMMON, entropy_cost=0.003),
    "impala": Impala(**COMMON, **ADAM, entropy_cost=0.003),
    # Slowly enough that its discount is still near the one that the known values have.
    "stacx": Stacx(**COMMON, **ADAM, entropy_cost=0.003, meta_learning_rate=0.001),
    "ppo": PPO(**COMMON, entropy_cost=0.003, num_epochs=2, num_minibatches=2),
    "q_lambda": QLambda(**COMMON, trace_lambda=0.9),
    "pqn": PQN(
        **COMMON | {"network": TorsoNetwork(MLP((16,), "tanh", layer_norm=True))},
        trace_lambda=0.9,
        epsilon=Linear(1.0, 0.05, 10_000.0),
        optimizer=Optimizer(),
    ),
    "dqn": DQN(**COMMON, **EXPLORING, replay=PROBE_REPLAY),
    "rainbow": DQN(
        **COMMON,
        replay=dataclasses.replace(PROBE_REPLAY, prioritized=True),
        epsilon=0.0,
        target_update_period=20,
        n_step=3,
        dueling=True,
        noisy=True,
        value=Atoms(-12.0, 12.0, 121),
    ),
    "qr": DQN(
        **COMMON | {"learning_rate": 0.003}, **EXPLORING, replay=PROBE_REPLAY, value=Quantiles(11)
    ),
    "muzero": MuZero(
        **COMMON,
        replay=dataclasses.replace(PROBE_REPLAY, prioritized=True, batch_size=64),
        latent_size=16,
        dynamics_hidden=(32,),
        prediction_hidden=(32,),
        support_max=5.0,
        support_size=41,
        num_simulations=8,
        n_step=2,
        target_update_period=20,
    ),
    "r2d2": R2D2(
        **COMMON,
        replay=dataclasses.replace(PROBE_REPLAY, prioritized=True, batch_size=32),
        epsilon=0.05,
        apex_alpha=1.0,
        burn_in_length=4,
        unroll_length=8,
        n_step=2,
        target_update_period=20,
        rescale_values=False,
        action_reward_inputs=False,  # values are judged at single timesteps, which have none
    ),
}
PROBE_AGENTS["muzero-reanalyze"] = dataclasses.replace(
    PROBE_AGENTS["muzero"], reanalyze_fraction=0.8, bootstrap="search"
)
RANDOM = {"replay": PROBE_REPLAY, "random_frames": 30_000, "target_update_rate": 0.05}
CONTINUOUS_PROBE_AGENTS = {
    "a2c": PROBE_AGENTS["a2c"],
    "impala": PROBE_AGENTS["impala"],
    "stacx": PROBE_AGENTS["stacx"],
    # Its advantages never shrink, so its steps must.
    "ppo": dataclasses.replace(
        PROBE_AGENTS["ppo"], learning_rate=Linear(0.01, 0.0, frames=300 * 32 * 8)
    ),
    "ddpg": DDPG(**COMMON, **RANDOM),
    "td3": td3(**COMMON, **RANDOM),
    "fast_td3": td3(
        **COMMON | {"network": TorsoNetwork(MLP((16,), "tanh", residual_blocks=1))},
        **RANDOM,
        return_distribution=Atoms(-12.0, 12.0, 121),
        weight_decay=0.01,
    ),
    "muzero": PROBE_AGENTS["muzero"],
    "sac": SAC(**COMMON, **RANDOM, initial_temperature=0.01, target_entropy=-3.0),
    "sac-qr": SAC(
        **COMMON,
        **RANDOM,
        initial_temperature=0.01,
        target_entropy=-3.0,
        return_distribution=Quantiles(11),
    ),
}
# As for the probe, with memories, and by the sequences of its rollouts.
RECURRENT_PROBE_AGENTS = {
    name: dataclasses.replace(
        CONTINUOUS_PROBE_AGENTS[name],
        network=RECURRENT_TANH,
        replay=dataclasses.replace(PROBE_REPLAY, batch_size=32),
        recurrence=Recurrence(burn_in_length=4, unroll_length=8, head_size=16),
    )
    for name in ("td3", "sac")
}
