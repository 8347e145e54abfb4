"""The network of DiscoRL's update rule: from a rollout to the targets of a student's update.

A student predicts, besides its policy pi and its action values q, two categorical distributions
that have a meaning only to the rule: y(s) and z(s, a). A backward LSTM over the rollout returns
what they and the policy should have been. A second, slow LSTM takes one step for each update and
scales the outputs of the first: the rule's memory of the student's lifetime.
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms", methods,
and the published code (github.com/google-deepmind/disco_rl).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.common.value_based import gather_action
from podracer.agents.rules.common import backward_resets
from podracer.agents.rules.disco.network import Outputs
from podracer.agents.rules.disco.values import Values
from podracer.agents.rules.lifetimes import Experience
from podracer.fields import struct
from podracer.networks.layers import affine
from podracer.networks.memory import lstm
from podracer.ops.action_masks import mask_logits

Array = np.ndarray | jax.Array  # in a file and in the state
Memory = tuple[jax.Array, jax.Array]  # hidden and cell state of the lifetime's LSTM, f32 [M]


@struct
class Affine:
    """Parameters of a linear layer."""

    weight: Array  # f32 [n, m]
    bias: Array  # f32 [m]


@struct
class LSTMGates:
    """Parameters of an LSTM, its gates in the order of `networks.memory.lstm`."""

    input: Array  # f32 [n, 4 H]
    hidden: Array  # f32 [H, 4 H]
    bias: Array  # f32 [4 H]


@struct
class EmbeddingParams:
    """Parameters that embed what the rule sees of a transition."""

    prediction: tuple[Affine, Affine]  # from y to one number
    action_prediction: tuple[Affine, Affine]  # from z to one number for each action
    actions: tuple[Affine, Affine]  # from all that is known about each action


@struct
class RuleParams:
    """Parameters of the rule; only discovery changes them."""

    embedding: EmbeddingParams
    core: LSTMGates  # backward over a rollout
    modulation: Affine  # from the lifetime's memory to a factor for each output of the core
    prediction: Affine  # target of y
    action_prediction: Affine  # target of z
    policy: tuple[Affine, Affine]  # target of the policy, action by action
    summary: Affine  # from a transition to an input of the lifetime's LSTM
    lifetime_embedding: EmbeddingParams
    lifetime_input: Affine
    lifetime: LSTMGates  # over updates


@struct
class Targets:
    """What the student's outputs should have been at T timesteps, as logits."""

    policy: jax.Array  # f32 [T, B, A]
    prediction: jax.Array  # f32 [T, B, Y]
    action_prediction: jax.Array  # for the action taken, f32 [T, B, Y]


def init_memory(units: int) -> Memory:
    """Return the memory at the beginning of a lifetime, for an LSTM of so many units."""
    zeros = jnp.zeros(units)
    return zeros, jnp.copy(zeros)


def apply_rule(
    params: RuleParams,
    memory: Memory,
    data: Experience,
    online: Outputs,
    target: Outputs,
    values: Values,
) -> tuple[Targets, jax.Array]:
    """Return the targets of T transitions, and the memory's inputs from each, `[T, B, n]`.

    `online` and `target` are the outputs of the student and of its target parameters for T+1
    timesteps. All environments share the memory, or it leads with B.
    """
    features, of_actions = _embed(params.embedding, data, online, target, values)
    resets = backward_resets(data.valid, data.discount)
    zeros = jnp.zeros((features.shape[1], params.core.hidden.shape[0]))
    outputs: Any = _unroll(params.core, features, resets, (zeros, zeros), reverse=True)
    factors = _linear(params.modulation, memory[0])
    hidden = outputs[0] * factors.reshape(1, -1, factors.shape[-1])

    by_action = jnp.broadcast_to(hidden[:, :, None], (*of_actions.shape[:-1], hidden.shape[-1]))
    by_action = jnp.concatenate([by_action, of_actions], axis=-1)
    by_action = _across_actions(params.policy[0], by_action)
    policy = _linear(params.policy[1], by_action)[..., 0]
    targets = Targets(
        mask_logits(jax.tree.map(lambda x: x[:-1], data.observation), policy),
        _linear(params.prediction, hidden),
        _linear(params.action_prediction, hidden),
    )

    slow = params.lifetime_embedding
    features, _ = _embed(slow, data, online, target, values)
    prediction = _embed_distribution(slow.prediction, targets.prediction)
    summary = _linear(params.summary, hidden)
    inputs = jnp.concatenate([features, summary, prediction], axis=-1)
    return targets, _linear(params.lifetime_input, inputs)


