"""The loss of a DiscoRL student: its outputs are brought to the rule's targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer.agents.common.lifetimes import Experience
from podracer.agents.common.value_based import gather_action
from podracer.agents.disco.network import Outputs
from podracer.agents.disco.rule import Targets
from podracer.ops.distributions import Categorical
from podracer.ops.transforms import squash, two_hot
from podracer.types import Metrics


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
    before = jax.tree.map(lambda x: x[:-1], outputs)

    def of_action(x: jax.Array) -> jax.Array:
        return gather_action(x, data.action)

    divergence = _divergence(next_policy, of_action(before.next_policy))
    log_values = jax.nn.log_softmax(of_action(before.action_value))
    losses = {
        "policy_loss": _divergence(targets.policy, before.policy),
        "prediction_loss": _divergence(targets.prediction, before.prediction),
        "action_prediction_loss": _divergence(
            targets.action_prediction, of_action(before.action_prediction)
        ),
        "next_policy_loss": jnp.where(data.discount > 0, divergence, 0.0),
        "value_loss": -jnp.sum(two_hot(squash(value_targets), support) * log_values, axis=-1),
    }
    costs = dict.fromkeys(losses, 1.0) | {"value_loss": value_cost}
    parts = {name: jnp.mean(weights * loss) for name, loss in losses.items()}
    total = sum((costs[name] * part for name, part in parts.items()), jnp.float32(0))
    entropy = jnp.mean(weights * Categorical(before.policy).entropy())
    return total, {"loss": total, **parts, "entropy": entropy}


def _divergence(target: jax.Array, logits: jax.Array) -> jax.Array:
    return Categorical(target).divergence(Categorical(logits))
