"""Representations of the value of an action: its mean, or the distribution of its return.

Each class is a setting of value-based agents. `size` is the number Z of network outputs for an
action, and `mean` computes the value from them. `mix` computes the outputs of a policy's value from
the actions' outputs. `loss` compares outputs with a bootstrapped target:

    G + γ X(s')        for a return G, a discount γ and the distribution X of the bootstrap value

Losses and priorities are `[N]`. `taus` are the probabilities that the outputs are quantiles at,
where these are drawn (`ImplicitQuantiles`), else None.

`Munchausen` makes targets of such values soft.
"""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from podracer.errors import ConfigError
from podracer.fields import Flag, bounded
from podracer.ops.transforms import evenly_spaced

Outputs = Float[Array, "N Z"]
ActionOutputs = Float[Array, "N A Z"]
Batch = Float[Array, "N"]
Probabilities = Float[Array, "N A"]  # one for each action
QValues = Float[Array, "N A"]


@dataclasses.dataclass(frozen=True)
class Mean:
    """Expected return, learned with the Huber loss (Mnih et al. 2015)."""

    @property
    def size(self) -> int:
        return 1

    def mean(self, outputs: Float[Array, "*b Z"]) -> Float[Array, "*b"]:
        return outputs[..., 0]

    def mix(self, outputs: ActionOutputs, policy: Probabilities) -> Outputs:
        return _weighted_sum(outputs, policy)

    def loss(
        self,
        outputs: Outputs,
        next_outputs: Outputs,
        returns: Batch,
        discounts: Batch,
        taus: Outputs | None = None,
    ) -> tuple[Batch, Batch]:
        error = returns + discounts * next_outputs[:, 0] - outputs[:, 0]
        return optax.losses.huber_loss(error), jnp.abs(error)


@dataclasses.dataclass(frozen=True)
class Atoms:
    """Categorical distribution over evenly spaced returns: C51. Outputs are logits.

    Source: Bellemare et al. 2017, algorithm 1 (arXiv 1707.06887).
    """

    low: float = bounded(-10.0, low=-math.inf)
    """Smallest return of the distribution."""
    high: float = bounded(10.0, low=-math.inf)
    """Largest return of the distribution."""
    atoms: int = bounded(51, low=2)
    """Number of atoms of the distribution."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"atoms need low < high, but they are {self.low} and {self.high}.")

    @property
    def size(self) -> int:
        return self.atoms

    @property
    def support(self) -> Float[Array, "Z"]:
        return evenly_spaced(self.low, self.high, self.atoms)

    def mean(self, outputs: Float[Array, "*b Z"]) -> Float[Array, "*b"]:
        support = self.support.reshape((1,) * (outputs.ndim - 1) + (-1,))
        return jnp.sum(jax.nn.softmax(outputs) * support, axis=-1)

    def mix(self, outputs: ActionOutputs, policy: Probabilities) -> Outputs:
        return jnp.log(_weighted_sum(jax.nn.softmax(outputs), policy))

    def loss(
        self,
        outputs: Outputs,
        next_outputs: Outputs,
        returns: Batch,
        discounts: Batch,
        taus: Outputs | None = None,
    ) -> tuple[Batch, Batch]:
        returns_of_atoms = returns[:, None] + discounts[:, None] * self.support[None]
        target = self.project(returns_of_atoms, jax.nn.softmax(next_outputs))
        # The cross-entropy is also the priority (Hessel et al. 2018, arXiv 1710.02298).
        loss = -jnp.sum(target * jax.nn.log_softmax(outputs), axis=-1)
        return loss, loss

    def project(self, values: Outputs, probabilities: Outputs) -> Outputs:
        """Project a distribution over values onto the support, each to the two atoms next to it.

        An accelerator weighs all pairs of values and atoms, `[N, Z, Z]`. A CPU adds to those two
        alone, which takes a third (N = 256, Z = 51) to a thirteenth (32,768, 101) of the time.
        """
        values = jnp.clip(values, self.low, self.high)
        return jax.lax.platform_dependent(
            values, probabilities, cpu=self.add_to_two, default=self.weigh_all
        )

    @property
    def _gap(self) -> float:
        return (self.high - self.low) / (self.atoms - 1)

    def weigh_all(self, values: Outputs, probabilities: Outputs) -> Outputs:
        """Project by weights of all pairs of values and atoms."""
        distance = jnp.abs(values[:, :, None] - self.support[None, None]) / self._gap
        return jnp.sum(jnp.clip(1.0 - distance, 0.0, 1.0) * probabilities[:, :, None], axis=1)

    def add_to_two(self, values: Outputs, probabilities: Outputs) -> Outputs:
        """Project by adding to two atoms."""
        atom = jnp.clip(jnp.int32((values - self.low) / self._gap), 0, self.atoms - 2)
        # Rounded to the wrong side of an atom, it gets a weight as little below 0 or above 1.
        weight = (values - self.support[atom]) / self._gap
        index = atom + self.atoms * jnp.arange(len(values))[:, None]
        # Flat: with an index for each axis XLA's scatter takes up to three times as long.
        projected = jnp.zeros(values.size, probabilities.dtype)
        projected = projected.at[index].add((1.0 - weight) * probabilities)
        return projected.at[index + 1].add(weight * probabilities).reshape(values.shape)


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Quantiles of the return at evenly spaced probabilities: QR-DQN.

    Source: Dabney et al. 2018, equation 10 (arXiv 1710.10044).
    """

    quantiles: int = bounded(51, low=1)
    """Number of quantiles."""

    @property
    def size(self) -> int:
        return self.quantiles

    def mean(self, outputs: Float[Array, "*b Z"]) -> Float[Array, "*b"]:
        return jnp.mean(outputs, axis=-1)

    def mix(self, outputs: ActionOutputs, policy: Probabilities) -> Outputs:
        return _weighted_sum(outputs, policy)

    def loss(
        self,
        outputs: Outputs,
        next_outputs: Outputs,
        returns: Batch,
        discounts: Batch,
        taus: Outputs | None = None,
    ) -> tuple[Batch, Batch]:
        target = returns[:, None] + discounts[:, None] * next_outputs
        probabilities = (jnp.arange(self.quantiles) + 0.5) / self.quantiles
        loss, _ = _quantile_regression(outputs, probabilities[None], target)
        return loss, jnp.abs(jnp.mean(target, axis=-1) - jnp.mean(outputs, axis=-1))


