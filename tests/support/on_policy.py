"""Small agents that learn on policy, and their first gradient as textbooks have it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from walk import ACTIONS, BOX, WALK, T, Walk, network

from podracer.agent import Blueprint, Context
from podracer.agents.a2c import A2C
from podracer.agents.common import actor_critic
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.agents.stacx import Stacx
from podracer.environment import auto_reset
from podracer.ops.distributions import policy
from podracer.ops.returns import generalized_advantages
from podracer.types import LearnerState, Trajectory

ON_POLICY = {
    "a2c": A2C,
    "impala": Impala,
    "ppo": PPO,
    "pqn": PQN,
    "q_lambda": QLambda,
    "stacx": Stacx,
}
CONTINUOUS = auto_reset(Walk(BOX))


def small(name: str, memory: str = "none", **fields: Any) -> Any:
    """Settings of a small agent; PPO's heads have a torso and a memory each, others share one."""
    return ON_POLICY[name](network=network(memory, name != "ppo"), **fields)


# Without clipped gradients, and with an entropy bonus that shows. PPO without minibatches, so that
# its first gradient is of the policy that acted. Tests share these: each costs a compile.
LEARNERS = {
    "a2c": {"max_gradient_norm": 1e9, "entropy_cost": 0.5},
    "impala": {"max_gradient_norm": 1e9, "entropy_cost": 0.5, "optimizer": Optimizer()},
    "ppo": {"max_gradient_norm": 1e9, "entropy_cost": 0.5, "num_epochs": 1, "num_minibatches": 1},
    "pqn": {"max_gradient_norm": 1e9, "num_epochs": 1, "num_minibatches": 1},
    "q_lambda": {},
    "stacx": {"max_gradient_norm": 1e9, "entropy_cost": 0.5, "optimizer": Optimizer()},
}


def learner(name: str, memory: str = "none", **fields: Any) -> Any:
    return small(name, memory, **LEARNERS[name] | fields)


def blueprint(settings: Any, env: Any = WALK) -> Blueprint:
    return Blueprint(settings, env.spec, Context(T))


def textbook_gradient(
    settings: Any, state: LearnerState, trajectory: Trajectory, policy_loss: Any
) -> Any:
    """Of a policy loss, a squared error to λ-returns and an entropy bonus, over what is valid.

    `policy_loss` gets log-probabilities now and when acting, and generalized advantages.
    """
    net = actor_critic.build_network(settings.network, WALK.spec)
    timesteps, next_timesteps, valid = (
        trajectory.timesteps(),
        trajectory.next_timesteps(),
        trajectory.valid(),
    )
    extras = trajectory.steps.extras

    def forward(params: Any) -> Any:
        outputs, _ = net.apply(params, trajectory.carry, timesteps.observation, timesteps.first)
        return policy(ACTIONS, outputs["policy"][:-1]), outputs["value"][..., 0]

    values = forward(state.shared.params)[1]
    discounts = settings.discount * next_timesteps.discount
    lambda_ = settings.trace_lambda if isinstance(settings, Impala) else settings.gae_lambda
    advantages = generalized_advantages(
        values[:-1], values[1:], next_timesteps.reward, discounts, valid, lambda_
    )

    def loss(params: Any) -> jax.Array:
        distribution, value = forward(params)
        log_prob = distribution.log_prob(extras["sample"])
        terms = policy_loss(log_prob, extras.get("log_prob"), advantages)
        terms += settings.value_cost * 0.5 * (value[:-1] - values[:-1] - advantages) ** 2
        terms -= settings.entropy_cost * distribution.entropy()
        return jnp.mean(terms, where=valid)

    return jax.jit(jax.grad(loss))(state.shared.params)


def standardized(x: jax.Array, valid: jax.Array) -> jax.Array:
    return (x - jnp.mean(x, where=valid)) / jnp.std(x, where=valid)
