"""Behavior cloning from a file of observations and actions, then PPO from its weights.

The clone builds PPO and replaces `learn`: its state is PPO's own, so that
`train(..., begin=podracer.Weights(RUN))` goes on from it. The file is the settings' data file, read
once.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import podracer
from podracer import LearnerState, Trajectory
from podracer.types import Metrics


@podracer.struct
class Clone:
    """PPO's policy, fitted to the actions of a file instead of to rewards."""

    ppo: podracer.PPO = podracer.PPO()
    """Settings of PPO, whose network it trains."""
    learning_rate: float = podracer.bounded(1e-3)
    """Learning rate of Adam, which begins anew in each update."""
    batch_size: int = podracer.static(default=256, low=1)
    """Number of steps of the file in a minibatch of each device."""
    num_steps: int = podracer.static(default=100, low=1)
    """Number of minibatches in an update."""
    data_file: str = podracer.static(default="")
    """File of NumPy with the arrays `observation` `[N, ...]` and `action` `[N]`."""

    def read(self, content: bytes) -> dict[str, np.ndarray]:
        """Return the arrays in the content of the file."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return {name: file[name] for name in ("observation", "action")}

    def build(self, spec: podracer.EnvironmentSpec, context: podracer.Context) -> podracer.Agent:
        ppo, data = self.ppo.build(spec, context), jax.tree.map(jnp.asarray, context.data)
        optimizer = optax.adam(self.learning_rate)
        distribution: Any = ppo.distribution

        def loss(params: Any, shared: Any, batch: Any) -> tuple[jax.Array, Metrics]:
            actor = ppo.actor_params(LearnerState(dataclasses.replace(shared, params=params)))
            size = len(batch["action"])
            timestep = jax.vmap(podracer.restart)(batch["observation"])
            policy, _ = distribution(actor, ppo.carry(size), timestep)
            is_match = jnp.mean(policy.mode() == batch["action"])
            return -jnp.mean(policy.log_prob(batch["action"])), {"accuracy": is_match}

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, Metrics]:
            def step(learner: Any, key: jax.Array) -> tuple[Any, Metrics]:
                params, optimizer_state = learner
                items = jax.random.randint(key, (self.batch_size,), 0, len(data["action"]))
                batch = jax.tree.map(lambda x: x[items], data)
                grads, metrics = podracer.global_grad(loss, params, state.shared, batch, axis=axis)
                updates, optimizer_state = optimizer.update(grads, optimizer_state)
                return (optax.apply_updates(params, updates), optimizer_state), metrics

            learner = (state.shared.params, optimizer.init(state.shared.params))
            keys = jax.random.split(key, self.num_steps)
            (params, _), metrics = jax.lax.scan(step, learner, keys)
            shared = dataclasses.replace(state.shared, params=params)
            return LearnerState(shared, state.local), jax.tree.map(jnp.mean, metrics)

        return dataclasses.replace(ppo, learn=learn)


def record_teacher(file: Path, num_envs: int = 64, length: int = 200) -> None:
    """Write what a rule of thumb does on CartPole: push towards the side that the pole falls to."""
    env = podracer.make("cartpole")

    def step(timestep_and_state: Any, key: jax.Array) -> Any:
        state, timestep = timestep_and_state
        lean = timestep.observation @ jnp.asarray([0.1, 0.3, 1.0, 1.0])
        action = (lean > 0).astype(jnp.int32)
        keys = jax.random.split(key, num_envs)
        return jax.vmap(env.step)(keys, state, action), (timestep.observation, action)

    start = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))
    _, arrays = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), length))
    observation, action = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in arrays)
    np.savez(file, observation=observation, action=action)


def main(clone_frames: int = 20_480, **overrides: Any) -> tuple[float, float]:
    """Clone the teacher, then train PPO from the clone; return the mean returns of both."""
    with tempfile.TemporaryDirectory() as folder:
        file, ppo = Path(folder) / "teacher.npz", podracer.PPO(learning_rate=1e-4)
        record_teacher(file)
        settings = {"driver": podracer.AnakinConfig(64, 32, updates_per_chunk=5), "evaluations": 1}
        settings |= {"target_return": None, "devices": 1}
        clone = podracer.train(
            "cartpole_ppo",
            recipe="cartpole_clone",
            agent=Clone(ppo, data_file=str(file)),
            frames=clone_frames,
            run_dir=f"{folder}/clone",
            **settings,
        )
        result = podracer.train(
            "cartpole_ppo",
            agent=ppo,
            begin=podracer.Weights(f"{folder}/clone"),
            **settings,
            **overrides,
        )
    returns = (clone.evaluation, result.evaluation)
    return tuple(float(x.returns.mean()) for x in returns)  # pyright: ignore


if __name__ == "__main__":
    print("mean returns {:.1f} and {:.1f}; the most possible is 500".format(*main()))