@dataclasses.dataclass(frozen=True)
class ImplicitQuantiles:
    """Quantiles of the return at probabilities tau that are drawn at random: IQN.

    The network is a function of tau, see `networks.Head.cosines`. Priorities are mean absolute
    differences between all pairs of quantiles. Source: Dabney et al. 2018b (arXiv 1806.06923); the
    priorities: Clark et al. 2024, whose code sums over the predicted ones instead.
    """

    samples: int = bounded(8, low=1)
    """Number N of quantiles that an update learns, at probabilities of their own."""
    target_samples: int = bounded(8, low=1)
    """Number N' of quantiles in an update's target."""
    policy_samples: int = bounded(32, low=1)
    """Number K of quantiles whose mean is the value that an action is chosen by: when acting, with
    `double` in targets, and without it in the policy of Munchausen's bonus. With `double` that
    policy has the N quantiles of the prediction."""
    cosines: int = bounded(64, low=1)
    """Number of cosines that the network sees a probability as."""

    @property
    def size(self) -> int:
        return 1  # at each probability

    def mean(self, outputs: Float[Array, "*b Z"]) -> Float[Array, "*b"]:
        return jnp.mean(outputs, axis=-1)

    def mix(self, outputs: ActionOutputs, policy: Probabilities) -> Outputs:
        return _weighted_sum(outputs, policy)

    def loss(
        self,
        outputs: Outputs,
        next_outputs: Float[Array, "N Y"],
        returns: Batch,
        discounts: Batch,
        taus: Outputs | None = None,
    ) -> tuple[Batch, Batch]:
        assert taus is not None
        target = returns[:, None] + discounts[:, None] * next_outputs
        loss, error = _quantile_regression(outputs, taus, target)
        return loss, jnp.mean(jnp.abs(error), axis=(1, 2))


ActionValue = Mean | Atoms | Quantiles | ImplicitQuantiles


@dataclasses.dataclass(frozen=True)
class Munchausen:
    """Soft targets with a reward for what the policy already does, where the temperature is not 0.

        target = r + α max(l, τ ln π(a|s)) + γ Σ_a' π(a'|s') (q(s', a') - τ ln π(a'|s'))
        π = softmax(q / τ)

    Source: Vieillard et al. 2020, section 3 (arXiv 2007.14430).
    """

    temperature: Annotated[float, Flag("munchausen-temperature")] = bounded(0.0)
    """Temperature tau of the policy in Munchausen targets, 0.03 in their paper; 0 for the hard
    targets of Q-learning."""
    weight: Annotated[float, Flag("munchausen-weight")] = bounded(0.9, high=1.0)
    """Weight alpha of the log-policy in the reward of Munchausen targets, in [0, 1]."""
    clip: Annotated[float, Flag("munchausen-clip")] = bounded(-1.0, low=-math.inf, high=0.0)
    """Smallest log-policy, times tau, that the reward of Munchausen targets has, at most 0."""

    def scaled_log_policy(self, q: QValues) -> Float[Array, "N A"]:
        """Return `τ ln π(a|s)` for values of actions."""
        return self.temperature * jax.nn.log_softmax(q / self.temperature)

    def bonus(self, q: QValues, action: Int[Array, "N"]) -> Batch:
        """Return the reward `α max(l, τ ln π(a|s))` for the actions taken."""
        one_hot = jax.nn.one_hot(action, q.shape[-1])
        log_policy = jnp.sum(self.scaled_log_policy(q) * one_hot, axis=-1)
        return self.weight * jnp.maximum(log_policy, self.clip)

    def policy(self, q: QValues) -> tuple[Probabilities, Batch]:
        """Return the policy `π(.|s)`, and its entropy times τ."""
        policy = jax.nn.softmax(q / self.temperature)
        return policy, -jnp.sum(policy * self.scaled_log_policy(q), axis=-1)


def _quantile_regression(
    outputs: Outputs, taus: Float[Array, "#N Z"], target: Float[Array, "N Y"]
) -> tuple[Batch, Float[Array, "N Z Y"]]:
    """Return the quantile Huber losses of outputs at probabilities, and all pairs' errors.

    Source: Dabney et al. 2018, equation 10.
    """
    error = target[:, None, :] - outputs[:, :, None]
    weight = jnp.abs(taus[:, :, None] - (error < 0))
    return jnp.sum(jnp.mean(weight * optax.losses.huber_loss(error), axis=-1), axis=-1), error


def _weighted_sum(outputs: ActionOutputs, policy: Probabilities) -> Outputs:
    return jnp.sum(outputs * policy[..., None], axis=-2)
