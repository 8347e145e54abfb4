"""TD3+BC: TD3 from a data set, whose policy stays near the recorded actions.

Source: Fujimoto and Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning" (arXiv
2106.06860). Different from the authors' code: observations are normalized by running moments of the
replayed transitions, not by those of the whole data set, computed before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.continuous import learning
from podracer.agents.continuous.learning import Transition
from podracer.agents.ddpg import DDPG, DDPGState, Method
from podracer.devices.reductions import MaskedMean, global_mean, mean_of
from podracer.fields import bounded, struct
from podracer.types import EnvironmentSpec, Metrics, Params
from podracer_offline.records import as_recorded, require_records


@struct
class TD3BC(DDPG):
    """DDPG whose policy also clones the recorded actions; `td3_bc` has the paper's settings."""

    cloning_alpha: float = bounded(2.5)
    """Weight alpha of the action value, over its mean size in the batch, in the policy's loss; 0
    clones alone."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        inner = require_records(spec, "TD3+BC")
        networks = learning.build_networks(self, inner, policy_outputs=1)
        return as_recorded(learning.build(self, _TD3BC, networks, inner, context), spec)


class _TD3BC(Method):
    settings: TD3BC

    def actor_loss(
        self, actor: Params, state: DDPGState, transition: Transition, axis: str | None = None
    ) -> tuple[MaskedMean, Metrics]:
        """Return -λ Q(s, μ(s)) + (μ(s) - a)², equations 4 and 5.

        λ is alpha over the mean |Q| of the whole batch.
        """
        obs, mask = transition.timestep.observation, transition.mask
        action = self.policy(actor, obs)
        q = self.networks.q_values(state.params.critics[:1], obs, action)[0]
        size = global_mean(mean_of(jnp.abs(jax.lax.stop_gradient(q)), mask), axis)
        value_weight = self.settings.cloning_alpha / jnp.maximum(size.value, 1e-12)
        error = jnp.mean((action - transition.action) ** 2, axis=-1)
        loss = mean_of(error - value_weight * q, mask)
        return loss, {"actor_loss": loss, "cloning_loss": mean_of(error, mask)}


def td3_bc(**settings: Any) -> TD3BC:
    """Return TD3 as TD3+BC (Fujimoto and Gu 2021); `settings` override its fields."""
    td3 = {"num_critics": 2, "policy_delay": 2, "target_noise_std": 0.2}
    return TD3BC(**{**td3, "normalize_observations": True, **settings})
