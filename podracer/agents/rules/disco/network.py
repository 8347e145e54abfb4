"""The network of a DiscoRL student: a policy and predictions of states and of actions.

Predictions of actions come from a model that takes one step: an LSTM, whose state comes from the
observation and whose input is the action.
Source: Oh et al. 2025, methods; the model is inspired by MuZero's and Muesli's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from podracer.agents.rules.common import require_for_rule
from podracer.fields import struct
from podracer.networks import MLP, Head, Network, NetworkBuilder, TorsoNetwork, outputs
from podracer.networks.layers import affine
from podracer.ops.action_masks import mask_logits
from podracer.types import ArraySpec, Carry, EnvironmentSpec, Params, PyTree


@struct
class Outputs:
    """Logits of a student for timesteps `[T, B]`."""

    policy: jax.Array  # f32 [T, B, A]
    prediction: jax.Array  # y(s), f32 [T, B, Y]
    action_prediction: jax.Array  # z(s, a), f32 [T, B, A, Y]
    action_value: jax.Array  # for q(s, a), f32 [T, B, A, Z]
    next_policy: jax.Array  # policy of the next timestep, f32 [T, B, A, A]


@struct
class StudentParams:
    """Parameters of a student."""

    torso: Params  # with the heads of policy, y and of the model's first state
    hidden: jax.Array  # in the model's LSTM, f32 [H, 4 H]; gates in the order of `memory.lstm`
    action: jax.Array  # f32 [A, 4 H]
    bias: jax.Array  # f32 [4 H]
    heads: Params  # for the model's outputs


@dataclasses.dataclass(frozen=True)
class StudentNetwork:
    """Functions of a student's parameters."""

    num_actions: int
    model_size: int
    torso: Network
    heads: Network

    def init(self, key: jax.Array) -> StudentParams:
        torso_key, hidden_key, action_key, heads_key = jax.random.split(key, 4)
        size, limit = self.model_size, (self.model_size + self.num_actions) ** -0.5

        def uniform(key: jax.Array, rows: int) -> jax.Array:
            return jax.random.uniform(key, (rows, 4 * size), minval=-limit, maxval=limit)

        return StudentParams(
            self.torso.init(torso_key),
            uniform(hidden_key, size),
            uniform(action_key, self.num_actions),
            jnp.zeros(4 * size).at[size : 2 * size].set(1.0),  # it begins by remembering
            self.heads.init(heads_key),
        )

    def policy(
        self, params: StudentParams, carry: Carry, observation: PyTree, first: jax.Array
    ) -> tuple[jax.Array, Carry]:
        """Return the policy's logits `[T, B, A]` and the recurrent state after the last step."""
        heads, carry = self.torso.apply(params.torso, carry, observation, first)
        return mask_logits(observation, heads["policy"]), carry

    def apply(
        self, params: StudentParams, carry: Carry, observation: PyTree, first: jax.Array
    ) -> Outputs:
        """Return all outputs for observations `[T, B, ...]`."""
        heads, _ = self.torso.apply(params.torso, carry, observation, first)
        hidden = self._step(params, heads["state"])
        rows = outputs(self.heads, params.heads, hidden.reshape(-1, self.model_size))
        of_actions = {name: x.reshape(*hidden.shape[:3], -1) for name, x in rows.items()}
        policy = mask_logits(observation, heads["policy"])
        return Outputs(policy=policy, prediction=heads["prediction"], **of_actions)

    def _step(self, params: StudentParams, cell: jax.Array) -> jax.Array:
        """Return the model's hidden states `[T, B, A, H]` after each action from `[T, B, H]`."""
        inputs: jax.Array = affine(jnp.tanh(cell), params.hidden, params.bias)
        gates = inputs[:, :, None] + params.action[None, None]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell[:, :, None] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell)


def build_network(
    network: NetworkBuilder,
    spec: EnvironmentSpec,
    *,
    predictions: int,
    support_size: int,
    model_size: int,
) -> StudentNetwork:
    """Build the network of a student whose predictions y and z have as many categories."""
    num_actions = require_for_rule(spec).num_actions
    # Small initial weights: a nearly uniform policy.
    torso = {
        "policy": Head(num_actions, 0.01),
        "prediction": Head(predictions, 0.01),
        "state": Head(model_size),
    }
    hidden = (model_size,)
    dtype = network.compute_dtype if isinstance(network, TorsoNetwork) else "float32"
    heads = {
        "action_prediction": Head(predictions, hidden=hidden),
        "action_value": Head(support_size, hidden=hidden),
        "next_policy": Head(num_actions, hidden=hidden),
    }
    return StudentNetwork(
        num_actions,
        model_size,
        torso=network.build(spec.observation, torso),
        heads=TorsoNetwork(MLP(()), compute_dtype=dtype).build(ArraySpec(hidden), heads),
    )
