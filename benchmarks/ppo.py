"""PPO at the settings that others publish, side by side with them.

CartPole (4 epochs, two separate networks with two layers of 64, tanh) with 4 and with 1024
environments, and MinAtar Breakout with 64, each against rejax, PureJaxRL, Stoix and
stable-baselines3 where their Python is given; they are run by `peers.py`. No
evaluation is timed. Stoix runs on one device and on as many as podracer, the others on one.
Then convolutional networks against the same agent with the gradients that JAX writes for them:
MinAtar Breakout, and the Nature network on 84x84x4 pixels. Last the time to solve CartPole, 475 in
the mean of 128 greedy episodes: training and evaluations, compilation apart, three seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from harness import (
    Contender,
    Result,
    anakin,
    append,
    compare,
    convolutions,
    elsewhere,
    parse,
    parser,
)

from podracer import recipes
from podracer.agents.ppo import PPO
from podracer.devices import reductions
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.progress import Orders
from podracer.environment import auto_reset, restart, transition
from podracer.envs import make
from podracer.fields import struct
from podracer.networks import CNN, MLP, TorsoNetwork
from podracer.run.setup import make_driver
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep

PEERS = str(Path(__file__).with_name("peers.py"))
SOLVED, EPISODES = 475.0, 128
EVALUATIONS = 50  # over the whole run, so that the time to a solution is exact enough


@dataclass(frozen=True)
class Setting:
    """One experiment; `updates` is how many a repetition has."""

    environment: str
    peer_environment: str
    envs: int
    length: int
    minibatches: int
    updates: int
    activation: str = "tanh"


SETTINGS = {
    "cartpole-small": Setting("cartpole", "CartPole-v1", 4, 128, 4, 200),
    "cartpole-large": Setting("cartpole", "CartPole-v1", 1024, 128, 16, 2),
    "breakout": Setting("gymnax:Breakout-MinAtar", "Breakout-MinAtar", 64, 128, 8, 10, "relu"),
}
SECTIONS = (*SETTINGS, "breakout-cnn", "nature", "solve")


def against_peers(title: str, setting: Setting, options: argparse.Namespace) -> None:
    if options.quick:
        setting = replace(setting, envs=min(setting.envs, 16), updates=1)
    network = TorsoNetwork(MLP((64, 64), setting.activation), shared=False)
    agent = PPO(num_minibatches=setting.minibatches, network=network)
    env = make(setting.environment)
    config = AnakinConfig(setting.envs, setting.length, setting.updates)
    contenders = [
        anakin(f"podracer, {devices} device(s)", agent, env, config, devices)
        for devices in sorted({1, options.devices})
    ]
    contenders += [
        elsewhere(f"rejax {i}" if len(options.rejax_python) > 1 else "rejax", command)
        for i, command in enumerate(_peers("rejax", options.rejax_python, setting))
    ]
    contenders += [
        elsewhere("purejaxrl", [*command, "--repository", options.purejaxrl])
        for command in _peers("purejaxrl", options.purejaxrl_python, setting)
    ]
    contenders += [
        elsewhere(
            f"stoix, {devices} device(s)",
            [
                "env",
                f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}",
                *command,
                "--repository",
                options.stoix,
            ],
        )
        for devices in sorted({1, options.devices})
        for command in _peers("stoix", options.stoix_python, setting)
    ]
    if setting.peer_environment == "CartPole-v1":  # the other one is not in Gymnasium
        few = replace(setting, updates=max(1, 1024 // (setting.envs * setting.length)))
        contenders += [
            elsewhere("stable-baselines3", command)
            for command in _peers("sb3", options.sb3_python, few)
        ]
    about = {
        "environments": setting.envs,
        "length": setting.length,
        "epochs": 4,
        "minibatches": setting.minibatches,
    }
    results = compare(f"ppo {title}", about, contenders, options)
    print()
    for peer in results[len({1, options.devices}) :]:
        for mine in results[: len({1, options.devices})]:
            _say(mine, peer)


def _peers(library: str, pythons: list[str], setting: Setting) -> list[list[str]]:
    flags = {
        "--environment": setting.peer_environment,
        "--envs": setting.envs,
        "--length": setting.length,
        "--minibatches": setting.minibatches,
        "--updates": setting.updates,
        "--activation": setting.activation,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [[python, PEERS, library, *words] for python in pythons]


def _say(mine: Result, other: Result) -> None:
    print(f"{mine.contender.name}: {mine.ratio(other):.2f} times {other.contender.name}")


# --- convolutions --------------------------------------------------------------------------------


@struct
class PixelState:
    """Where the ball is, how it moves, and the last four frames."""

    position: jax.Array  # i32 [2]
    velocity: jax.Array  # i32 [2]
    frames: jax.Array  # u8 [84, 84, 4]
    time: jax.Array  # i32


class Pixels:
    """A ball that bounces in a box and is to be pushed to the right: 84x84 pixels, the last four
    frames as channels. It is drawn by code and stands for an Atari game."""

    spec = EnvironmentSpec("pixels", ArraySpec((84, 84, 4), jnp.uint8), Discrete(3))

    def reset(self, key: jax.Array) -> tuple[PixelState, TimeStep]:
        position = jax.random.randint(key, (2,), 8, 76, jnp.int32)
        frames = jnp.repeat(_draw(position)[..., None], 4, axis=-1)
        return PixelState(position, jnp.asarray([1, 2]), frames, jnp.int32(0)), restart(frames)

    def step(
        self, key: jax.Array, state: PixelState, action: jax.Array
    ) -> tuple[PixelState, TimeStep]:
        moved = state.position + state.velocity + jnp.asarray([0, 1]) * (action - 1)
        inside = (moved > 4) & (moved < 80)
        position = jnp.clip(moved, 4, 80)
        velocity = jnp.where(inside, state.velocity, -state.velocity)
        frames = jnp.concatenate([state.frames[..., 1:], _draw(position)[..., None]], axis=-1)
        state = PixelState(position, velocity, frames, state.time + 1)
        reward = (position[1] > 42).astype(jnp.float32)
        return state, transition(frames, reward, timeout=state.time >= 1000)


def _draw(position: jax.Array) -> jax.Array:
    y, x = jnp.arange(84)[:, None], jnp.arange(84)[None]
    ball = (jnp.abs(y - position[0]) < 4) & (jnp.abs(x - position[1]) < 4)
    return jnp.where(ball, 255, 0).astype(jnp.uint8)


def against_plain_convolutions(title: str, options: argparse.Namespace) -> None:
    if title == "nature":
        env: Any = auto_reset(Pixels())
        agent = PPO(num_minibatches=4, network=TorsoNetwork(CNN()))
        config = AnakinConfig(16, 2 if options.quick else 16, 1)
    else:
        network = TorsoNetwork(CNN((16,), (3,), (1,), (128,)))
        agent, env = PPO(num_minibatches=8, network=network), make("gymnax:Breakout-MinAtar")
        config = AnakinConfig(16 if options.quick else 64, 16 if options.quick else 128, 1)
    contenders = [_convolutional("our convolution", agent, env, config, options)]
    with convolutions():
        contenders.append(_convolutional("plain convolution", agent, env, config, options))
        if title != "nature":  # whose minibatches are smaller than a block
            split_evenly = reductions.split_evenly
            reductions.split_evenly = lambda indices, limit: indices[None]
            name = "plain, whole minibatches"
            contenders.append(_convolutional(name, agent, env, config, options))
            reductions.split_evenly = split_evenly
    about = {
        "environments": config.num_envs,
        "length": config.rollout_length,
        "epochs": agent.num_epochs,
        "minibatches": agent.num_minibatches,
        "devices": options.devices,
    }
    ours, *others = compare(f"ppo {title}", about, contenders, options)
    print()
    for other in others:
        _say(ours, other)


def _convolutional(
    name: str, agent: PPO, env: Any, config: AnakinConfig, options: argparse.Namespace
) -> Contender:
    return anakin(name, agent, env, config, options.devices)


# --- the time to a solution ----------------------------------------------------------------------


def solve(seed: int, limit: int) -> dict[str, Any]:
    """Seconds and steps of the recipe `cartpole_ppo` until an evaluation is at 475, through the
    same driver as every run."""
    recipe = recipes.find("cartpole_ppo")
    experiment = replace(recipe, seed=seed, evaluations=EVALUATIONS, devices=1)
    driver = make_driver(experiment)
    state, evaluate = driver.init(experiment.key), driver.evaluator(EPISODES, fixed=True)
    evaluate(state)
    compiling, score, steps, began = 0.0, 0.0, 0, time.perf_counter()
    orders = Orders(min(experiment.num_updates, limit), experiment.evaluation_updates.__contains__)
    for progress in driver.run(state, orders):
        compiling += progress.compile_seconds
        steps = progress.updates * experiment.driver.steps_per_update
        if progress.state is not None:
            score = float(evaluate(progress.state).returns.mean())
            if score >= SOLVED:
                break
    seconds = time.perf_counter() - began - compiling
    return {"seconds": seconds, "steps": steps, "score": score, "compile_seconds": compiling}


def solve_elsewhere(python: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    words = [str(word) for pair in settings.items() for word in pair]
    command = [python, PEERS, "rejax", "--solve", str(seed), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def time_to_solve(options: argparse.Namespace) -> None:
    recipe = replace(recipes.find("cartpole_ppo"), evaluations=EVALUATIONS)
    agent: Any = recipe.agent
    every = min(recipe.evaluation_updates) * recipe.driver.steps_per_update
    equal = {
        "--envs": recipe.driver.num_envs,
        "--length": recipe.driver.rollout_length,
        "--minibatches": agent.num_minibatches,
        "--epochs": agent.num_epochs,
        "--learning-rate": agent.learning_rate,
        "--evaluate-every": every,
    }
    # The configuration for CartPole in rejax's repository.
    own = {
        "--envs": 5,
        "--length": 100,
        "--minibatches": 5,
        "--epochs": 5,
        "--learning-rate": 7.5e-4,
        "--evaluate-every": 1000,
    }
    limit = min(recipe.evaluation_updates) if options.quick else recipe.num_updates
    if options.quick:
        equal["--limit"] = own["--limit"] = every
    runs = {"podracer": lambda seed: solve(seed, limit)}
    for python in options.rejax_python:
        runs["rejax, our settings"] = partial(solve_elsewhere, python, settings=equal)
        runs["rejax, its settings"] = partial(solve_elsewhere, python, settings=own)
    print(f"\nppo solve (CartPole, {SOLVED:.0f} in the mean of {EPISODES} greedy episodes)\n")
    print(f"{'':22}{'seed':>6}{'seconds':>10}{'steps':>10}{'return':>8}{'compile s':>11}")
    for seed in range(1 if options.quick else 3):
        for _ in range(1 if options.quick else 3):
            for name, run in runs.items():
                made = run(seed)
                print(
                    f"{name:22}{seed:>6}{made['seconds']:>10.2f}{made['steps']:>10,}"
                    f"{made['score']:>8.0f}{made['compile_seconds']:>11.1f}",
                    flush=True,
                )
                record = {"benchmark": "ppo solve", "contender": name, "seed": seed, **made}
                append(options.out, record)


def main() -> None:
    made = parser(__doc__, devices=2)
    made.add_argument("--rejax-python", action="append", default=[], help="a Python with rejax")
    made.add_argument(
        "--sb3-python", action="append", default=[], help="a Python with stable-baselines3"
    )
    made.add_argument(
        "--purejaxrl-python", action="append", default=[], help="a Python for PureJaxRL"
    )
    made.add_argument("--purejaxrl", default="purejaxrl", help="checkout of PureJaxRL")
    made.add_argument("--stoix-python", action="append", default=[], help="a Python for Stoix")
    made.add_argument("--stoix", default="stoix", help="checkout of Stoix")
    made.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    options = parse(made)
    for section in options.only:
        if section in SETTINGS:
            against_peers(section, SETTINGS[section], options)
        elif section == "solve":
            time_to_solve(options)
        else:
            against_plain_convolutions(section, options)


if __name__ == "__main__":
    main()
