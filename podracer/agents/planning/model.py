"""MuZero's learned model: its three functions, with categorical values and rewards.

Hidden states are vectors `[N, latent]`, or planes `[N, H, W, C]` where the model is convolutional.
Source: Schrittwieser et al. 2020 (arXiv 1911.08265).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx

from podracer.agents.common.off_policy import require_feed_forward
from podracer.agents.planning import gumbel
from podracer.agents.planning.actions import Samples, SearchActions
from podracer.errors import ConfigError
from podracer.fields import static, struct
from podracer.networks import CNN, MLP, Head, Network, NetworkBuilder, ResNet, TorsoNetwork, outputs
from podracer.networks.plane_network import PlaneNetwork, Planes
from podracer.ops.distributions import num_outputs
from podracer.ops.transforms import evenly_spaced, squash, two_hot, unsquashed_mean
from podracer.types import ArraySpec, Params, PyTree


@struct
class ModelSettings:
    """Settings of the model, but for its representation network."""

    support_max: float = static(default=30.0, low=1e-6)
    """Largest value and reward after the transform h(x), nearly a square root; 30 means 900."""
    support_size: int = static(default=61, low=2)
    """Number of atoms for values and rewards, from minus to plus the support's largest value."""
    latent_size: int = static(default=64, low=1)
    """Size of the model's hidden state, where it is a vector."""
    dynamics_hidden: tuple[int, ...] = static(default=(128,), low=1)
    """Widths of the fully connected hidden layers of the dynamics network g."""
    dynamics_blocks: int = static(default=0, low=0)
    """Number of residual blocks of the dynamics network; above 0 the model is convolutional."""
    prediction_hidden: tuple[int, ...] = static(default=(128,), low=1)
    """Widths of the fully connected hidden layers of the prediction network f."""

    def build_model(
        self, network: NetworkBuilder, observation: PyTree, actions: SearchActions
    ) -> Model:
        """Build the model for observations of a specification; `network` is the representation.

        The other networks compute in its dtype. With `dynamics_blocks` the model is convolutional.
        """
        dtype = network.compute_dtype if isinstance(network, TorsoNetwork) else "float32"
        state_head: Any  # `Planes` only with networks that know it
        if blocks := self.dynamics_blocks:
            torso = _convolutions_of(network)
            representation = PlaneNetwork(torso, compute_dtype=dtype)
            latent, state_head = representation.planes(observation), Planes()
            resnet = torso if isinstance(torso, ResNet) else ResNet(layer_norm=torso.layer_norm)
            no_tower = dataclasses.replace(resnet, channels=(), blocks=blocks, pool=False)
            tower = dataclasses.replace(no_tower, channels=latent.shape[-1:])
            dynamics = PlaneNetwork(tower, self.dynamics_hidden, dtype)
            prediction = PlaneNetwork(no_tower, self.prediction_hidden, dtype)
        else:
            representation, size = network, self.latent_size
            latent, state_head = ArraySpec((size,)), Head(size)
            dynamics = TorsoNetwork(MLP(self.dynamics_hidden), compute_dtype=dtype)
            prediction = TorsoNetwork(MLP(self.prediction_hidden), compute_dtype=dtype)
        inputs = {"action": ArraySpec((actions.encoded_size,)), "state": latent}
        # Small initial weights: rewards and values near 0, and a nearly uniform policy.
        transition = {"state": state_head, "reward": Head(self.support_size, 0.01)}
        policy_head = Head(num_outputs(actions.space), 0.01)
        evaluation = {"policy": policy_head, "value": Head(self.support_size, 0.01)}
        representation_network = representation.build(observation, {"state": state_head})
        return Model(
            self,
            actions,
            dynamics_network=dynamics.build(inputs, transition),
            representation_network=require_feed_forward(representation_network),
            prediction_network=prediction.build(latent, evaluation),
        )


class ModelParams(NamedTuple):
    """Parameters of the model's three networks."""

    dynamics: Params  # g
    representation: Params  # h
    prediction: Params  # f


