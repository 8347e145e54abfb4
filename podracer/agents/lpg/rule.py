"""A learned update rule: from a trajectory to what a learner should do, by a backward network.

The learner has a policy and, instead of values, a categorical prediction y(s) that means nothing
until the rule gives it a meaning. For every step the rule says how much more likely the action
should become, and what the prediction should have been.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import mask_logits
from podracer.networks import Head, Network
from podracer.ops.dense import dense
from podracer.ops.distributions import Categorical
from podracer.ops.lstm import backward_lstm
from podracer.types import Carry, Params, PyTree, Trajectory, struct


@struct
class Experience:
    """What a learner learns from: T transitions of B environments, time first."""

    observation: PyTree  # [T+1, B, ...]
    first: jax.Array  # bool [T+1, B]
    action: jax.Array  # i32 [T, B]
    reward: jax.Array  # f32 [T, B], for that action
    discount: jax.Array  # f32 [T, B], 0 where the action ended the episode
    valid: jax.Array  # bool [T, B], whether the action led anywhere
    carry: Carry  # the network's memory at the first step


def experience(trajectory: Trajectory) -> Experience:
    """The same steps without what acting remembered of them."""
    timesteps, after = trajectory.timesteps(), trajectory.next_timesteps()
    return Experience(
        timesteps.observation, timesteps.first, trajectory.steps.action,
        after.reward, after.discount, trajectory.valid(), trajectory.carry,
    )  # fmt: skip


@struct
class Outputs:
    """What a learner's network says of T+1 timesteps, logits `[T+1, B, n]`."""

    policy: jax.Array
    prediction: jax.Array


@struct
class Targets:
    """What a rule asks for."""

    policy: jax.Array  # f32 [T, B], by how much the action taken should become more likely
    prediction: jax.Array  # f32 [T, B, m], probabilities that the prediction should have had


@struct
class UpdateRule:
    """The rule's network; its parameters are made by `init` and given to `apply`."""

    units: int = 256
    embedding: int = 16
    predictions: int = 8

    def init(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, 5)
        return {
            "embed": eqx.nn.Linear(self.predictions, self.embedding, key=keys[0]),
            "narrow": eqx.nn.Linear(self.embedding, 1, key=keys[1]),
            "core": eqx.nn.LSTMCell(6, self.units, key=keys[2]),
            "policy": eqx.nn.Linear(self.units, 1, key=keys[3]),
            "prediction": eqx.nn.Linear(self.units, self.predictions, key=keys[4]),
        }

    def apply(
        self, params: Params, data: Experience, outputs: Outputs, discount: jax.Array | float
    ) -> Targets:
        """Targets for every transition, read from the last one back to the first."""
        chosen = jnp.exp(Categorical(outputs.policy[:-1]).log_prob(data.action))
        embedded = self._embed(params, jax.nn.softmax(outputs.prediction))
        ended = data.discount == 0
        inputs = jnp.stack([
            data.reward,
            ended.astype(jnp.float32),
            jnp.broadcast_to(jnp.asarray(discount, jnp.float32), data.reward.shape),
            chosen,
            embedded[:-1],
            jnp.where(ended, 0.0, embedded[1:]),
        ], axis=-1)  # fmt: skip
        core = params["core"]
        pushed = dense(inputs, core.weight_ih.T) + core.bias.reshape(1, 1, -1)
        # Nothing behind an end is seen from before it: what led to a cut begins with no memory.
        cut = jnp.concatenate([~data.valid[1:], jnp.zeros_like(data.valid[:1])])
        hidden: jax.Array = backward_lstm(pushed, core.weight_hh.T, ended | cut)
        return Targets(
            _linear(params["policy"], hidden)[..., 0],
            jax.nn.softmax(_linear(params["prediction"], hidden)),
        )

    def _embed(self, params: Params, prediction: jax.Array) -> jax.Array:
        """One number for each prediction `[..., m]`."""
        hidden = jax.nn.relu(_linear(params["embed"], prediction))
        return _linear(params["narrow"], hidden)[..., 0]


def _linear(layer: Any, x: jax.Array) -> jax.Array:
    made: jax.Array = dense(x, layer.weight.T)
    return made + layer.bias.reshape((1,) * (made.ndim - 1) + (-1,))


def heads(num_actions: int, predictions: int) -> dict[str, Head]:
    """What a learner's network needs: hardly a preference at first."""
    return {"policy": Head(num_actions, 0.01), "prediction": Head(predictions, 0.01)}


def optimizer(
    kind: Literal["sgd", "adam"], rate: float | jax.Array
) -> optax.GradientTransformation:
    """Of learners: plain descent for tables, Adam for networks."""
    if kind == "sgd":
        return optax.sgd(rate)
    # Within the root, so that it has a derivative where a gradient is 0.
    return optax.adam(rate, eps_root=1e-12)


def forward(network: Network, data: Experience, params: Params) -> Outputs:
    """The learner's network on all timesteps of its experience."""
    made, _ = network.apply(params, data.carry, data.observation, data.first)
    return Outputs(mask_logits(data.observation, made["policy"]), made["prediction"])


def loss(outputs: Outputs, targets: Targets, data: Experience, cost: jax.Array | float):
    """What a learner descends on: a mean over all T x B steps, cut ones as zeros.

    - log pi(a|s) policy target + cost KL(y || prediction target)
    """
    mask = data.valid.astype(jnp.float32)
    log_prob = Categorical(outputs.policy[:-1]).log_prob(data.action)
    log_y = jax.nn.log_softmax(outputs.prediction[:-1])
    divergence = jnp.sum(jnp.exp(log_y) * (log_y - jnp.log(targets.prediction + 1e-8)), axis=-1)
    return jnp.mean(mask * (cost * divergence - targets.policy * log_prob))


def learner_grads(
    rule: UpdateRule,
    rule_params: Params,
    forward: Callable[[Params], Outputs],
    params: Params,
    data: Experience,
    discount: jax.Array | float,
    cost: jax.Array | float,
) -> tuple[Params, tuple[Outputs, Targets]]:
    """The gradient that the rule gives a learner with these parameters.

    Targets count as given, so the learner does not change what it is asked for; but they stay a
    function of the rule and of the learner, which meta-gradients differentiate.
    """
    outputs, back = jax.vjp(forward, params)
    targets = rule.apply(rule_params, data, outputs, discount)
    (grads,) = back(jax.grad(loss)(outputs, targets, data, cost))
    return grads, (outputs, targets)
