"""A Dreamer-like agent: a recurrent model of the world, and an actor that learns in its dreams.

A GRU remembers what was observed. The model predicts what follows an action; actor and critic learn
from imagined steps, which begin at memories of sequences in the replay. Source: Hafner et al. 2020
(arXiv 1912.01603). Different from the paper: memories are deterministic, observations are
predicted as vectors, actions are discrete, and the actor follows the policy gradient.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import podracer
from podracer import LearnerState, TimeStep, Trajectory
from podracer.devices.reductions import MaskedMean
from podracer.ops.distributions import Categorical
from podracer.ops.returns import lambda_returns
from podracer.replay import Replay
from podracer.types import Metrics


class World(eqx.Module):
    """Networks over single items, all but the embedding behind the memory."""

    embed: eqx.nn.Linear
    cell: eqx.nn.GRUCell
    dynamics: eqx.nn.MLP  # next observation, reward and logit of going on
    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, inputs: int, actions: int, width: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Linear(inputs, width, key=keys[0])
        self.cell = eqx.nn.GRUCell(width + actions, width, key=keys[1])
        self.dynamics = eqx.nn.MLP(width + actions, inputs + 2, width, 2, key=keys[2])
        self.actor = eqx.nn.MLP(width, actions, width, 1, key=keys[3])
        self.critic = eqx.nn.MLP(width, 1, width, 1, key=keys[4])

    def remember(self, memory: jax.Array, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Return memories `[N, H]` after observations and the actions `[N, A]` before them."""
        embedding = jnp.tanh(jax.vmap(self.embed)(observation))
        return jax.vmap(self.cell)(jnp.concatenate([embedding, action], axis=-1), memory)

    def predict(
        self, memory: jax.Array, action: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return next observations, rewards and logits of going on, from `[N, H]` and `[N, A]`."""
        outputs = jax.vmap(self.dynamics)(jnp.concatenate([memory, action], axis=-1))
        return outputs[:, :-2], outputs[:, -2], outputs[:, -1]


@podracer.struct
class State:
    """Parameters of all networks, and their optimizer."""

    params: Any
    optimizer: Any


@podracer.struct
class Dreamer:
    """Model-based agent for vector observations and discrete actions."""

    learning_rate: float = podracer.bounded(1e-3)
    discount: float = podracer.bounded(0.99, high=1.0)
    trace_lambda: float = podracer.bounded(0.95, high=1.0)
    entropy_cost: float = podracer.bounded(3e-3)
    width: int = podracer.static(default=64, low=1)
    horizon: int = podracer.static(default=15, low=1)
    sequence_length: int = podracer.static(default=16, low=2)
    replay: Replay = podracer.static(
        default=Replay(capacity=40_000, batch_size=32, updates_per_rollout=8, warmup=0)
    )

    def build(self, spec: podracer.EnvironmentSpec, context: podracer.Context) -> podracer.Agent:
        assert isinstance(spec.action, podracer.Discrete)
        num_actions, width, sizes = spec.action.num_actions, self.width, spec.observation.shape
        _, structure = eqx.partition(
            World(sizes[0], num_actions, width, jax.random.key(0)), eqx.is_inexact_array
        )
        buffer = self.replay.build(spec, min(self.sequence_length, context.rollout_length))
        optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(self.learning_rate))

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            params = eqx.filter(World(sizes[0], num_actions, width, key), eqx.is_inexact_array)
            return LearnerState(State(params, optimizer.init(params)), buffer.init(num_envs))

        def carry(num_envs: int) -> dict[str, jax.Array]:
            sizes = {"memory": width, "action": num_actions}
            return {name: jnp.zeros((num_envs, size)) for name, size in sizes.items()}

        def remember(params: Any, carry: Any, timestep: TimeStep) -> jax.Array:
            goes_on = jnp.where(timestep.first, 0.0, 1.0)[:, None]
            memory, action = goes_on * carry["memory"], goes_on * carry["action"]
            return eqx.combine(params, structure).remember(memory, timestep.observation, action)

        def act(
            params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool
        ) -> tuple[jax.Array, Any, Any]:
            memory = remember(params, carry, timestep)
            policy = Categorical(jax.vmap(eqx.combine(params, structure).actor)(memory))
            action = policy.sample(keys) if explore else policy.mode()
            return action, (), {"memory": memory, "action": jax.nn.one_hot(action, num_actions)}

        def model_loss(params: Any, trajectory: Trajectory) -> tuple[MaskedMean, jax.Array]:
            """Return the error of predictions, and the memories `[T, N, H]` of a sequence."""
            world, following = eqx.combine(params, structure), trajectory.timesteps()
            actions = jax.nn.one_hot(trajectory.steps.action, num_actions)

            def step(carry: Any, inputs: Any) -> tuple[Any, tuple[jax.Array, Any]]:
                timestep, action = inputs
                memory = remember(params, carry, timestep)
                predictions = world.predict(memory, action)
                return {"memory": memory, "action": action}, (memory, predictions)

            start = carry(actions.shape[1])
            steps = (trajectory.steps.timestep, actions)
            _, (memories, (observation, reward, logit)) = jax.lax.scan(step, start, steps)
            following = jax.tree.map(lambda x: x[1:], following)
            error = jnp.sum((observation - following.observation) ** 2, axis=-1)
            error *= following.discount  # behind a terminal, another episode is observed
            error += (reward - following.reward) ** 2
            error += optax.sigmoid_binary_cross_entropy(logit, following.discount)
            return podracer.mean_of(error, trajectory.valid()), memories

        def dream_loss(params: Any, memory: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
            """Return the losses of actor and critic over imagined steps from memories `[N, H]`."""
            world, stop = eqx.combine(params, structure), jax.lax.stop_gradient

            def step(memory: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
                policy = Categorical(jax.vmap(world.actor)(memory))
                sample = policy.sample(jax.random.split(key, len(memory)))
                action = jax.nn.one_hot(sample, num_actions)
                observation, reward, logit = world.predict(memory, action)
                next_memory = stop(world.remember(memory, observation, action))
                outcome = (stop(reward), self.discount * stop(jax.nn.sigmoid(logit)))
                return next_memory, (memory, policy.log_prob(sample), policy.entropy(), outcome)

            final, dream = jax.lax.scan(step, memory, jax.random.split(key, self.horizon))
            memories, log_prob, entropy, (rewards, discounts) = dream
            memories = jnp.concatenate([memories, final[None]])
            values = jax.vmap(jax.vmap(world.critic))(memories)[..., 0]  # [horizon + 1, N]
            baseline, valid = stop(values), jnp.ones(rewards.shape, bool)
            returns = lambda_returns(
                baseline[:-1], baseline[1:], rewards, discounts, valid, self.trace_lambda
            )
            reached = jnp.cumprod(jnp.concatenate([jnp.ones_like(rewards[:1]), discounts[:-1]]), 0)
            policy_loss = -log_prob * (returns - baseline[:-1]) - self.entropy_cost * entropy
            value_loss = 0.5 * (returns - values[:-1]) ** 2
            parts = {"policy_loss": policy_loss, "value_loss": value_loss}
            metrics = {name: jnp.mean(reached * part) for name, part in parts.items()}
            return sum(metrics.values(), jnp.zeros(())), metrics | {
                "dreamed_value": jnp.mean(baseline)
            }

        def loss(params: Any, trajectory: Trajectory, key: jax.Array) -> tuple[jax.Array, Metrics]:
            error, memories = model_loss(params, trajectory)
            memory = jax.lax.stop_gradient(memories).reshape(-1, width)
            dream, metrics = dream_loss(params, memory, key)
            return error.value + dream, {**metrics, "model_loss": error}

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, Metrics]:
            replay = buffer.add(state.local, trajectory.steps)

            def step(learner: State, key: jax.Array) -> tuple[State, Metrics]:
                sample_key, dream_key = jax.random.split(key)
                sample = buffer.sample(replay, sample_key, self.replay.batch_size).trajectory
                grads, metrics = podracer.global_grad(
                    loss, learner.params, sample, dream_key, axis=axis
                )
                updates, optimizer_state = optimizer.update(grads, learner.optimizer)
                return State(optax.apply_updates(learner.params, updates), optimizer_state), metrics

            keys = jax.random.split(key, self.replay.updates_per_rollout)
            learner, metrics = jax.lax.scan(step, state.shared, keys)
            return LearnerState(learner, replay), jax.tree.map(jnp.mean, metrics)

        return podracer.Agent(spec=spec, init=init, act=act, learn=learn, carry=carry)


def main(**overrides: Any) -> float:
    """Train on CartPole; return the mean return of the last evaluation."""
    driver = podracer.AnakinConfig(num_envs=16, rollout_length=16, updates_per_chunk=20)
    settings = {"recipe": "cartpole_dreamer", "agent": Dreamer(), "driver": driver}
    result = podracer.train("cartpole_ppo", **settings, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.1f}; the most possible is 500")
