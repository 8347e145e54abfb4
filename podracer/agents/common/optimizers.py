"""Optimizers of the agents' parameters.

Their updates are unscaled: the learning rate multiplies them where a step is taken, so that it may
follow a schedule (docs/decisions/0029).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from podracer import schedules
from podracer.devices.fused import is_for
from podracer.fields import bounded, reset_on_warm_start, static, struct
from podracer.schedules import Schedule
from podracer.types import LearnerState, Metrics, Params

_LARGEST_DECAY = 0.999999  # with 1 a mean never moves from 0


@runtime_checkable
class OptimizerBuilder(Protocol):
    """Configuration of an optimizer: a `podracer.struct`, whose floats are hyperparameters."""

    def build(
        self, max_gradient_norm: float | None = None, *, root_epsilon: float = 0.0
    ) -> optax.GradientTransformation:
        """Return the unscaled optimizer, on gradients scaled down to a largest global norm.

        The learning rate multiplies its updates. STACX and FRODO, which differentiate through a
        step, ask for a constant `root_epsilon` within a root, which at 0 would have no slope.
        """
        ...


@struct
class Optimizer:
    """Method that makes updates of gradients."""

    name: Literal["adam", "rmsprop", "radam"] = static(default="adam")
    """Optimizer of the parameters."""
    epsilon: float = bounded(1e-5, low=1e-20)
    """Constant epsilon that the optimizer adds to the root of the mean squared gradient."""
    # Static: 1 - decay in float64.
    rmsprop_decay: float = static(default=0.99, low=0.0, high=_LARGEST_DECAY)
    """Decay of RMSProp's mean squared gradient, in [0, 1)."""
    adam_momentum: float = static(default=0.9, low=0.0, high=_LARGEST_DECAY)
    """Decay beta_1 of the mean gradient of Adam and RAdam, in [0, 1)."""

    def build(
        self, max_gradient_norm: float | None = None, *, root_epsilon: float = 0.0
    ) -> optax.GradientTransformation:
        if self.name == "rmsprop":
            method = _scale_by_rms(self.rmsprop_decay, self.epsilon, root_epsilon)
        else:  # RAdam: Liu et al. 2020 (arXiv 1908.03265)
            adam = optax.scale_by_adam if self.name == "adam" else optax.scale_by_radam
            method = adam(self.adam_momentum, eps=self.epsilon, eps_root=root_epsilon)
        if max_gradient_norm is None:
            return method
        return optax.chain(_clip_by_global_norm(max_gradient_norm), method)


def _clip_by_global_norm(limit: float | jax.Array) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` with the norm of this module."""

    def clip(grads: Params, params: Params | None = None) -> Params:
        norm = global_norm(grads)
        return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm * limit), grads)

    return optax.stateless(clip)


def global_norm(tree: Params) -> jax.Array:
    """Return the norm of all arrays of a tree together, f32 `[]`."""
    if is_for("cpu"):
        return optax.tree.norm(tree)
    return jnp.linalg.norm(ravel_pytree(tree)[0])  # one kernel, not one of each array


def _scale_by_rms(
    decay: float | jax.Array, epsilon: float | jax.Array, root_epsilon: float
) -> optax.GradientTransformation:
    """Return RMSProp with epsilon outside of the root, as PyTorch, TorchBeast and Cleanba have it.

    There it scales with the gradient, so a mean loss takes the epsilon of a sum divided by the
    number of items. `optax.scale_by_rms` without a constant in the root has no slope at 0.
    """

    def init(params: Params) -> Params:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mean_square = jax.tree.map(lambda m, g: decay * m + (1.0 - decay) * g**2, state, updates)
        updates = jax.tree.map(
            lambda g, m: g / (jnp.sqrt(m + root_epsilon) + epsilon), updates, mean_square
        )
        return updates, mean_square

    return optax.GradientTransformation(init, update)


@struct
class ParamsState:
    """Parameters and the state of their optimizer."""

    params: Params
    optimizer_state: optax.OptState


AnyState = TypeVar("AnyState", bound=ParamsState)


def take_step(
    optimizer: optax.GradientTransformation,
    learning_rate: float | jax.Array,
    state: AnyState,
    grads: Params,
) -> AnyState:
    """Return a state after one step of an unscaled optimizer on its parameters."""
    with jax.named_scope("optimizer"):
        updates, optimizer_state = optimizer.update(grads, state.optimizer_state, state.params)
        updates = jax.tree.map(lambda update: -learning_rate * update, updates)
    params = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, params=params, optimizer_state=optimizer_state)


@struct
class CountedState(ParamsState):
    """Parameters, the state of their optimizer, and how many frames they have learned from."""

    frames: jax.Array = reset_on_warm_start()
    """Valid transitions of all rollouts, uint32 [], see `schedules`."""


State = TypeVar("State", bound=CountedState)


@dataclasses.dataclass(frozen=True)
class ScheduledOptimizer:
    """Unscaled optimizer and the learning rate that multiplies its updates."""

    optimizer: optax.GradientTransformation
    learning_rate: Schedule

    def init(self, params: Params) -> CountedState:
        """Return the state of new parameters."""
        return CountedState(params, self.optimizer.init(params), schedules.init_frames())

    def step(self, state: State, grads: Params) -> tuple[State, Metrics]:
        """Return a state whose parameters took one step, and the norm of the gradients.

        The learning rate follows the state's frames.
        """
        rate = schedules.value_at(self.learning_rate, state.frames)
        state = take_step(self.optimizer, rate, state, grads)
        return state, {"gradient_norm": global_norm(grads)}

    def apply_gradients(
        self, state: LearnerState, grads: Params, num_frames: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        """Take one step with gradients that are averaged over the mesh.

        They come from `num_frames` frames, which the state counts.
        """
        learner, metrics = self.step(state.shared, grads)
        return LearnerState(with_more_frames(learner, num_frames)), metrics


def with_more_frames(state: State, num_frames: jax.Array) -> State:
    """Return a state that has learned from more frames, those of all shards together."""
    return dataclasses.replace(state, frames=schedules.add_frames(state.frames, num_frames))
