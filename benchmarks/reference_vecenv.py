"""Device environments of podracer as stable-baselines3 takes them; needs podracer's packages."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from podracer import envs
from podracer.environment import evaluation_environment
from podracer.types import Continuous


class DeviceVecEnv(VecEnv):
    """A batch of copies of an environment, stepped by one compiled function."""

    def __init__(self, name: str, num_envs: int, seed: int, *, evaluation: bool) -> None:
        env: Any = envs.make(name)
        self.env = evaluation_environment(env) if evaluation else env
        self.key, self.state, self.actions = jax.random.key(seed), None, None
        spec = self.env.spec
        shape = spec.observation.shape
        if isinstance(spec.action, Continuous):
            low, high = (np.asarray(x, np.float32) for x in (spec.action.low, spec.action.high))
            action_space: gymnasium.Space = gymnasium.spaces.Box(low, high)
        else:
            action_space = gymnasium.spaces.Discrete(spec.action.num_actions)
        super().__init__(
            num_envs, gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32), action_space
        )
        self.compiled_reset = jax.jit(jax.vmap(self.env.reset))
        self.compiled_step = jax.jit(self._step)

    def _step(self, key: jax.Array, state: Any, actions: jax.Array) -> Any:
        step_keys, restart_keys = jax.random.split(key, (2, self.num_envs))
        state, timestep = jax.vmap(self.env.step)(step_keys, state, actions)
        # The step after a time-out ignores its action and restarts.
        restarted, first = jax.vmap(self.env.step)(restart_keys, state, actions)

        def choose(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(timestep.last.reshape(-1, *[1] * (x.ndim - 1)), x, y)

        observation = choose(first.observation, timestep.observation)
        return jax.tree.map(choose, restarted, state), observation, timestep

    def _next_key(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key

    def reset(self) -> np.ndarray:
        self.state, timestep = self.compiled_reset(
            jax.random.split(self._next_key(), self.num_envs)
        )
        return np.asarray(timestep.observation, np.float32)

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        outputs = self.compiled_step(self._next_key(), self.state, self.actions)
        self.state, (observation, timestep) = outputs[0], jax.device_get(outputs[1:])
        terminal, truncated = timestep.discount == 0, timestep.last
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(terminal | truncated):
            infos[row]["terminal_observation"] = np.array(timestep.observation[row], np.float32)
            infos[row]["TimeLimit.truncated"] = bool(truncated[row] and not terminal[row])
        rewards = np.array(timestep.reward)  # a copy that can be written
        return np.array(observation, np.float32), rewards, terminal | truncated, infos

    def seed(self, seed: int | None = None) -> list[None]:
        return [None] * self.num_envs

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs
