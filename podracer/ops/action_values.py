"""Representations of the value of an action: its mean, or the distribution of its return.

Each class is a setting of value-based agents. `size` is the number Z of network outputs for an
action, and `mean` computes the value from them. `loss` compares outputs with a bootstrapped target:

    G + γ X(s')        for a return G, a discount γ and the distribution X of the bootstrap value

Losses and priorities are `[N]`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.ops.transforms import evenly_spaced

Outputs = Float[Array, "N Z"]
Batch = Float[Array, "N"]


@dataclasses.dataclass(frozen=True)
class Mean:
    """Expected return, learned with the Huber loss (Mnih et al. 2015)."""

    @property
    def size(self) -> int:
        return 1

    def mean(self, outputs: Float[Array, "*b Z"]) -> Float[Array, "*b"]:
        return outputs[..., 0]

    def loss(
        self, outputs: Outputs, next_outputs: Outputs, returns: Batch, discounts: Batch
    ) -> tuple[Batch, Batch]:
        error = returns + discounts * next_outputs[:, 0] - outputs[:, 0]
        return self.loss_of(error), jnp.abs(error)

    def loss_of(self, error: Batch) -> Batch:
        """Return the loss of temporal-difference errors."""
        return optax.losses.huber_loss(error)


@dataclasses.dataclass(frozen=True)
class SquaredMean(Mean):
    """Expected return, learned with squared errors.

    The Huber loss bounds the gradient of an error above 1. Where rewards are not clipped and
    returns are large, the end of an episode then cannot correct values that are far too high.
    """

    def loss_of(self, error: Batch) -> Batch:
        return optax.losses.l2_loss(error)


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

    def loss(
        self, outputs: Outputs, next_outputs: Outputs, returns: Batch, discounts: Batch
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
        distance = jnp.abs(values[:, :, None] - self.support[None, None]) / self._gap
        return jnp.sum(jnp.clip(1.0 - distance, 0.0, 1.0) * probabilities[:, :, None], axis=1)

    def add_to_two(self, values: Outputs, probabilities: Outputs) -> Outputs:
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

    def loss(
        self, outputs: Outputs, next_outputs: Outputs, returns: Batch, discounts: Batch
    ) -> tuple[Batch, Batch]:
        target = returns[:, None] + discounts[:, None] * next_outputs
        probabilities = (jnp.arange(self.quantiles) + 0.5) / self.quantiles
        error = target[:, None, :] - outputs[:, :, None]
        weight = jnp.abs(probabilities[None, :, None] - (error < 0))
        losses = jnp.mean(weight * optax.losses.huber_loss(error), axis=-1)
        difference = jnp.mean(target, axis=-1) - jnp.mean(outputs, axis=-1)
        return jnp.sum(losses, axis=-1), jnp.abs(difference)


ActionValue = Mean | SquaredMean | Atoms | Quantiles
