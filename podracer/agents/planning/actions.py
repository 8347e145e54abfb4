"""Actions that a search chooses among: all discrete ones, or samples of continuous ones.

Source of the latter: Hubert et al. 2021, "Learning and Planning in Complex Action Spaces" (arXiv
2104.06303), Sampled MuZero. At each node K actions are sampled from a proposal beta, and the prior
of the search is (β̂ / β) π at each of them, where β̂, their empirical distribution, is 1/K. Here
beta is the policy π itself, so the prior is uniform: likely actions have more samples near them,
not samples that count more.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from podracer.agents.common.value_based import require_discrete
from podracer.ops import distributions
from podracer.types import ArraySpec, Continuous, Discrete, EnvironmentSpec

# By the name "samples" those at each state, f32 `[N, K, size]`, in units in which the bounds are
# -1 and 1, not clipped to them; empty for discrete actions.
Samples = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class SearchActions:
    """Actions A that a search chooses among at each state, by their indices."""

    space: Discrete | Continuous
    num_samples: int  # K; all discrete actions are searched

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """Specifications of what acting keeps of a search."""
        if isinstance(self.space, Discrete):
            return {"policy": ArraySpec((self.space.num_actions,)), "value": ArraySpec(())}
        samples = ArraySpec((self.num_samples, self.space.size))
        policy = ArraySpec((self.num_samples,))
        return {"policy": policy, "value": ArraySpec(()), "samples": samples}

    @property
    def encoded_size(self) -> int:
        """Size of an action for the dynamics."""
        return self.space.num_actions if isinstance(self.space, Discrete) else self.space.size

    def encode(self, action: jax.Array) -> jax.Array:
        """Return the environment's actions `[N, ...]` for the dynamics, f32 `[N, encoded_size]`."""
        if isinstance(self.space, Discrete):
            return jax.nn.one_hot(action, self.space.num_actions)
        return distributions.from_bounds(self.space, action)

    def prior(self, policy: jax.Array, key: jax.Array) -> tuple[jax.Array, Samples]:
        """Return logits `[N, A]` of the search's prior, and samples, for outputs of the policy."""
        if isinstance(self.space, Discrete):
            return policy, {}
        N, K = len(policy), self.num_samples
        distribution = distributions.policy(self.space, jnp.repeat(policy, K, axis=0))
        samples = distribution.sample(jax.random.split(key, N * K))
        return jnp.zeros((N, K)), {"samples": samples.reshape(N, K, self.space.size)}

    def to_actions(self, index: jax.Array, samples: Samples) -> jax.Array:
        """Return the environment's actions that the indices `[N]` stand for."""
        if isinstance(self.space, Discrete):
            return index
        actions = samples["samples"][jnp.arange(len(index)), index]
        return distributions.to_bounds(self.space, actions)

    def log_probs(self, policy: jax.Array, samples: Samples) -> jax.Array:
        """Return log-probabilities `[N, A]` of all actions, or log-densities of the samples."""
        if isinstance(self.space, Discrete):
            return jax.nn.log_softmax(policy)
        return distributions.policy(self.space, policy[:, None]).log_prob(samples["samples"])


def search_actions(spec: EnvironmentSpec, num_samples: int) -> SearchActions:
    """Return the actions of an environment; raise `ConfigError` if they are several at once."""
    space = spec.action if isinstance(spec.action, Continuous) else require_discrete(spec)
    return SearchActions(space, num_samples)
