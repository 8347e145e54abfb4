"""What a student of a DiscoRL rule keeps, and the loss by which it follows the rule's targets.

Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms", methods.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.optimizers import take_step
from podracer.agents.common.value_based import gather_action
from podracer.agents.rules.disco.network import Outputs, StudentNetwork
from podracer.agents.rules.disco.rule import Memory, Targets, init_memory
from podracer.agents.rules.disco.values import AdvantageMoments, init_moments
from podracer.agents.rules.lifetimes import Experience
from podracer.fields import struct
from podracer.ops.distributions import Categorical
from podracer.ops.transforms import squash, two_hot
from podracer.types import Metrics, Params

# Constants with which the published rules were discovered.
_TARGET_DECAY = 0.9  # target parameters are an exponential moving average
_MAX_UPDATE = 1.0  # for a parameter, before the learning rate


@struct
class StudentState:
    """State of a student: parameters, and what the rule knows of the lifetime."""

    params: Params  # `StudentParams`
    target_params: Params
    optimizer_state: optax.OptState
    moments: AdvantageMoments
    memory: Memory


State = TypeVar("State", bound=StudentState)


def build_optimizer(root_epsilon: float = 0.0) -> optax.GradientTransformation:
    """Return the unscaled optimizer of a student."""
    return optax.chain(optax.scale_by_adam(eps_root=root_epsilon), optax.clip(_MAX_UPDATE))


def init_student(
    network: StudentNetwork,
    optimizer: optax.GradientTransformation,
    memory_units: int,
    key: jax.Array,
) -> StudentState:
    """Return an untrained student."""
    params: Params = network.init(key)
    return StudentState(
        params,
        target_params=jax.tree.map(jnp.copy, params),
        optimizer_state=optimizer.init(params),
        moments=init_moments(),
        memory=init_memory(memory_units),
    )


def descend(
    optimizer: optax.GradientTransformation,
    learning_rate: float | jax.Array,
    state: State,
    grads: Params,
) -> State:
    """Return a student whose parameters took a step, and their average followed the old ones."""
    params, optimizer_state = take_step(
        optimizer, state.params, state.optimizer_state, grads, learning_rate
    )
    target_params = optax.incremental_update(state.params, state.target_params, 1.0 - _TARGET_DECAY)
    return dataclasses.replace(
        state, params=params, target_params=target_params, optimizer_state=optimizer_state
    )


def student_loss(
    outputs: Outputs,
    next_policy: jax.Array,
    targets: Targets,
    value_targets: jax.Array,
    data: Experience,
    weights: jax.Array,
    support: jax.Array,
    value_cost: float | jax.Array,
) -> tuple[jax.Array, Metrics]:
    """Return a student's loss, a mean with `weights [T, B]`, and its parts.

        L = KL(π̂ || π) + KL(ŷ || y) + KL(ẑ || z(a)) + KL(π' || p(a)) + c_q H(two-hot(h(G)), q(a))

    Targets are constants. p(a) is the policy that was predicted for the next timestep, and π' the
    actual one, `next_policy [T, B, A]`, where the episode goes on. `value_targets` G are `[T, B]`.
    """
    acted = jax.tree.map(lambda x: x[:-1], outputs)

    def of_action(x: jax.Array) -> jax.Array:
        return gather_action(x, data.action)

    divergence = _divergence(next_policy, of_action(acted.next_policy))
    log_values = jax.nn.log_softmax(of_action(acted.action_value))
    losses = {
        "policy_loss": _divergence(targets.policy, acted.policy),
        "prediction_loss": _divergence(targets.prediction, acted.prediction),
        "action_prediction_loss": _divergence(
            targets.action_prediction, of_action(acted.action_prediction)
        ),
        "next_policy_loss": jnp.where(data.discount > 0, divergence, 0.0),
        "value_loss": -jnp.sum(two_hot(squash(value_targets), support) * log_values, axis=-1),
    }
    costs = dict.fromkeys(losses, 1.0) | {"value_loss": value_cost}
    parts = {name: jnp.mean(weights * loss) for name, loss in losses.items()}
    total = sum((costs[name] * part for name, part in parts.items()), jnp.float32(0))
    entropy = jnp.mean(weights * Categorical(acted.policy).entropy())
    return total, {"loss": total, **parts, "entropy": entropy}


def _divergence(target: jax.Array, logits: jax.Array) -> jax.Array:
    return Categorical(target).divergence(Categorical(logits))
