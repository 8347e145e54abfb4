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
from podracer import EnvironmentSpec, LearnerState, TimeStep, Trajectory
from podracer.mesh import global_grad
from podracer.networks import MLP, Head, Network, TorsoNetwork
from podracer.ops.returns import lambda_returns


@podracer.struct
class Reinforce:
    """Floats are leaves of the agent, so that a population may vary them; `static` is structure."""

    learning_rate: float = 5e-3
    discount: float = 0.99
    entropy_cost: float = 0.01
    network: TorsoNetwork = podracer.static(default=TorsoNetwork(MLP((64, 64), "tanh")))
    spec: EnvironmentSpec | None = podracer.static(default=None)  # filled in by `train`

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        params = self._network.init(key)
        return LearnerState({"params": params, "optimiser": self._adam.init(params)})

    def carry(self, num_envs: int) -> tuple[()]:
        return ()  # no memory

    def actor_params(self, state: LearnerState) -> Any:
        return state.shared["params"]

    def act(
        self, params: Any, carry: Any, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, Any, Any]:
        logits, _ = self._forward(params, timestep.observation[None], timestep.first[None])
        sample = jax.vmap(jax.random.categorical)(keys, logits[0])
        action = sample if explore else jnp.argmax(logits[0], axis=-1)
        return action.astype(jnp.int32), (), ()

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, dict[str, jax.Array]]:
        params, optimiser = state.shared["params"], state.shared["optimiser"]
        grads, metrics = global_grad(self._loss, params, trajectory, axis=axis)
        updates, optimiser = self._adam.update(grads, optimiser)
        params = optax.apply_updates(params, updates)
        return LearnerState({"params": params, "optimiser": optimiser}), metrics

    def _loss(self, params: Any, trajectory: Trajectory) -> tuple[jax.Array, Any]:
        timesteps, after, valid = trajectory.timesteps(), trajectory.after(), trajectory.valid()
        logits, values = self._forward(params, timesteps.observation, timesteps.first)
        log_probs = jax.nn.log_softmax(logits[:-1])
        chosen = jax.nn.one_hot(trajectory.steps.action, log_probs.shape[-1])
        fixed = jax.lax.stop_gradient(values)
        # With λ = 1 these are Monte-Carlo returns; the value of the last timestep ends the sum.
        returns = lambda_returns(
            fixed[:-1], fixed[1:], after.reward, self.discount * after.discount, valid, 1.0
        )
        mask = valid.astype(jnp.float32)
        policy_loss = -jnp.mean((returns - fixed[:-1]) * jnp.sum(log_probs * chosen, axis=-1))
        value_loss = 0.5 * jnp.mean(mask * (returns - values[:-1]) ** 2)
        entropy = -jnp.mean(mask * jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
        loss = policy_loss + 0.5 * value_loss - self.entropy_cost * entropy
        return loss, {"loss": loss, "value_loss": value_loss, "entropy": entropy}

    def _forward(self, params: Any, observation: Any, first: jax.Array) -> tuple[Any, Any]:
        outputs, _ = self._network.apply(params, (), observation, first)
        return outputs["policy"], outputs["value"][..., 0]

    @property
    def _network(self) -> Network:
        assert self.spec is not None and isinstance(self.spec.action, podracer.Discrete)
        heads = {"policy": Head(self.spec.action.num_actions, 0.01), "value": Head(1)}
        return self.network.build(self.spec.observation, heads)

    @property
    def _adam(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(self.learning_rate))


def main(**overrides: Any) -> float:
    """Train on CartPole; return the mean return of the last evaluation."""
    settings = {
        "recipe": "cartpole_reinforce",
        "agent": Reinforce(),
        "anakin": podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=20),
        "evaluations": 10,
    }
    # Everything else, the environment and the 475 to stop at, is that of the recipe.
    result = podracer.train("cartpole_ppo", show=True, **(settings | overrides))
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.1f}; the most possible is 500")
