"""An agent of your own: REINFORCE with a learned baseline, trained on CartPole in a few seconds.

Settings build an agent for an environment: three pure functions, `init`, `act` and `learn`. It
contains no loop, no device and no file; the same object runs on one device or many.
Source: Williams 1992, "Simple statistical gradient-following algorithms".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import podracer
from podracer import MLP, Discrete, Head, LearnerState, TimeStep, TorsoNetwork, Trajectory
from podracer.devices.reductions import MaskedMean
from podracer.ops.returns import lambda_returns


@podracer.struct
class State:
    """All that lives longer than an update; acting takes the field `params`."""

    params: Any
    optimizer: Any


@podracer.struct
class Reinforce:
    """Floats are leaves of the settings, so a population may vary them; `static` is structure."""

    learning_rate: float = podracer.bounded(5e-3)
    discount: float = podracer.bounded(0.99, high=1.0)
    entropy_cost: float = podracer.bounded(0.01)
    network: TorsoNetwork = podracer.static(default=TorsoNetwork(MLP((64, 64), "tanh")))

    def build(self, spec: podracer.EnvironmentSpec, context: podracer.Context) -> podracer.Agent:
        """Return the agent for an environment with discrete actions."""
        assert isinstance(spec.action, Discrete)
        heads = {"policy": Head(spec.action.num_actions, 0.01), "value": Head(1)}
        network = self.network.build(spec.observation, heads)
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(self.learning_rate))

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            params = network.init(key)
            return LearnerState(State(params, optimizer.init(params)))

        def act(
            params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool
        ) -> tuple[jax.Array, Any, Any]:
            observation, first = timestep.observation[None], timestep.first[None]
            logits = network.apply(params, (), observation, first)[0]["policy"][0]
            sample = jax.vmap(jax.random.categorical)(keys, logits)
            action = sample if explore else jnp.argmax(logits, axis=-1)
            return action.astype(jnp.int32), (), ()

        def loss(params: Any, trajectory: Trajectory) -> tuple[MaskedMean, Any]:
            timesteps, valid = trajectory.timesteps(), trajectory.valid()
            next_timesteps = trajectory.next_timesteps()
            outputs, _ = network.apply(params, (), timesteps.observation, timesteps.first)
            log_probs, values = jax.nn.log_softmax(outputs["policy"][:-1]), outputs["value"][..., 0]
            baseline = jax.lax.stop_gradient(values)
            # With λ = 1 these are Monte-Carlo returns; the value of the last timestep ends the sum.
            discount, rewards = self.discount * next_timesteps.discount, next_timesteps.reward
            returns = lambda_returns(baseline[:-1], baseline[1:], rewards, discount, valid, 1.0)
            chosen = jax.nn.one_hot(trajectory.steps.action, log_probs.shape[-1])
            policy_loss = (baseline[:-1] - returns) * jnp.sum(log_probs * chosen, axis=-1)
            value_loss = 0.5 * (returns - values[:-1]) ** 2
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
            losses = policy_loss + 0.5 * value_loss - self.entropy_cost * entropy
            parts = {"loss": losses, "value_loss": value_loss, "entropy": entropy}
            means = {name: podracer.mean_of(x, valid) for name, x in parts.items()}
            return means["loss"], means

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, dict[str, MaskedMean]]:
            params, optimizer_state = state.shared.params, state.shared.optimizer
            grads, metrics = podracer.global_grad(loss, params, trajectory, axis=axis)
            updates, optimizer_state = optimizer.update(grads, optimizer_state)
            params = optax.apply_updates(params, updates)
            return LearnerState(State(params, optimizer_state)), metrics

        return podracer.Agent(spec=spec, init=init, act=act, learn=learn)


def main(**overrides: Any) -> float:
    """Train on CartPole; return the mean return of the last evaluation."""
    driver = podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=20)
    agent = Reinforce()
    result = podracer.train("cartpole_ppo", agent=agent, driver=driver, progress=True, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.1f}; the most possible is 500")
