"""What agents of continuous actions with a replay share: an actor, critics, and their copies."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from podracer import networks
from podracer.agents.common import actor_critic, off_policy
from podracer.agents.common.off_policy import Transition
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.distributions import from_bounds, to_bounds
from podracer.ops.moments import Moments, init_moments, merge, moments_of, normalize
from podracer.replay import Sample
from podracer.types import (
    ArraySpec,
    ConfigError,
    Continuous,
    EnvironmentSpec,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)


def space_of(spec: EnvironmentSpec | None) -> Continuous:
    """Its continuous actions, or `ConfigError`."""
    spec = actor_critic.require_spec(spec)
    if not isinstance(spec.action, Continuous):
        raise ConfigError(f"the agent needs continuous actions; {spec.name} has discrete ones.")
    return spec.action


def build_actor(network: NetworkBuilder, spec: EnvironmentSpec | None, outputs: int) -> Network:
    """`outputs` numbers for each coordinate of an action, in the head `action`."""
    space = space_of(spec)
    heads = {"action": Head(outputs * space.size, 0.01)}
    return off_policy.without_memory(
        network.build(actor_critic.require_spec(spec).observation, heads)
    )


def build_critic(network: NetworkBuilder, spec: EnvironmentSpec | None) -> Network:
    """The value of an observation and an action in [-1, 1] a coordinate, in the head `q`."""
    action = ArraySpec((space_of(spec).size,))
    seen = {"action": action, "observation": actor_critic.require_spec(spec).observation}
    return network.build(seen, {"q": Head(1)})


def values(network: Network, params: Params, observation: PyTree, action: jax.Array) -> jax.Array:
    """What each critic says of actions in [-1, 1], `[critics, N]`."""
    seen = {"action": action, "observation": observation}
    return jnp.stack([networks.outputs(network, one, seen)["q"][:, 0] for one in params])


def init(
    actor: Network,
    critic: Network,
    critics: int,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    more: PyTree,
) -> PyTree:
    """Parameters of an actor, of `critics` critics, and `more`; each with its optimizer's state."""
    actor_key, critic_key = jax.random.split(key)
    params = {
        "actor": actor.init(actor_key),
        "critic": tuple(critic.init(key) for key in jax.random.split(critic_key, critics)),
        **more,
    }
    return {
        "params": params,
        "optimizer": {name: optimizer.init(part) for name, part in params.items()},
        "explored": jnp.float32(0),
    }


def stepped(
    optimizer: optax.GradientTransformation, shared: PyTree, grads: dict[str, PyTree]
) -> PyTree:
    """With new parameters and optimizers' states of the parts that have gradients."""
    params, states = dict(shared["params"]), dict(shared["optimizer"])
    for name, grad in grads.items():
        change, states[name] = optimizer.update(grad, states[name], params[name])
        params[name] = optax.apply_updates(params[name], change)
    return {**shared, "params": params, "optimizer": states}


def random_at_first(
    space: Continuous, action: jax.Array, keys: jax.Array, explored: jax.Array
) -> jax.Array:
    """The action in the environment's units; a random one as long as `explored` is below 1."""
    draw = jax.vmap(lambda key: jax.random.uniform(key, (space.size,), minval=-1.0))
    anything = draw(jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys))
    return to_bounds(space, jnp.where(explored < 1.0, anything, action))


def transition(
    sample: Sample, discount: float | jax.Array, space: Continuous, shared: PyTree
) -> Transition:
    """As `off_policy.transition`, with observations as the networks see them and actions in
    [-1, 1]."""
    now = off_policy.transition(sample, discount)

    def normalized(timestep: TimeStep) -> TimeStep:
        return dataclasses.replace(timestep, observation=seen(shared, timestep.observation))

    return dataclasses.replace(
        now,
        first=normalized(now.first),
        then=normalized(now.then),
        action=from_bounds(space, now.action),
    )


# --- observations --------------------------------------------------------------------------------


def observations(normalized: bool, spec: EnvironmentSpec | None) -> PyTree:
    """Their moments, or ()."""
    return init_moments(actor_critic.require_spec(spec).observation) if normalized else ()


def observed(shared: PyTree, trajectory: Trajectory, axis: str | None) -> PyTree:
    """With the moments of what a rollout showed."""
    if not isinstance(shared["observations"], Moments):
        return shared
    new = moments_of(trajectory.steps.timestep.observation, axis)
    return {**shared, "observations": merge(shared["observations"], new)}


def seen(known: PyTree, observation: PyTree) -> PyTree:
    """Observations as the networks see them, by the moments in `known["observations"]`."""
    moments = known["observations"]
    return normalize(moments, observation) if isinstance(moments, Moments) else observation


def acting(shared: PyTree) -> Params:
    """What an actor needs."""
    return {
        "actor": shared["params"]["actor"],
        "observations": shared["observations"],
        "explored": shared["explored"],
    }