def remember(params: RuleParams, memory: Memory, inputs: jax.Array) -> Memory:
    """Return the memory after an update; its inputs are means over transitions.

    Memory and inputs are `[n]`, or `[L, n]` of L lifetimes.
    """
    hidden, cell, inputs = (x.reshape(-1, x.shape[-1]) for x in (*memory, inputs))
    one_step = (inputs[None], jnp.zeros((1, len(inputs)), bool), (hidden, cell))
    outputs: Any = _unroll(params.lifetime, *one_step, reverse=False)
    hidden, cell = (x.reshape(memory[0].shape) for x in outputs[1])
    return hidden, cell


def _embed(
    params: EmbeddingParams, data: Experience, online: Outputs, target: Outputs, values: Values
) -> tuple[jax.Array, jax.Array]:
    """Return features of each transition `[T, B, n]`, and of each of its actions `[T, B, A, m]`."""
    policy, target_policy = jax.nn.softmax(online.policy), jax.nn.softmax(target.policy)
    behavior = jax.nn.softmax(data.behavior)

    def of_action(x: jax.Array) -> jax.Array:  # [T, B, A, n] -> [T, B, n]
        return gather_action(x, data.action)

    def probability(x: jax.Array) -> jax.Array:  # [T, B, A] -> [T, B, 1]
        return of_action(x[..., None])

    def of_actions(x: jax.Array) -> list[jax.Array]:  # [T+1, B, A, 1] -> three [T, B, n]
        mean = jnp.sum(x * policy[..., None], axis=2)
        return [of_action(x[:-1]), _pair(mean), _pair(jnp.max(x, axis=2))]

    y, target_y = (_embed_distribution(params.prediction, o.prediction) for o in (online, target))
    z, target_z = (
        _embed_distribution(params.action_prediction, o.action_prediction) for o in (online, target)
    )
    channels = jnp.stack(
        [
            policy[:-1],
            behavior,
            target_policy[:-1],
            z[:-1, ..., 0],
            target_z[:-1, ..., 0],
            _signed_log(values.q[:-1]),
            _signed_log(values.q_advantages[:-1]),
            values.normalized_q_advantages[:-1],
            jax.nn.one_hot(data.action, policy.shape[-1]),
        ],
        axis=-1,
    )
    actions = _across_actions(params.actions[1], _across_actions(params.actions[0], channels))
    return jnp.concatenate(
        [
            probability(policy[:-1]),
            probability(behavior),
            _signed_log(data.reward)[..., None],
            data.discount[..., None],
            _pair(_signed_log(values.v)[..., None]),
            _signed_log(values.advantages)[..., None],
            values.normalized_advantages[..., None],
            probability(target_policy[:-1]),
            _pair(y),
            _pair(target_y),
            *of_actions(z),
            *of_actions(target_z),
            jnp.mean(actions, axis=2),
            of_action(actions),
        ],
        axis=-1,
    ), actions


def _embed_distribution(layers: tuple[Affine, Affine], logits: jax.Array) -> jax.Array:
    """Return one number `[..., 1]` for each distribution `[..., Y]`."""
    return _linear(layers[1], jax.nn.relu(_linear(layers[0], jax.nn.softmax(logits))))


def _pair(x: jax.Array) -> jax.Array:
    """Return what is known of T+1 timesteps for T transitions: before and after each."""
    return jnp.concatenate([x[:-1], x[1:]], axis=-1)


def _signed_log(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def _across_actions(layer: Affine, x: jax.Array) -> jax.Array:
    """Return features of each action from its own `[T, B, A, n]` and from the mean of all."""
    mean = jnp.broadcast_to(jnp.mean(x, axis=2, keepdims=True), x.shape)
    return jax.nn.relu(_linear(layer, jnp.concatenate([x, mean], axis=-1)))


def _linear(layer: Affine, x: jax.Array) -> jax.Array:
    return affine(x, layer.weight, layer.bias)


def _unroll(
    layer: LSTMGates, inputs: jax.Array, resets: jax.Array, state: Any, *, reverse: bool
) -> tuple[jax.Array, Any]:
    gates = affine(inputs, layer.input, layer.bias)
    return lstm(gates, layer.hidden, resets, state, reverse)
