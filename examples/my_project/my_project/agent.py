"""The agent: REINFORCE with a learned baseline (Williams 1992).

It contains no loop, no device and no environment, so every driver can run it: on one device or
many, under Anakin or Sebulba, alone or in a population.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import podracer
from podracer.agent import DEFAULT_CONTEXT
from podracer.ops.returns import lambda_returns


@podracer.struct
class State:
    """All that lives longer than an update; `act` gets the field `params`."""

    params: Any
    optimizer: Any


@podracer.struct
class Reinforce:
    """Settings, each a flag of `podracer train`.

    Numbers are arguments of the compiled program, so another value compiles nothing and a sweep
    may vary them. What `static` declares is the program's structure.
    """

    learning_rate: float = podracer.bounded(3e-3)
    """Step size of Adam."""
    discount: float = podracer.bounded(0.97, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    entropy_cost: float = podracer.bounded(0.01)
    """Weight of the entropy bonus, which keeps the policy from settling too early."""
    network: podracer.TorsoNetwork = podracer.static(
        default=podracer.TorsoNetwork(podracer.MLP((64, 64), "tanh"))
    )

    def build(
        self, spec: podracer.EnvironmentSpec, context: podracer.Context = DEFAULT_CONTEXT
    ) -> podracer.Agent:
        """Return the agent for an environment."""
        if not isinstance(spec.action, podracer.Discrete):
            raise podracer.ConfigError(f"Reinforce needs discrete actions, not {spec.action}.")
        heads = {"policy": podracer.Head(spec.action.num_actions, 0.01), "value": podracer.Head(1)}
        network = self.network.build(spec.observation, heads)
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(self.learning_rate))

        def init(key: jax.Array, num_envs: int) -> podracer.LearnerState:
            params = network.init(key)
            return podracer.LearnerState(State(params, optimizer.init(params)))

        def act(
            params: Any, carry: Any, timestep: podracer.TimeStep, keys: jax.Array, explore: bool
        ) -> tuple[jax.Array, Any, Any]:
            # Arrays are [B, ...] here; networks take a leading axis of time as well.
            observation, first = timestep.observation[None], timestep.first[None]
            logits = network.apply(params, (), observation, first)[0]["policy"][0]
            sample = jax.vmap(jax.random.categorical)(keys, logits)
            action = sample if explore else jnp.argmax(logits, axis=-1)
            return action.astype(jnp.int32), (), ()  # what `learn` needs besides; memory

        def loss(params: Any, trajectory: podracer.Trajectory) -> tuple[Any, Any]:
            # T + 1 timesteps around T actions, each [B, ...]; `valid` is 0 where a step only reset.
            timesteps, following = trajectory.timesteps(), trajectory.next_timesteps()
            valid = trajectory.valid()
            outputs, _ = network.apply(params, (), timesteps.observation, timesteps.first)
            log_probs, values = jax.nn.log_softmax(outputs["policy"][:-1]), outputs["value"][..., 0]
            baseline = jax.lax.stop_gradient(values)
            discounts = self.discount * following.discount  # 0 after a terminal
            # With lambda 1 these are Monte-Carlo returns; the newest value stands for the future.
            returns = lambda_returns(
                baseline[:-1], baseline[1:], following.reward, discounts, valid, 1.0
            )
            one_hot = jax.nn.one_hot(trajectory.steps.action, log_probs.shape[-1])
            policy_loss = (baseline[:-1] - returns) * jnp.sum(log_probs * one_hot, axis=-1)
            value_loss = 0.5 * (returns - values[:-1]) ** 2
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
            total = policy_loss + 0.5 * value_loss - self.entropy_cost * entropy
            parts = {"loss": total, "value_loss": value_loss, "entropy": entropy}
            metrics = {name: podracer.mean_of(x, valid) for name, x in parts.items()}
            return metrics["loss"], metrics

        def learn(
            state: podracer.LearnerState, trajectory: podracer.Trajectory, key: jax.Array, axis: Any
        ) -> tuple[podracer.LearnerState, Any]:
            params, old = state.shared.params, state.shared.optimizer
            # The one place where devices meet: the gradient is averaged over all of them.
            grads, metrics = podracer.global_grad(loss, params, trajectory, axis=axis)
            updates, new = optimizer.update(grads, old)
            return podracer.LearnerState(State(optax.apply_updates(params, updates), new)), metrics

        return podracer.Agent(spec=spec, init=init, act=act, learn=learn)
