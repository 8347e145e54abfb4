"""The update rule of LPG: a backward network from a rollout to a student's update targets.

A student has a policy pi and, instead of values, a categorical prediction y(s), which means nothing
until the rule gives it a meaning. For every step the rule returns pi-hat, by how much the action
taken should become more likely, and y-hat, the target of the prediction.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from podracer.agents.rules.common import apply_linear, backward_lstm, require_for_rule
from podracer.agents.rules.lifetimes import Experience
from podracer.fields import static, struct
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical
from podracer.types import EnvironmentSpec, PyTree


@struct
class Outputs:
    """Logits of a student's network for T+1 timesteps, `[T+1, B, n]`."""

    policy: jax.Array
    prediction: jax.Array


@struct
class Targets:
    """Update targets of a rule for T transitions."""

    policy: jax.Array  # pi-hat, f32 [T, B]
    prediction: jax.Array  # y-hat, probabilities, f32 [T, B, m]


@struct
class RuleParams:
    """Parameters of an update rule, by layer."""

    core: Any  # eqx.nn.LSTMCell, the others eqx.nn.Linear
    embed: Any
    narrow: Any
    policy: Any
    prediction: Any


@struct
class UpdateRule:
    """Network of an update rule: a backward LSTM over the steps of a rollout.

    Its forget gates begin without the bias of 1 that haiku adds: the rule of Jackson et al. 2023 is
    a GRU, which has none.
    """

    units: int = static(default=256, low=1)
    """Units of the update rule's LSTM."""
    embedding: int = static(default=16, low=1)
    """Hidden units of the embedding of a student's prediction y."""
    predictions: int = static(default=8, low=1)
    """Categories m of a student's prediction y."""

    def init(self, key: jax.Array) -> RuleParams:
        keys = jax.random.split(key, 5)
        return RuleParams(
            embed=eqx.nn.Linear(self.predictions, self.embedding, key=keys[0]),
            narrow=eqx.nn.Linear(self.embedding, 1, key=keys[1]),
            core=eqx.nn.LSTMCell(6, self.units, key=keys[2]),
            policy=eqx.nn.Linear(self.units, 1, key=keys[3]),
            prediction=eqx.nn.Linear(self.units, self.predictions, key=keys[4]),
        )

    def apply(
        self, params: RuleParams, data: Experience, outputs: Outputs, discount: jax.Array | float
    ) -> Targets:
        """Return targets for every transition, computed from the last one back to the first."""
        action_probability = jnp.exp(Categorical(outputs.policy[:-1]).log_prob(data.action))
        # One number for each prediction.
        hidden = jax.nn.relu(apply_linear(params.embed, jax.nn.softmax(outputs.prediction)))
        embedded = apply_linear(params.narrow, hidden)[..., 0]
        is_terminal = data.discount == 0
        inputs = jnp.stack(
            [
                data.reward,
                is_terminal.astype(jnp.float32),
                jnp.broadcast_to(jnp.asarray(discount, jnp.float32), data.reward.shape),
                action_probability,
                embedded[:-1],
                jnp.where(is_terminal, 0.0, embedded[1:]),
            ],
            axis=-1,
        )
        hidden = backward_lstm(params.core, inputs, data.valid, data.discount)
        return Targets(
            apply_linear(params.policy, hidden)[..., 0],
            jax.nn.softmax(apply_linear(params.prediction, hidden)),
        )


def build_network(network: NetworkBuilder, spec: EnvironmentSpec, rule: UpdateRule) -> Network:
    """Return a student's network, whose policy and prediction are nearly uniform at first."""
    num_actions = require_for_rule(spec).num_actions
    heads = {"policy": Head(num_actions, 0.01), "prediction": Head(rule.predictions, 0.01)}
    return network.build(spec.observation, heads)


def student_optimizer(kind: Literal["sgd", "adam"]) -> optax.GradientTransformation:
    """Return the unscaled optimizer of a student: plain descent suits tables, Adam networks."""
    if kind == "sgd":
        return optax.identity()
    # The constant within the root gives Adam a derivative where a gradient is 0.
    return optax.scale_by_adam(eps_root=1e-12)


def to_outputs(observation: PyTree, heads: dict[str, jax.Array]) -> Outputs:
    """Return a student's outputs from the heads of its network, without masked actions."""
    return Outputs(mask_logits(observation, heads["policy"]), heads["prediction"])


def student_loss(
    outputs: Outputs, targets: Targets, data: Experience, prediction_cost: jax.Array | float
) -> jax.Array:
    """Return a student's loss, a mean over all T x B steps in which invalid ones count as 0.

    `- pi-hat log pi(a|s) + alpha_y KL(y || y-hat)` (Oh et al. 2020, equation 3).
    """
    mask = data.valid.astype(jnp.float32)
    log_prob = Categorical(outputs.policy[:-1]).log_prob(data.action)
    log_y = jax.nn.log_softmax(outputs.prediction[:-1])
    divergence = jnp.sum(jnp.exp(log_y) * (log_y - jnp.log(targets.prediction + 1e-8)), axis=-1)
    return jnp.mean(mask * (prediction_cost * divergence - targets.policy * log_prob))
