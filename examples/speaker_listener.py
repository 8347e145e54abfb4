"""A speaker sees a color; a listener, who hears one word, points at it. They share no parameters.

In this folder, with packages/agents: podracer train speaker_listener:naming --speaker.discount 0.9
"""

import jax
import jax.numpy as jnp

import podracer
from podracer import A2C, PPO, AnakinConfig, ArraySpec, Discrete
from podracer_agents.independent import IndependentLearners, joint_spec


@podracer.struct
class Naming:
    five = (ArraySpec((5,)), Discrete(5))
    spec = joint_spec("naming", speaker=five, listener=five)

    def reset(self, key):
        color = jax.random.randint(key, (), 0, 5)
        seen = {"speaker": jax.nn.one_hot(color, 5), "listener": jnp.zeros(5)}
        return (color, jnp.bool_(False)), podracer.restart(seen)

    def step(self, key, state, action):
        (color, hears), (word, guess) = state, action
        seen = {"speaker": jnp.zeros(5), "listener": jax.nn.one_hot(word, 5)}
        reward = hears & (guess == color)
        return (color, jnp.bool_(True)), podracer.transition(seen, reward, terminal=hears)


@podracer.struct
class Pair(IndependentLearners):
    speaker: A2C = A2C(learning_rate=3e-3)
    listener: PPO = PPO(learning_rate=3e-3)


def naming():
    """A2C speaks, PPO listens."""
    driver, env = AnakinConfig(64, 16, 20), podracer.auto_reset(Naming())
    return podracer.Experiment(environment=env, agent=Pair(), driver=driver, frames=102_400)