@dataclasses.dataclass(frozen=True)
class Model:
    """Representation, dynamics and prediction functions over batches `[N, ...]`."""

    settings: ModelSettings
    actions: SearchActions
    dynamics_network: Network
    representation_network: Network
    prediction_network: Network

    def init(self, key: jax.Array) -> ModelParams:
        representation_key, dynamics_key, prediction_key = jax.random.split(key, 3)
        return ModelParams(
            dynamics=self.dynamics_network.init(dynamics_key),
            representation=self.representation_network.init(representation_key),
            prediction=self.prediction_network.init(prediction_key),
        )

    def representation(self, params: ModelParams, observation: PyTree) -> jax.Array:
        """Return the hidden state `[N, ...]` of an observation: `s⁰ = h(o)`."""
        heads = outputs(self.representation_network, params.representation, observation)
        return _scale_state(heads["state"])

    def dynamics(
        self, params: ModelParams, state: jax.Array, action: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the next hidden state, and logits of the reward: `rᵏ, sᵏ = g(sᵏ⁻¹, aᵏ)`."""
        inputs = {"action": self.actions.encode(action), "state": state}
        heads = outputs(self.dynamics_network, params.dynamics, inputs)
        return _scale_state(state + heads["state"]), heads["reward"]

    def prediction(self, params: ModelParams, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return outputs of the policy and logits of the value `[N, Z]`: `pᵏ, vᵏ = f(sᵏ)`."""
        heads = outputs(self.prediction_network, params.prediction, state)
        return heads["policy"], heads["value"]

    def value(self, params: ModelParams, observation: PyTree) -> jax.Array:
        """Return the value `[N]` of an observation."""
        return self.to_scalar(self.prediction(params, self.representation(params, observation))[1])

    # --- for the search, as mctx asks for them ---------------------------------------------------

    def root(self, params: ModelParams, observation: PyTree, key: jax.Array) -> mctx.RootFnOutput:
        """Return what the search knows of an observation; `key` is for samples of its actions."""
        return self._node(params, self.representation(params, observation), key)

    def step(
        self,
        discount: float | jax.Array,
        params: ModelParams,
        key: jax.Array,
        index: jax.Array,
        embedding: tuple[jax.Array, Samples],
    ) -> tuple[mctx.RecurrentFnOutput, tuple[jax.Array, Samples]]:
        """Return what a step of the dynamics leads to; `discount` is that of the next value."""
        state, samples = embedding
        action = self.actions.to_actions(index, samples)
        next_state, reward_logits = self.dynamics(params, state, action)
        node, reward = self._node(params, next_state, key), self.to_scalar(reward_logits)
        output = gumbel.RecurrentFnOutput(
            reward=reward,
            discount=jnp.full_like(reward, discount),
            prior_logits=node.prior_logits,
            value=node.value,
        )
        return output, node.embedding

    def _node(self, params: ModelParams, state: jax.Array, key: jax.Array) -> mctx.RootFnOutput:
        policy, value_logits = self.prediction(params, state)
        logits, samples = self.actions.prior(policy, key)
        return gumbel.RootFnOutput(
            prior_logits=logits, value=self.to_scalar(value_logits), embedding=(state, samples)
        )

    # --- values and rewards as categorical distributions (appendix F) ----------------------------

    def to_scalar(self, logits: jax.Array) -> jax.Array:
        """Return the values or rewards `[N]` that logits `[N, Z]` stand for."""
        return unsquashed_mean(logits, self._support)

    def cross_entropy(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        """Return the loss `[N]` of logits `[N, Z]` of values or rewards with targets `[N]`."""
        target_probs = two_hot(squash(target), self._support)
        return -jnp.sum(target_probs * jax.nn.log_softmax(logits), axis=-1)

    @property
    def _support(self) -> jax.Array:
        limit = self.settings.support_max
        return evenly_spaced(-limit, limit, self.settings.support_size)


def _convolutions_of(network: NetworkBuilder) -> CNN | ResNet:
    """Return the torso of a network of convolutions without memory."""
    if isinstance(network, TorsoNetwork) and network.memory == "none":
        torso = network.torso
        if not isinstance(torso, MLP):
            return torso
    raise ConfigError(
        "MuZero.dynamics_blocks is set, so its network must have convolutions and no memory, such "
        "as TorsoNetwork(ResNet())."
    )


def scale_gradient(x: jax.Array, scale: float) -> jax.Array:
    """Return x unchanged; its gradient is scaled."""
    return scale * x + (1 - scale) * jax.lax.stop_gradient(x)


def _scale_state(state: jax.Array) -> jax.Array:
    """Scale each hidden state `[N, ...]` to [0, 1]. Source: appendix G."""
    axes = tuple(range(1, state.ndim))
    low = jnp.min(state, axes, keepdims=True)
    high = jnp.max(state, axes, keepdims=True)
    return (state - low) / (high - low + 1e-5)
