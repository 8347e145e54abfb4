"""An agent of your own: REINFORCE with a learned baseline, trained on CartPole in a few seconds.

An agent is five pure functions: `init`, `carry`, `actor_params`, `act` and `learn`. It contains no
loop, no device and no file; the same object runs on one device or many.
Source: Williams 1992, "Simple statistical gradient-following algorithms".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import podracer
from podracer import MLP, Discrete, Head, LearnerState, TimeStep, TorsoNetwork, Trajectory
from podracer.ops.returns import lambda_returns


@podracer.struct
class Reinforce:
    """Floats are leaves of the agent, so that a population may vary them; `static` is structure."""

    learning_rate: float = podracer.bounded(5e-3)
    discount: float = podracer.bounded(0.99, high=1.0)
    entropy_cost: float = podracer.bounded(0.01)
    network: TorsoNetwork = podracer.static(default=TorsoNetwork(MLP((64, 64), "tanh")))
    spec: podracer.EnvironmentSpec | None = podracer.static(default=None)  # filled in by `train`

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        params = self._network.init(key)
        return LearnerState({"params": params, "optimizer": self._optimizer.init(params)})

    def carry(self, num_envs: int) -> tuple[()]:
        return ()  # no memory

    def actor_params(self, state: LearnerState) -> Any:
        return state.shared["params"]

    def act(
        self, params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, Any, Any]:
        observation, first = timestep.observation[None], timestep.first[None]
        logits = self._network.apply(params, (), observation, first)[0]["policy"][0]
        sample = jax.vmap(jax.random.categorical)(keys, logits)
        action = sample if explore else jnp.argmax(logits, axis=-1)
        return action.astype(jnp.int32), (), ()

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, dict[str, podracer.Mean]]:
        params, optimizer = state.shared["params"], state.shared["optimizer"]
        grads, metrics = podracer.global_grad(self._loss, params, trajectory, axis=axis)
        updates, optimizer = self._optimizer.update(grads, optimizer)
        params = optax.apply_updates(params, updates)
        return LearnerState({"params": params, "optimizer": optimizer}), metrics

    def _loss(self, params: Any, trajectory: Trajectory) -> tuple[podracer.Mean, Any]:
        timesteps, valid = trajectory.timesteps(), trajectory.valid()
        next_timesteps = trajectory.next_timesteps()
        outputs, _ = self._network.apply(params, (), timesteps.observation, timesteps.first)
        log_probs, values = jax.nn.log_softmax(outputs["policy"][:-1]), outputs["value"][..., 0]
        baseline, discount = jax.lax.stop_gradient(values), self.discount * next_timesteps.discount
        # With λ = 1 these are Monte-Carlo returns; the value of the last timestep ends the sum.
        rewards = next_timesteps.reward
        returns = lambda_returns(baseline[:-1], baseline[1:], rewards, discount, valid, 1.0)
        chosen = jax.nn.one_hot(trajectory.steps.action, log_probs.shape[-1])
        policy_loss = (baseline[:-1] - returns) * jnp.sum(log_probs * chosen, axis=-1)
        value_loss = 0.5 * (returns - values[:-1]) ** 2
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        losses = policy_loss + 0.5 * value_loss - self.entropy_cost * entropy
        parts = {"loss": losses, "value_loss": value_loss, "entropy": entropy}
        means = {name: podracer.mean_of(x, valid) for name, x in parts.items()}
        return means["loss"], means

    @property
    def _network(self) -> podracer.Network:
        assert self.spec is not None
        assert isinstance(self.spec.action, Discrete)
        heads = {"policy": Head(self.spec.action.num_actions, 0.01), "value": Head(1)}
        return self.network.build(self.spec.observation, heads)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(self.learning_rate))


def main(**overrides: Any) -> float:
    """Train on CartPole; return the mean return of the last evaluation."""
    driver = podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=20)
    show, agent = [podracer.console], Reinforce()
    result = podracer.train("cartpole_ppo", agent=agent, driver=driver, sinks=show, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.1f}; the most possible is 500")
