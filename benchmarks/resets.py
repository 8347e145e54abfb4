"""What restarting costs in an environment whose worlds are expensive to make: Craftax-Classic.

Random actions in a scan, `num_envs` environments: a fresh world for each of them at each step, as
plain `vmap` computes it, against a few for all (`auto_reset(..., resets_per_step=N)`).
"""

from __future__ import annotations

from typing import Any

import jax
from harness import compare, here, parse, parser

from podracer import envs

NAME = "craftax:Craftax-Classic-Symbolic-v1"


def program(env: Any, num_envs: int, steps: int) -> Any:
    """`state -> state` after so many random steps of each environment."""

    def step(carry: Any, _: None) -> Any:
        state, key = carry
        key, act_key, step_key = jax.random.split(key, 3)
        action = jax.random.randint(act_key, (num_envs,), 0, env.spec.action.num_actions)
        state, timestep = jax.vmap(env.step)(jax.random.split(step_key, num_envs), state, action)
        return (state, key), timestep.reward.sum()

    def run(carry: Any) -> Any:
        carry, rewards = jax.lax.scan(step, carry[0], None, steps)
        return carry, rewards.sum()

    return jax.jit(run, donate_argnums=0)


def main() -> None:
    made = parser(__doc__, num_envs=4)
    made.add_argument("--num-envs", type=int, default=256)
    options = parse(made)
    contenders = []
    for resets, steps in ((4, 20), (1, 20), (16, 20), (0, 1)):
        env = envs.make(NAME, resets_per_step=resets)
        keys = jax.random.split(jax.random.key(0), options.num_envs)
        state = jax.jit(jax.vmap(env.reset))(keys)[0]
        run = program(env, options.num_envs, steps)
        name = f"{resets} resets a step" if resets else "one for each environment"
        start = ((state, jax.random.key(1)), jax.numpy.float32(0))
        contenders.append(here(name, run, start, steps * options.num_envs, resets_per_step=resets))
    settings = {"environment": NAME, "num_envs": options.num_envs}
    compare("Restarts", settings, contenders, options)


if __name__ == "__main__":
    main()
